"""A click group that imports a command's module only when that command is used."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that lists its commands and their one-line help without importing them.

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
        command = getattr(module, self._attribute.format(cmd_name))
        assert isinstance(command, click.Command)
        if ctx.auto_envvar_prefix is not None:
            _add_environment_variables(command, _variable_name(ctx.auto_envvar_prefix, cmd_name))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._commands_in.items()])


def _add_environment_variables(command: click.Command, prefix: str) -> None:
    """Let each option be set by an environment variable that is named after the option.

    click derives the variable from the parameter's name, which often differs from the option's
    (`--json` is `as_json`); that variable still works.
    """
    for option in command.params:
        word = max((o for o in option.opts if o.startswith("--")), key=len, default="")
        if word and option.name and option.envvar is None:
            names = (_variable_name(prefix, word.lstrip("-")), _variable_name(prefix, option.name))
            option.envvar = list(dict.fromkeys(names))
    if isinstance(command, click.Group):  # a LazyGroup has none here: its get_command does this
        for name, subcommand in command.commands.items():
            _add_environment_variables(subcommand, _variable_name(prefix, name))


def _variable_name(prefix: str, word: str) -> str:
    return f"{prefix}_{word}".replace("-", "_").upper()
