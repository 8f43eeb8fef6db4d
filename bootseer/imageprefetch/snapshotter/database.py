"""The snapshotter's database: one SQLite file that survives a kill at any moment.

Every change is one transaction, on disk before the call returns. Directories are made before the
row that names them and removed after it, so that a kill can leave a directory without a row, but
never a row without its directory.
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

from bootseer.context_managers import Closing
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
    Kind,
    Snapshot,
    SnapshotExistsError,
    SnapshotStateError,
    StockImage,
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


class Database(Closing):
    """Snapshots and images; safe to use from several threads."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._path, self._db = path, connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str) -> Database:
        """Open the file, created when missing. Raises CorruptDataError for a damaged one."""
        with _map_errors(path):
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")  # containerd syncs its side as well
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    connection.executescript(
                        f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
                    )
            except BaseException:  # the caller does not have it yet
                connection.close()
                raise
        if version not in (0, VERSION):
            connection.close()
            raise UsageError(
                f"the state {path} is of version {version}, we know {VERSION}; use the bootseer "
                "that wrote it, or stop containerd and remove the snapshotter's directory"
            )
        return cls(path, connection)

    def close(self) -> None:
        """Close the file; twice is safe."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _map_errors(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:  # the next transaction needs a clean one
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, where: str, values: Sequence[Any] = ()) -> list[Snapshot]:
        with self._lock, _map_errors(self._path):
            return _select(self._db, where, values)

    # --- reading ----------------------------------------------------------------------------

    def get(self, name: str) -> Snapshot:
        """A snapshot. Raises NotFoundError."""
        return _one(self._rows("name = ?", (name,)), name)

    def get_open(self, key: str) -> Snapshot:
        """An active snapshot or a view. Raises NotFoundError and SnapshotStateError."""
        row = self.get(key)
        if row.kind is Kind.COMMITTED:
            raise SnapshotStateError(f"the snapshot {key} is committed: it has no mounts")
        return row

    def all(self) -> list[Snapshot]:
        """All snapshots, the oldest first."""
        return self._rows("1 ORDER BY created_ns, rowid")

    def chain(self, name: str) -> list[Snapshot]:
        """A snapshot and its parents, nearest first; empty for "". Raises NotFoundError."""
        out: list[Snapshot] = []
        with self._lock, _map_errors(self._path):
            while name:
                out.append(_one(_select(self._db, "name = ?", (name,)), name))
                name = out[-1].parent
        return out

    def folders(self) -> set[str]:
        """The folders that snapshots use."""
        return {row.folder for row in self._rows("folder != ''")}

    def remote(self) -> list[Snapshot]:
        """The snapshots that represent layers of images."""
        return self._rows("image != ''")

    def images(self) -> list[StockImage]:
        """The images that have, or had, remote snapshots."""
        with self._lock, _map_errors(self._path):
            rows = self._db.execute("SELECT digest, reference, layers FROM images").fetchall()
        return [
            StockImage(digest, name, tuple(json.loads(layers))) for digest, name, layers in rows
        ]

    def find_image(self, digest: str) -> StockImage | None:
        """An image, if it is known."""
        return next((one for one in self.images() if one.digest == digest), None)

    def image(self, digest: str) -> StockImage:
        """An image. Raises NotFoundError."""
        image = self.find_image(digest)
        if image is None:
            raise NotFoundError(f"the image {digest} is not in use here; pull it first")
        return image

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
        with self._transaction() as db:
            _check_parent(db, parent)
            _insert(db, row)
        return row

    def add_remote(
        self, name: str, parent: str, labels: Mapping[str, str], image: StockImage, depth: int
    ) -> bool:
        """Add the snapshot that represents layer `depth` of `image`; False when it exists.

        Raises NotFoundError and UsageError for its parent.
        """
        now = time.time_ns()
        row = Snapshot(
            name, parent, Kind.COMMITTED, now, now, "", dict(labels), NOTHING,
            image.digest, depth, depth == len(image.layers) - 1,
        )  # fmt: skip
        with self._transaction() as db:
            exists = bool(_select(db, "name = ? AND image != ''", (name,)))
            if not exists:
                _check_parent(db, parent)
                _insert(db, row)
            db.execute(
                "INSERT INTO images VALUES (?, ?, ?) ON CONFLICT (digest) DO UPDATE "
                "SET reference = excluded.reference",
                (image.digest, image.reference, json.dumps(image.layers)),
            )
        return not exists

    def commit(self, key: str, name: str, usage: Usage, labels: Mapping[str, str]) -> None:
        """Make the active snapshot `key` the committed one `name`, with labels of its own.

        Raises NotFoundError, SnapshotStateError (a view), SnapshotExistsError.
        """
        now = time.time_ns()
        with self._transaction() as db:
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
        """Remove a snapshot; the caller removes its folder.

        Raises NotFoundError, and SnapshotStateError while others depend on it.
        """
        with self._transaction() as db:
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

        A label with an empty value is removed, as containerd does. Raises NotFoundError, and
        UsageError for a path that cannot be changed.
        """
        with self._transaction() as db:
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
        """Remove an image without remote snapshots; False while it has one."""
        with self._transaction() as db:
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
def _map_errors(path: str) -> Iterator[None]:
    """Raise SQLite's errors as ours."""
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
    except sqlite3.ProgrammingError as error:  # a call during the end of the process
        raise StoreUnavailableError(f"the state {path} is closed: {error}; ask again") from error
    except sqlite3.DatabaseError as error:
        raise CorruptDataError(
            f"the state {path} is damaged: {error}; stop containerd, remove the snapshotter's "
            "directory and pull the images again"
        ) from error
