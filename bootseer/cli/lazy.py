"""A click group that imports a command when that command is used."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """Knows its commands' names and help without importing them.

    `commands_in` maps a command to (module of `bootseer.cli`, one-line help); `attribute` names
    the click command in that module, with `{}` for the command's own name.
    """

    def __init__(
        self,
        *args: Any,
        commands_in: dict[str, tuple[str, str]],
        attribute: str = "command",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._commands_in = commands_in
        self._attribute = attribute

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_in)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._commands_in.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"bootseer.cli.{entry[0]}")
        found = getattr(module, self._attribute.format(cmd_name))
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._commands_in.items()])
