"""The snapshotter's memory: one SQLite file that a kill at any moment leaves whole.

Every change is one transaction on disk before the caller hears of it. Directories are made before
the row that names them and removed after it is gone, so that what a kill leaves behind is a
directory without a row, never a row without its directory.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.imageprefetch.snapshotter.types import (
    NOTHING,
    Image,
    Kind,
    Snapshot,
    SnapshotExistsError,
    SnapshotStateError,
    Usage,
)

VERSION = 1
_SCHEMA = """
CREATE TABLE snapshots (
  name TEXT PRIMARY KEY,
  parent TEXT NOT NULL,
  kind INTEGER NOT NULL,
  created_ns INTEGER NOT NULL,
  updated_ns INTEGER NOT NULL,
  folder TEXT NOT NULL,
  labels TEXT NOT NULL,
  size_bytes INTEGER NOT NULL DEFAULT 0,
  inodes INTEGER NOT NULL DEFAULT 0,
  image TEXT NOT NULL DEFAULT '',
  depth INTEGER NOT NULL DEFAULT 0,
  top INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX snapshots_by_parent ON snapshots (parent);
CREATE INDEX snapshots_by_image ON snapshots (image) WHERE image != '';
CREATE TABLE images (
  digest TEXT PRIMARY KEY,
  reference TEXT NOT NULL,
  layers TEXT NOT NULL
) STRICT;
"""
_COLUMNS = (
    "name, parent, kind, created_ns, updated_ns, folder, labels, size_bytes, inodes, image,"
    " depth, top"
)


class State:
    """Snapshots and images; safe to use from several threads."""

    def __init__(self, path: str) -> None:
        """Open the file, made when missing. Raises CorruptDataError when it is none of ours."""
        self._path = path
        self._lock = threading.Lock()
        with _mapped(path):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")  # containerd syncs its side as well
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    self._db.executescript(
                        f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
                    )
            except BaseException:  # who asked never had it to close
                self._db.close()
                raise
        if version not in (0, VERSION):
            self._db.close()
            raise UsageError(
                f"the state {path} is of version {version}, we know {VERSION}; use the bootseer "
                "that wrote it, or stop containerd and remove the snapshotter's directory"
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _mapped(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:  # the next transaction needs a clean one
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, where: str, values: Sequence[Any] = ()) -> list[Snapshot]:
        with self._lock, _mapped(self._path):
            return _select(self._db, where, values)

    # --- reading ----------------------------------------------------------------------------

    def get(self, name: str) -> Snapshot:
        """Raises NotFoundError."""
        return _one(self._rows("name = ?", (name,)), name)

    def open(self, key: str) -> Snapshot:
        """An active snapshot or a view. Raises NotFoundError, SnapshotStateError."""
        row = self.get(key)
        if row.kind is Kind.COMMITTED:
            raise SnapshotStateError(f"the snapshot {key} is committed: it has no mounts")
        return row

    def all(self) -> list[Snapshot]:
        return self._rows("1 ORDER BY created_ns, rowid")

    def chain(self, name: str) -> list[Snapshot]:
        """The snapshot and its parents, nearest first; empty for "". Raises NotFoundError."""
        out: list[Snapshot] = []
        with self._lock, _mapped(self._path):
            while name:
                out.append(_one(_select(self._db, "name = ?", (name,)), name))
                name = out[-1].parent
        return out

    def folders(self) -> set[str]:
        return {row.folder for row in self._rows("folder != ''")}

    def remote(self) -> list[Snapshot]:
        """All that stand for layers of images."""
        return self._rows("image != ''")

    def images(self) -> list[Image]:
        with self._lock, _mapped(self._path):
            rows = self._db.execute("SELECT digest, reference, layers FROM images").fetchall()
        return [Image(digest, name, tuple(json.loads(layers))) for digest, name, layers in rows]

    def find_image(self, digest: str) -> Image | None:
        return next((one for one in self.images() if one.digest == digest), None)

    def image(self, digest: str) -> Image:
        """Raises NotFoundError."""
        found = self.find_image(digest)
        if found is None:
            raise NotFoundError(f"the image {digest} is not in use here; pull it first")
        return found

    def uses(self, digest: str) -> list[Snapshot]:
        """The remote snapshots of an image."""
        return self._rows("image = ?", (digest,))

    # --- changing ---------------------------------------------------------------------------

    def create(
        self, kind: Kind, name: str, parent: str, folder: str, labels: Mapping[str, str]
    ) -> Snapshot:
        """Add an active snapshot or a view.

        Raises SnapshotExistsError, NotFoundError (no such parent), UsageError (a parent that is
        not committed).
        """
        now = time.time_ns()
        row = Snapshot(name, parent, kind, now, now, folder, dict(labels))
        with self._changing() as db:
            _check_parent(db, parent)
            _insert(db, row)
        return row

    def add_remote(
        self, name: str, parent: str, labels: Mapping[str, str], image: Image, depth: int
    ) -> bool:
        """Add the snapshot that stands for layer `depth` of `image`; False when it is there.

        Raises NotFoundError and UsageError for its parent.
        """
        now = time.time_ns()
        row = Snapshot(
            name, parent, Kind.COMMITTED, now, now, "", dict(labels), NOTHING,
            image.digest, depth, depth == len(image.layers) - 1,
        )  # fmt: skip
        with self._changing() as db:
            there = bool(_select(db, "name = ? AND image != ''", (name,)))
            if not there:
                _check_parent(db, parent)
                _insert(db, row)
            db.execute(
                "INSERT INTO images VALUES (?, ?, ?) ON CONFLICT (digest) DO UPDATE "
                "SET reference = excluded.reference",
                (image.digest, image.reference, json.dumps(image.layers)),
            )
        return not there

    def commit(self, key: str, name: str, usage: Usage, labels: Mapping[str, str]) -> None:
        """Make the active snapshot `key` the committed one `name`, with labels of its own.

        Raises NotFoundError, SnapshotStateError (a view), SnapshotExistsError.
        """
        now = time.time_ns()
        with self._changing() as db:
            row = _one(_select(db, "name = ?", (key,)), key)
            if row.kind is not Kind.ACTIVE:
                raise SnapshotStateError(
                    f"cannot commit the snapshot {key}: it is {row.kind.name.lower()}, not active"
                )
            db.execute("DELETE FROM snapshots WHERE name = ?", (key,))
            _insert(
                db,
                replace(
                    row, name=name, kind=Kind.COMMITTED, created_ns=now, updated_ns=now,
                    labels=dict(labels), usage=usage,
                ),
            )  # fmt: skip

    def remove(self, name: str) -> Snapshot:
        """Forget a snapshot; its folder is the caller's to remove.

        Raises NotFoundError, and SnapshotStateError while others stand on it.
        """
        with self._changing() as db:
            row = _one(_select(db, "name = ?", (name,)), name)
            child = db.execute("SELECT name FROM snapshots WHERE parent = ?", (name,)).fetchone()
            if child is not None:
                raise SnapshotStateError(
                    f"cannot remove the snapshot {name}: {child[0]} stands on it; remove that first"
                )
            db.execute("DELETE FROM snapshots WHERE name = ?", (name,))
        return row

    def update(self, name: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Set labels: all of them, or those that `paths` names (`labels`, `labels.KEY`).

        A label set to nothing is removed, as containerd does. Raises NotFoundError, and
        UsageError for a path of what cannot be changed.
        """
        with self._changing() as db:
            row = _one(_select(db, "name = ?", (name,)), name)
            new = replace(
                row, labels=_changed_labels(row, labels, paths), updated_ns=time.time_ns()
            )
            db.execute(
                "UPDATE snapshots SET labels = ?, updated_ns = ? WHERE name = ?",
                (json.dumps(new.labels), new.updated_ns, name),
            )
        return new

    def forget_image(self, digest: str) -> bool:
        """Forget an image that no remote snapshot stands for; False while one does."""
        with self._changing() as db:
            if _select(db, "image = ?", (digest,)):
                return False
            db.execute("DELETE FROM images WHERE digest = ?", (digest,))
        return True


def _changed_labels(
    row: Snapshot, labels: Mapping[str, str], paths: Sequence[str]
) -> dict[str, str]:
    out = dict(row.labels) if paths else dict(labels)
    for path in paths:
        if path == "labels":
            out = dict(labels)
        elif path.startswith("labels."):
            key = path.removeprefix("labels.")
            out[key] = labels.get(key, "")
        else:
            raise UsageError(
                f"cannot update {path} of the snapshot {row.name}: only labels can be changed"
            )
    return {key: value for key, value in out.items() if value}


def _check_parent(db: sqlite3.Connection, parent: str) -> None:
    if parent and _one(_select(db, "name = ?", (parent,)), parent).kind is not Kind.COMMITTED:
        raise UsageError(f"the parent {parent} is not a committed snapshot; commit it first")


def _insert(db: sqlite3.Connection, row: Snapshot) -> None:
    values = (
        row.name, row.parent, int(row.kind), row.created_ns, row.updated_ns, row.folder,
        json.dumps(dict(row.labels)), row.usage.size_bytes, row.usage.inodes, row.image,
        row.depth, int(row.top),
    )  # fmt: skip
    if not row.name:
        raise UsageError("a snapshot needs a name; give one")
    try:
        marks = ", ".join("?" * len(values))
        db.execute(f"INSERT INTO snapshots ({_COLUMNS}) VALUES ({marks})", values)
    except sqlite3.IntegrityError as error:
        raise SnapshotExistsError(f"the snapshot {row.name} exists already") from error


def _select(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Snapshot]:
    rows = db.execute(f"SELECT {_COLUMNS} FROM snapshots WHERE {where}", values)
    return [
        Snapshot(
            name, parent, Kind(kind), created_ns, updated_ns, folder, json.loads(labels),
            Usage(size_bytes, inodes), image, depth, bool(top),
        )
        for name, parent, kind, created_ns, updated_ns, folder, labels, size_bytes, inodes, image,
        depth, top in rows
    ]  # fmt: skip


def _one(rows: Sequence[Snapshot], name: str) -> Snapshot:
    if not rows:
        raise NotFoundError(f"the snapshot {name} does not exist")
    return rows[0]


@contextmanager
def _mapped(path: str) -> Iterator[None]:
    """SQLite's faults as ours."""
    try:
        yield
    except BootseerError:
        raise
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
            raise NoSpaceError(f"no space for the state {path}; free some") from error
        raise StoreUnavailableError(
            f"cannot use the state {os.fspath(path)}: {error}; check its disk and owner"
        ) from error
    except sqlite3.ProgrammingError as error:  # a call that the end has overtaken
        raise StoreUnavailableError(f"the state {path} is closed: {error}; ask again") from error
    except sqlite3.DatabaseError as error:
        raise CorruptDataError(
            f"the state {path} is damaged: {error}; stop containerd, remove the snapshotter's "
            "directory and pull the images again"
        ) from error
