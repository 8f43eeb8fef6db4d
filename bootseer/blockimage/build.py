"""A tree becomes an image: EROFS metadata, data in stored blocks, their table and a file map."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bootseer.blockimage.data_writer import LEVEL, DataWriter
from bootseer.blockimage.erofs_writer import metadata
from bootseer.blockimage.filemap import File, FileMap
from bootseer.blockimage.tree_entries import Entry, Kind, Stored
from bootseer.blocks.table import Table
from bootseer.errors import UsageError, from_os_error

META_NAME, DATA_NAME = "meta", "data"
_EMPTY_DIGEST = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class Built:
    """An image on disk.

    `meta_path` is the EROFS metadata as it is mounted, `data_path` the stored blocks that `table`
    describes. The raw data, `table.size_bytes`, is what the mount's one extra device must hold.
    """

    meta_path: str
    data_path: str
    table: Table
    files: FileMap


def build(
    entries: Sequence[Entry],
    out_dir: str,
    *,
    progress: Callable[[int], None] | None = None,
    threads: int = 2,
    level: int = LEVEL,
) -> Built:
    """Make the image of a tree below `out_dir`, which is there; `progress` counts content bytes.

    Contents are read and stored in the order of `entries`, so files that starts read together
    should be neighbours in it. Raises what reading them raises, and UsageError for entries that
    do not form a tree.
    """
    ready = []
    with DataWriter(os.path.join(out_dir, DATA_NAME), threads=threads, level=level) as data:
        for entry in entries:
            ready.append(_store_content(entry, data))
            if progress is not None:
                progress(entry.size_bytes)
        table = data.finish()
    return finish(ready, table, out_dir)


def _store_content(entry: Entry, data: DataWriter) -> Entry:
    content = entry.content
    if content is None or isinstance(content, Stored):
        return entry
    if entry.kind is not Kind.FILE or entry.hardlink_of is not None:
        raise UsageError(f"{entry.path!r} has content and is no file")
    return dataclasses.replace(entry, content=data.store(content, entry.size_bytes))


def finish(entries: Iterable[Entry], table: Table, out_dir: str) -> Built:
    """The image of entries whose contents a `DataWriter` has stored into `out_dir`."""
    entries = list(entries)
    meta_path = os.path.join(out_dir, META_NAME)
    meta = metadata(entries, table.size_bytes)
    try:
        with open(meta_path, "wb") as out:
            out.write(meta)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise from_os_error(error, f"write {meta_path}") from error
    files = FileMap(file_rows(entries), table.size_bytes)
    return Built(meta_path, os.path.join(out_dir, DATA_NAME), table, files)


def file_rows(entries: Iterable[Entry]) -> list[File]:
    """The file map's rows: one an inode, by the first of its paths."""
    names: dict[bytes, bytes] = {}
    inodes = []
    for entry in entries:
        if entry.hardlink_of is not None:
            first = names.get(entry.hardlink_of, entry.hardlink_of)
            names[entry.hardlink_of] = min(first, entry.path)
        elif entry.kind is Kind.FILE:
            inodes.append(entry)
    rows = [_row(entry, min(entry.path, names.get(entry.path, entry.path))) for entry in inodes]
    return sorted(rows, key=lambda file: file.path)


def _row(entry: Entry, path: bytes) -> File:
    stored = entry.content
    if not isinstance(stored, Stored):
        return File(path, entry.size_bytes, _EMPTY_DIGEST, ())
    return File(path, entry.size_bytes, stored.digest, stored.extents)
