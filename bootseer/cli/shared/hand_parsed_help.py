"""Click commands for the commands that parse their own arguments: they only print the help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click


def make_command(
    name: str, summary: str, text: str, main: Callable[[Sequence[str]], int]
) -> click.Command:
    """Return a click command that prints `text` as its help and passes its arguments to `main`."""

    class _HandParsed(click.Command):
        def get_help(self, ctx: click.Context) -> str:
            return text.rstrip()

        def main(self, args: Sequence[str] | None = None, *_: object, **__: object) -> int:  # type: ignore[override]
            return main(list(sys.argv[1:] if args is None else args))

        def make_context(
            self,
            info_name: str | None,
            args: list[str],
            parent: click.Context | None = None,
            **extra: object,
        ) -> click.Context:
            if args and args[0] not in ("-h", "--help"):
                raise click.exceptions.Exit(main(args))
            return super().make_context(info_name, args, parent, **extra)

    return _HandParsed(name, short_help=summary, help=summary, callback=lambda: main([]))
