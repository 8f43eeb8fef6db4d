"""The snapshotter's process: its parts put together, and its reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bootseer.errors import BootseerError, UsageError
from bootseer.events.writer import NullWriter
from bootseer.imageprefetch.snapshotter.database import Database
from bootseer.imageprefetch.snapshotter.grpc_server import GRACE_S, GrpcServer, Say, lock_root
from bootseer.imageprefetch.snapshotter.image_mounts import ImageMounter, Report
from bootseer.imageprefetch.snapshotter.labels import RequestedLayer
from bootseer.imageprefetch.snapshotter.snapshotter import Snapshotter
from bootseer.imageprefetch.snapshotter.types import StockImage
from bootseer.reporting import Once

DEFAULT_ROOT = "/var/lib/containerd/io.containerd.snapshotter.v1.bootseer"
"""Where containerd and kubelet look for the disk usage of a snapshotter of this name."""
DEFAULT_ADDRESS = "/run/bootseer/snapshotter.sock"
STATE_FILE = "state.db"
EVENT = "image.snapshotter"
SAME_PULL_S = 300.0
"""Within this time, further requests for an image that is pulled plainly are of the same pull."""
_TEXTS = {
    "lazy": "mounted; nothing needs to be pulled",
    "plain": "handed to the plain way",
    "unpacked": "unpacked from its layers",
    "waiting": "not mounted again yet; its next container will try",
}


@dataclass(frozen=True, slots=True)
class SnapshotterSettings:
    """The directory of the snapshotter's files, and the socket on which it listens."""

    root: str = DEFAULT_ROOT
    address: str = DEFAULT_ADDRESS


def make_reporter(say: Say, writer: NullWriter) -> Report:
    """A function that reports an image by one log line and one event, whatever its layers."""
    pulls = Once(SAME_PULL_S)

    def report(status: str, mode: str, subject: StockImage | RequestedLayer, reason: str) -> None:
        key = (subject.reference, subject.digest, reason)
        if isinstance(subject, RequestedLayer) and not pulls.is_new(key):
            return  # a further layer of an image that is pulled plainly
        name = subject.reference or "an image that the client did not name"
        why = f": {reason}" if reason else ""
        say(f"{name}: {_TEXTS[mode]}{why}")
        attributes = {
            "bootseer.image.mode": mode,
            "container.image.name": subject.reference,
            "oci.manifest.digest": subject.digest,
            "bootseer.reason": reason,
        }
        if isinstance(subject, RequestedLayer):
            attributes["bootseer.image.layer"] = subject.layer  # the first requested one
        writer.point(EVENT, status, {key: value for key, value in attributes.items() if value})

    return report


@contextmanager
def running_snapshotter(
    settings: SnapshotterSettings, mounter: ImageMounter, say: Say, writer: NullWriter
) -> Iterator[None]:
    """Serve containerd within the block; mounts outlive it, as containers may run on them.

    What was mounted before is mounted again in the background, so that containerd waits only for
    images that it requests. Raises BusyError while another snapshotter serves.
    """
    root = os.path.abspath(settings.root)  # containerd mounts by the paths in our answers
    if any(mark in root for mark in ",:\\"):
        raise UsageError(
            f"{root} cannot hold snapshots: overlays know no paths with commas, colons "
            "or backslashes; choose another directory"
        )
    with lock_root(root), Database.open(os.path.join(root, STATE_FILE)) as database:
        snapshotter = Snapshotter(root, database, mounter, make_reporter(say, writer))
        snapshotter.make_folders()
        with GrpcServer.start(snapshotter, settings.address, say):
            restoring = threading.Thread(
                target=_restore, args=(snapshotter, say), name="restore", daemon=True
            )
            restoring.start()
            say(f"listening on {settings.address}")
            try:
                yield
            finally:
                restoring.join(GRACE_S)


def _restore(snapshotter: Snapshotter, say: Callable[[str], None]) -> None:
    try:
        snapshotter.restore()
    except (BootseerError, OSError) as error:
        say(f"cannot tidy up after the last run: {error}")
