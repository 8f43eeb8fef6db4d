"""Records of where shared trees are mounted or linked: they pin the trees and allow to undo that.

Each is a directory `placements/<hash of target and mount namespace>/` in the cache (containers of
one node have the same paths) with `record.json` and, for an overlay, its private layers. Copies and
hard links need no record: they do not read the tree again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from bootseer.depsnap.restore import staging
from bootseer.depsnap.types import Digest
from bootseer.light_dataclasses import dataclass
from bootseer.system import mount_calls, sha256
from bootseer.system.atomic import replace_file
from bootseer.system.mountinfo import is_mounted
from bootseer.system.processes import (
    boot_id,
    mount_namespace,
    mount_namespace_has_ended,
    pid_namespace,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from bootseer.depsnap.types import Form

PRIVATE = "private"
"""Where in a placement's folder a tmpfs for its layer is mounted, when it needs one."""
IMAGE = "image"
"""Where in a placement's folder a packed tree is mounted while the overlay over it is made."""
UPPER = "upper"
"""The layer that holds an overlay's writes, in the placement's folder or in that tmpfs."""


@dataclass(frozen=True, slots=True)
class Record:
    """One placement. `created`: the target directory is ours to remove again."""

    folder: str
    target: str
    form: Form
    digest: Digest
    source: str
    created: bool
    namespace: int
    pid_namespace: int
    boot: str

    @property
    def alive(self) -> bool | None:
        """Whether it still exists; None when another mount namespace hides the answer."""
        if self.is_linked:
            return True
        if self.boot != boot_id():
            return False
        if self.namespace == mount_namespace():
            return self.form != "symlink" and is_mounted(self.target)
        ended = mount_namespace_has_ended(self.namespace, self.pid_namespace)
        return False if ended else None

    @property
    def is_linked(self) -> bool:
        """Whether it is a symlink that is still as it was made, as seen from here."""
        if self.form != "symlink" or not os.path.islink(self.target):
            return False
        return os.readlink(self.target) == self.source

    @property
    def was_written(self) -> bool:
        """Whether anything was written through an overlay."""
        for place in (self.folder, os.path.join(self.folder, PRIVATE)):
            upper = os.path.join(place, UPPER)
            if os.path.isdir(upper) and os.listdir(upper):
                return True
        return False


def folder_of(cache_dir: str, target: str) -> str:
    """Where the record of a placement that is made now, in this mount namespace, is kept."""
    name = f"{mount_namespace()} ".encode() + os.fsencode(target)
    digest = sha256.of_bytes(name)[:32]
    return os.path.join(os.path.abspath(cache_dir), "placements", digest)


def find(cache_dir: str, target: str) -> Record | None:
    """The record of a placement at `target` in this mount namespace, which may have ended.

    A symlink outlives its namespace and the boot, so one made in another is found as well.
    """
    own = read(folder_of(cache_dir, target))
    if own is not None or not os.path.islink(target):
        return own
    linked = (r for r in all_records(cache_dir) if r.target == target and r.is_linked)
    return next(linked, None)


def write(folder: str, target: str, form: Form, digest: Digest, source: str, created: bool) -> None:
    """Record a placement that is about to be made, so that a kill leaves none unrecorded."""
    row = {
        "target": target,
        "form": form,
        "digest": digest,
        "source": source,
        "created": created,
        "namespace": mount_namespace(),
        "pid_namespace": pid_namespace(),
        "boot": boot_id(),
    }
    # Not synced: it holds for this boot alone.
    replace_file(os.path.join(folder, "record.json"), json.dumps(row).encode(), sync=False)


def read(folder: str) -> Record | None:
    """The record in a folder; None when there is none or it is damaged."""
    try:
        with open(os.path.join(folder, "record.json"), "rb") as file:
            row: dict[str, Any] = json.loads(file.read().decode("ascii"))
        return Record(
            folder,
            row["target"],
            row["form"],
            Digest(row["digest"]),
            row["source"],
            row["created"],
            row["namespace"],
            row["pid_namespace"],
            row["boot"],
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def all_records(cache_dir: str) -> Iterator[Record]:
    """The records of all placements of a cache."""
    folder = os.path.join(os.path.abspath(cache_dir), "placements")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        record = read(os.path.join(folder, name))
        if record is not None:
            yield record


def in_use(cache_dir: str, digest: Digest) -> bool:
    """Whether a placement of this tree exists, or may exist in another mount namespace."""
    return any(r.digest == digest and r.alive is not False for r in all_records(cache_dir))


def sweep(cache_dir: str) -> int:
    """Remove the records and layers of placements that have ended; how many."""
    count = 0
    for record in list(all_records(cache_dir)):
        if record.alive is False:
            forget(record.folder)
            count += 1
    return count


def forget(folder: str) -> None:
    """Remove a placement's record and layers, and what is mounted in its folder."""
    for name in (PRIVATE, IMAGE):
        place = os.path.join(folder, name)
        if is_mounted(place):
            mount_calls.unmount(place)
    staging.remove_tree(folder)
