"""Which of podman's own options may stand in a command line of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bootseer.errors import UsageError

EVENTS_INSIDE = "/.bootseer-events"
"""Where a container sees its job's events: in the root, where no link of the image can stand in
the way."""
_DETACHED = re.compile(r"-[itPq]*d.*|--detach(=true)?")


def check_options(options: Sequence[str], *, instead: str, ours: Sequence[str] = ()) -> None:
    """Raise UsageError for what is no option, would detach, or is ours to give.

    `instead` says what to do where a container is to run in the background; `ours` are options
    beside --rootfs that we give ourselves.
    """
    if options and not options[0].startswith("-"):
        raise UsageError(
            f"{options[0]!r} is no option of podman; put -- before the command to be run"
        )
    for word in options:
        if _DETACHED.fullmatch(word):
            raise UsageError(
                f"the image is mounted for as long as the container runs in front; leave {word} "
                f"out{instead}"
            )
        name = word.partition("=")[0]
        if name in ("--rootfs", *ours):
            raise UsageError(f"{name} is ours to give; leave it out")


def names_network(options: Sequence[str]) -> bool:
    """Whether they choose the container's network."""
    return any(word.partition("=")[0] in ("--network", "--net") for word in options)
