"""`bootseer stripe`: checkpoints striped over many objects of a store."""

from __future__ import annotations

import click

from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.cli.shared.options import Decorator

COMMANDS: dict[str, tuple[str, str]] = {
    "put": ("stripe.put", "Store a file or directory as a striped checkpoint."),
    "get": ("stripe.get", "Fetch a checkpoint, or any plain file, in parallel."),
    "cat": ("stripe.cat", "Write a file of a store to standard output."),
    "ls": ("stripe.ls", "List checkpoints, or what one holds."),
    "verify": ("stripe.verify", "Read a checkpoint whole and check every byte."),
    "rm": ("stripe.rm", "Remove a striped checkpoint."),
    "gc": ("stripe.gc", "Remove replaced versions and orphaned temporaries."),
    "mount": ("stripe.mount", "Mount checkpoints as files that any program can read."),
    "umount": ("stripe.umount", "Unmount what `mount` mounted."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Checkpoints striped over many objects, so that they arrive at the speed of many streams.

    A URL is a path, file://, hdfs://, webhdfs://, webhdfss:// or (to read) http(s)://.
    """


def jobs_option(text: str) -> Decorator:
    """Return the option `--jobs` with `text` as its help."""
    return click.option("--jobs", type=click.IntRange(1, 256), default=None, metavar="N", help=text)


def resume_option(text: str) -> Decorator:
    """Return the option `--resume/--no-resume` with `text` as its help."""
    return click.option("--resume/--no-resume", default=True, show_default=True, help=text)
