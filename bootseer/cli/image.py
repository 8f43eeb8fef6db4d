"""`bootseer image`: container images that start before they are pulled."""

from __future__ import annotations

import click

from bootseer.cli.lazy import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("image_build", "Make the block image of a stock image, once."),
    "run": ("image_run", "Run a container of an image that is not pulled first."),
    "mount": ("image_mount", "Mount an image at once; its bytes arrive as they are read."),
    "umount": ("image_umount", "Unmount what `mount` mounted."),
    "agent": ("image_agent", "Stand ready, so that mounts begin at once."),
    "record": ("image_record", "Run a command and record what its start reads."),
    "replay": ("image_replay", "Read a hot set ahead in a mounted image."),
    "hotset": ("image_hotset", "Build, merge, push and show hot sets."),
    "files": ("image_files", "Record and replay a start's files, without any privilege."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Container images that start before they are pulled.

    REF names a stock image as container programs do (debian:12, registry.example/team/train:v3);
    tags and images stay untouched.
    """
