"""`bootseer image`: container images that start before they are pulled."""

from __future__ import annotations

import click

from bootseer.cli.shared.lazy_group import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("image.build", "Make the block image of a stock image, once."),
    "run": ("image.run", "Run a container of an image that is not pulled first."),
    "mount": ("image.mount", "Mount an image at once; its bytes arrive as they are read."),
    "umount": ("image.umount", "Unmount what `mount` mounted."),
    "agent": ("agent", "The same as `bootseer agent`."),
    "record": ("image.record", "Run a command and record what its start reads."),
    "replay": ("image.replay", "Read a hot set ahead in a mounted image."),
    "hotset": ("image.hotset.group", "Build, merge, push and show hot sets."),
    "files": ("image.files.group", "Record and replay a start's files, without any privilege."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Container images that start before they are pulled.

    REF names a stock image as container programs do (debian:12, registry.example/team/train:v3);
    tags and images stay untouched.
    """
