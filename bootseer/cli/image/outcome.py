"""What `image mount` and `image run` print about a mount. Does not import click."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bootseer.cli.shared import size_text
from bootseer.entrypoint import job_process

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.run.run_image import RunPlan


def export_events_directory(folder: str) -> None:
    """Let this command's own events go to `folder`, unless BOOTSEER_EVENTS names another place."""
    if folder:
        os.environ.setdefault("BOOTSEER_EVENTS", os.path.abspath(folder))


def print_mounted(mounted: MountedImage) -> None:
    """Print how an image was mounted: notes on what is unusual, then one line."""
    for note in mounted.notes:
        job_process.say(note)
    if mounted.shared:
        way = "another mount of this node serves it"
    elif mounted.complete:
        way = "all of it is on this node's disk"
    elif mounted.hot_set and not mounted.hot_bytes:  # a pack without frames: whole blocks
        way = "its hot set, most of the image, follows block by block"
    elif mounted.hot_set:
        way = f"a hot set of {size_text.format_size(mounted.hot_bytes)} follows"
    else:
        way = "no hot set: bytes arrive as they are read"
    job_process.say(f"mounted {mounted.digest[:19]}; {way}")


def print_plan(plan: RunPlan) -> None:
    """Print whether a container runs on a mounted image or on one that podman pulls."""
    if plan.mounted is not None:
        print_mounted(plan.mounted)
    else:
        job_process.say(f"podman pulls the image: {plan.reason}")


def print_json(mounted: MountedImage) -> None:
    """Print a mount as JSON on standard output, without its internal state."""
    import json

    from bootseer import light_dataclasses as dataclasses

    if sys.stdout is None:
        return  # the exit code is that of the mount
    document = dataclasses.asdict(mounted)
    del document["state"]
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
