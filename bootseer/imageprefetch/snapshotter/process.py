"""The snapshotter as a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bootseer.errors import BootseerError, UsageError
from bootseer.events.writer import NullWriter
from bootseer.imageprefetch.snapshotter import grpc_server
from bootseer.imageprefetch.snapshotter.database import State
from bootseer.imageprefetch.snapshotter.grpc_server import Say, Server, lock_root
from bootseer.imageprefetch.snapshotter.image_mounts import ImageMounter, Report
from bootseer.imageprefetch.snapshotter.labels import Wanted
from bootseer.imageprefetch.snapshotter.snapshotter import Snapshotter
from bootseer.imageprefetch.snapshotter.types import Image

DEFAULT_ROOT = "/var/lib/containerd/io.containerd.snapshotter.v1.bootseer"
"""Where containerd and kubelet look for the disk that a snapshotter of this name fills."""
DEFAULT_ADDRESS = "/run/bootseer/snapshotter.sock"
STATE_FILE = "state.db"
EVENT = "image.snapshotter"
TOLD_S = 300.0
"""Asked for again within this time, an image that is pulled plainly is the same pull."""
_SAID = {
    "lazy": "mounted; nothing needs to be pulled",
    "plain": "handed to the plain way",
    "unpacked": "unpacked from its layers",
    "waiting": "not mounted again yet; its next container will try",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where it listens and keeps its things."""

    root: str = DEFAULT_ROOT
    address: str = DEFAULT_ADDRESS


def reporter(say: Say, writer: NullWriter) -> Report:
    """Tell what became of an image: one line of log and one event, however many layers it has."""
    lock, told = threading.Lock(), dict[tuple[str, str, str], float]()

    def is_news(what: Wanted, reason: str) -> bool:
        now, about = time.monotonic(), (what.reference, what.digest, reason)
        with lock:
            for old in [old for old, asked_s in told.items() if asked_s + TOLD_S < now]:
                del told[old]
            news = about not in told
            told[about] = now
        return news

    def report(status: str, mode: str, what: Image | Wanted, reason: str) -> None:
        if isinstance(what, Wanted) and not is_news(what, reason):
            return  # a further layer of an image that is pulled plainly
        name = what.reference or "an image that the client did not name"
        why = f": {reason}" if reason else ""
        say(f"{name}: {_SAID[mode]}{why}")
        attributes = {
            "bootseer.image.mode": mode,
            "container.image.name": what.reference,
            "oci.manifest.digest": what.digest,
            "bootseer.reason": reason,
        }
        if isinstance(what, Wanted):
            attributes["bootseer.image.layer"] = what.layer  # the first one that was asked for
        writer.point(EVENT, status, {key: value for key, value in attributes.items() if value})

    return report


@contextmanager
def serving(
    settings: Settings, mounter: ImageMounter, say: Say, writer: NullWriter
) -> Iterator[None]:
    """Answer containerd within the block; mounts outlive it, for containers may run on them.

    What was mounted is mounted again in the background: containerd waits for nothing but the
    image it asks for, a registry that is down included. Raises BusyError where another serves.
    """
    root = os.path.abspath(settings.root)  # containerd mounts by the paths that it is told
    if any(mark in root for mark in ",:\\"):
        raise UsageError(
            f"{root} cannot hold snapshots: overlays know no paths with commas, colons "
            "or backslashes; choose another directory"
        )
    with lock_root(root), State(os.path.join(root, STATE_FILE)) as state:
        snapshotter = Snapshotter(root, state, mounter, reporter(say, writer))
        with Server(snapshotter, settings.address, say):
            restoring = threading.Thread(
                target=_restore, args=(snapshotter, say), name="restore", daemon=True
            )
            restoring.start()
            say(f"listening on {settings.address}")
            try:
                yield
            finally:
                restoring.join(grpc_server.GRACE_S)


def _restore(snapshotter: Snapshotter, say: Callable[[str], None]) -> None:
    try:
        snapshotter.restore()
    except (BootseerError, OSError) as error:
        say(f"cannot tidy up after the last run: {error}")
