"""Records of where shared trees are mounted or linked, so that they are pinned and can be undone.

Each is a directory `placements/<hash of the target>/` in the cache with `record.json` and, for an
overlay, its private layers. Copies and hard links need no record: they do not read the tree again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bootseer.depsnap import mounts, staging
from bootseer.depsnap.machine import boot_id
from bootseer.depsnap.model import Digest, Form

PRIVATE = "private"
"""Where in a placement's folder a tmpfs for its layer is mounted, when it needs one."""


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
    boot: str

    @property
    def alive(self) -> bool | None:
        """Whether it still stands; None when another mount namespace hides the answer."""
        if self.form == "symlink":
            return os.path.islink(self.target) and os.readlink(self.target) == self.source
        if self.boot != boot_id():
            return False
        if self.namespace != mounts.namespace():
            return None
        return mounts.mounted(self.target)


def folder_of(cache_dir: str, target: str) -> str:
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return os.path.join(os.path.abspath(cache_dir), "placements", name)


def write(folder: str, target: str, form: Form, digest: Digest, source: str, created: bool) -> None:
    """Written before the placement is made, so that a kill leaves nothing unknown."""
    row = {
        "target": target,
        "form": form,
        "digest": digest,
        "source": source,
        "created": created,
        "namespace": mounts.namespace(),
        "boot": boot_id(),
    }
    temporary = os.path.join(folder, "record.tmp")
    with open(temporary, "w", encoding="ascii") as file:
        json.dump(row, file)
    os.rename(temporary, os.path.join(folder, "record.json"))


def read(folder: str) -> Record | None:
    try:
        with open(os.path.join(folder, "record.json"), encoding="ascii") as file:
            row: dict[str, Any] = json.load(file)
        return Record(
            folder,
            row["target"],
            row["form"],
            Digest(row["digest"]),
            row["source"],
            row["created"],
            row["namespace"],
            row["boot"],
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def all_records(cache_dir: str) -> Iterator[Record]:
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
    """Whether a placement of this tree stands, or may stand in another mount namespace."""
    return any(r.digest == digest and r.alive is not False for r in all_records(cache_dir))


def sweep(cache_dir: str) -> int:
    """Remove the records and layers of placements that are gone; how many."""
    count = 0
    for record in list(all_records(cache_dir)):
        if record.alive is False:
            forget(record.folder)
            count += 1
    return count


def forget(folder: str) -> None:
    """Remove a placement's record and layers, its private tmpfs included."""
    private = os.path.join(folder, PRIVATE)
    if mounts.mounted(private):
        mounts.unmount(private)
    staging.remove_tree(folder)
