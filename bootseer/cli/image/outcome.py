"""What `image mount` and `image run` say of a mount. Knows no click."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bootseer.cli.shared import size_text

if TYPE_CHECKING:
    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.run.run_image import RunPlan


def write_events_to(folder: str) -> None:
    """Let our own events join those of the job, where nothing else is said of them."""
    if folder:
        os.environ.setdefault("BOOTSEER_EVENTS", os.path.abspath(folder))


def tell(made: MountedImage) -> None:
    """Which way it went: what is not as usual, then one line."""
    for note in made.notes:
        _say(note)
    if made.shared:
        way = "another mount of this node serves it"
    elif made.complete:
        way = "all of it is on this node's disk"
    elif made.hot_set and not made.hot_bytes:  # a pack without frames: whole blocks are fetched
        way = "its hot set, most of the image, follows block by block"
    elif made.hot_set:
        way = f"a hot set of {size_text.shown(made.hot_bytes)} follows"
    else:
        way = "no hot set: bytes arrive as they are read"
    _say(f"mounted {made.digest[:19]}; {way}")


def report_plan(plan: RunPlan) -> None:
    """Whether a container runs on the mounted image, or why podman pulls it."""
    if plan.mounted is not None:
        tell(plan.mounted)
    else:
        _say(f"podman pulls the image: {plan.reason}")


def complain(text: str) -> None:
    """What went wrong below a container that runs."""
    _say(text)


def print_json(made: MountedImage) -> None:
    """All that concerns others as JSON on standard output."""
    import json

    from bootseer import light_dataclasses as dataclasses

    told = dataclasses.asdict(made)
    del told["state"]
    sys.stdout.write(json.dumps(told, indent=1) + "\n")


def _say(text: str) -> None:
    """Write one line to standard error; where that is closed or full, the exit code still tells."""
    try:
        sys.stderr.write(f"bootseer: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
