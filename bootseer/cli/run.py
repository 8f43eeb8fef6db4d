"""`bootseer run` for click: its help. The command itself never goes through click."""

from __future__ import annotations

from bootseer.cli.shared.hand_parsed_help import command_of
from bootseer.entrypoint import run

command = command_of("run", "Run a command as one measured phase.", run.HELP, run.main)
