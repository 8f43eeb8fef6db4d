"""The help of `bootseer run` for click, which the command itself never uses."""

from __future__ import annotations

from bootseer.cli.shared.hand_parsed_help import make_command
from bootseer.entrypoint import run

command = make_command("run", "Run a command as one measured phase.", run.HELP, run.main)
