"""Options given in the environment, by the words of the command and of the option."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from bootseer.cli import root


def _options(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Option, click.Context]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _options(found, click.Context(found, info_name=name, parent=context))
    for option in command.params:
        word = max((o for o in option.opts if o.startswith("--")), key=len, default="")
        if isinstance(option, click.Option) and word:
            yield f"{context.command_path} {word}", option, context


def test_every_option_can_be_given_by_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    top = click.Context(root.group, info_name="bootseer", auto_envvar_prefix="BOOTSEER")
    seen = 0
    for words, option, context in _options(root.group, top):
        if isinstance(option.envvar, str) or words.endswith("--version"):
            continue  # its help names another one
        variable = words.replace(" --", "_").replace(" ", "_").replace("-", "_").upper()
        with monkeypatch.context() as environment:
            for name in option.envvar or ():
                environment.delenv(name, raising=False)
            environment.setenv(variable, "given")
            if "BOOTSEER_EVENTS" in (option.envvar or ()):
                continue
            assert option.resolve_envvar_value(context) == "given", variable
        seen += 1
    assert seen > 100
