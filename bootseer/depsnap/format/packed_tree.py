"""The two files of a packed tree: their layout, and the EROFS metadata of one. Pure.

A packed tree is a snapshot unpacked into two files: `data`, the bytes of all its files, each file
from a multiple of 4 KiB on, and `meta`, the EROFS metadata that refers to it, with one directory a
root (`0`, `1`, …).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.blockimage import erofs_format, erofs_writer
from bootseer.blockimage.tree_entries import Entry, FileExtent, Kind, Stored
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, HOST_XATTRS, XAttrs
from bootseer.errors import NotSupportedError, UsageError

BLOCK_BYTES = 4096
_MOST_PADDING_BYTES = 1 << 30
"""More holes and padding than this are kept better in files of their own."""


def lay_out(index: Index) -> tuple[list[int], int]:
    """Where each entry's content begins in `data`, and the length of `data`.

    Entries without content have 0. Raises NotSupportedError for a tree that is mostly holes.
    """
    places = [0] * index.entries
    end = 0
    for number, kind in enumerate(index.kind):
        if kind == FILE and index.size[number]:
            places[number] = end
            end += -(-index.size[number] // BLOCK_BYTES) * BLOCK_BYTES
    if end > 2 * index.raw_bytes + _MOST_PADDING_BYTES:
        raise NotSupportedError("the snapshot is mostly holes, which a packed tree cannot keep")
    return places, end


def make_metadata(
    index: Index,
    places: Sequence[int],
    data_bytes: int,
    mode: Sequence[int],
    xattrs: Mapping[int, XAttrs],
) -> tuple[bytearray, int]:
    """The bytes of `meta`, and how many attributes it cannot hold.

    `places` and `data_bytes` are those of `lay_out`, `mode` and `xattrs` what the entries are to
    have. Raises NotSupportedError, CorruptDataError.
    """
    entries = [Entry(path=b"", kind=Kind.DIRECTORY, mode=0o755)]
    lost = 0
    for root_number, root in enumerate(index.roots):
        prefix = b"%d" % root_number
        for number in range(root.first, root.first + root.count):
            entry = _entry(index, number, prefix, places[number], mode[number])
            kept, dropped = _select_supported(xattrs.get(number, ()))
            if kept:
                entry.xattrs = kept
            lost += dropped
            entries.append(entry)
    try:
        return erofs_writer.metadata(entries, data_bytes), lost
    except UsageError as error:
        raise NotSupportedError(f"a packed tree cannot hold the snapshot: {error}") from error


def empty_metadata() -> bytes | bytearray:
    """The bytes of `meta` for a tree that holds nothing."""
    return erofs_writer.metadata([Entry(path=b"", kind=Kind.DIRECTORY, mode=0o755)], 0)


def _entry(index: Index, number: int, prefix: bytes, place: int, mode: int) -> Entry:
    kind, path = index.kind[number], index.path[number]
    full = prefix + b"/" + os.fsencode(path) if path else prefix
    if kind == HARDLINK:
        target = prefix + b"/" + os.fsencode(index.link[number])
        return Entry(path=full, kind=Kind.FILE, hardlink_of=target)
    entry = Entry(
        path=full,
        kind=Kind.FILE,
        mode=mode,
        uid=index.uid[number],
        gid=index.gid[number],
        mtime_ns=index.mtime_ns[number],
    )
    if kind == DIRECTORY:
        entry.kind = Kind.DIRECTORY
    elif kind == FILE:
        size = index.size[number]
        if size:
            entry.size_bytes = size
            # One chunk for the whole file, whose bytes are contiguous in `data`.
            chunk_bytes = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
            entry.content = Stored(b"", (FileExtent(0, place, size),), chunk_bytes)
    else:
        entry.kind = Kind.SYMLINK
        entry.link_target = os.fsencode(index.link[number])
    return entry


def _select_supported(xattrs: XAttrs) -> tuple[dict[bytes, bytes], int]:
    """The attributes that EROFS can hold, and how many it cannot."""
    kept = {
        os.fsencode(name): value
        for name, value in xattrs
        if not name.startswith(HOST_XATTRS)
        and erofs_format.xattr_index(os.fsencode(name)) is not None
    }
    return kept, len(xattrs) - len(kept)
