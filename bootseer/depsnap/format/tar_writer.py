"""Write tar headers that GNU tar and libarchive read: ustar with POSIX pax records. Pure.

Sources: POSIX.1-2017 `pax` (ustar and extended headers), the GNU tar manual ("Sparse Formats",
PAX format version 1.0) and the `SCHILY.xattr.` convention for extended attributes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from bootseer.depsnap.format.unit_layout import Segment
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, SYMLINK, XAttrs

END = bytes(1024)
"""The two zero blocks that end a tar stream."""

_TYPES = {FILE: b"0", HARDLINK: b"1", SYMLINK: b"2", DIRECTORY: b"5"}
_OCTAL_MAX_11 = 0o77777777777
_OCTAL_MAX_7 = 0o7777777


def padding(size: int) -> bytes:
    """The zeros after `size` bytes of data."""
    return bytes(-size % 512)


def member(
    path: str,
    kind: str,
    *,
    mode: int,
    uid: int,
    gid: int,
    mtime_ns: int,
    size: int,
    link: str = "",
    xattrs: XAttrs = (),
    segments: Sequence[Segment] | None = None,
) -> bytes:
    """All header blocks of one member, up to its first byte of data.

    `size` is the file's length with holes; `segments` the data of a sparse file, else None. For a
    sparse file the map that opens its data is part of the result.
    """
    name = os.fsencode(path)
    if kind == DIRECTORY:
        name += b"/"
    target = os.fsencode(link)
    records: list[tuple[bytes, bytes]] = []
    body = b""
    stored = size if kind == FILE else 0
    if segments is not None:
        body = _sparse_map(segments, size)
        stored = len(body) + sum(length for _, length in segments)
        records += [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", b"%d" % size),
        ]
        name = b"GNUSparseFile.0/" + name.rpartition(b"/")[2]
    seconds, rest = divmod(mtime_ns, 1_000_000_000)
    records += _too_large(name, target, uid, gid, stored)
    if rest or not 0 <= seconds <= _OCTAL_MAX_11:
        records.append((b"mtime", _decimal(mtime_ns)))
    records += [(b"SCHILY.xattr." + _xattr_key(key), value) for key, value in xattrs]
    flat = _ustar(name, _TYPES[kind], mode, uid, gid, stored, seconds, target)
    if not records:
        return flat + body
    return _encode_extended(name, records) + flat + body


def _too_large(
    name: bytes, target: bytes, uid: int, gid: int, stored: int
) -> Iterator[tuple[bytes, bytes]]:
    """Records for what the plain header's fields cannot hold."""
    if len(name) > 100:
        yield b"path", name
    if len(target) > 100:
        yield b"linkpath", target
    if uid > _OCTAL_MAX_7:
        yield b"uid", b"%d" % uid
    if gid > _OCTAL_MAX_7:
        yield b"gid", b"%d" % gid
    if stored > _OCTAL_MAX_11:
        yield b"size", b"%d" % stored


def _encode_extended(name: bytes, records: Sequence[tuple[bytes, bytes]]) -> bytes:
    data = b"".join([_record(key, value) for key, value in records])
    label = b"./PaxHeaders/" + name.rstrip(b"/").rpartition(b"/")[2][:80]
    return _ustar(label, b"x", 0o644, 0, 0, len(data), 0, b"") + data + padding(len(data))


def _ustar(
    name: bytes,
    kind: bytes,
    mode: int,
    uid: int,
    gid: int,
    size: int,
    seconds: int,
    target: bytes,
) -> bytes:
    """One 512-byte header; fields too large for it are cut, pax records carry them."""
    head = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (
        name[:100].ljust(100, b"\0"),
        mode,
        uid if uid <= _OCTAL_MAX_7 else 0,
        gid if gid <= _OCTAL_MAX_7 else 0,
        size if size <= _OCTAL_MAX_11 else 0,
        seconds if 0 <= seconds <= _OCTAL_MAX_11 else 0,
    )
    tail = b"%b%bustar\x0000" % (kind, target[:100].ljust(100, b"\0"))
    checksum = sum(head) + 8 * 0x20 + sum(tail)
    return (b"%b%06o\0 %b" % (head, checksum, tail)).ljust(512, b"\0")


def _record(key: bytes, value: bytes) -> bytes:
    """`LENGTH KEY=VALUE\\n`, LENGTH counting its own digits too."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


def _decimal(mtime_ns: int) -> bytes:
    seconds, rest = divmod(abs(mtime_ns), 1_000_000_000)
    sign = b"-" if mtime_ns < 0 else b""
    return sign + b"%d.%09d" % (seconds, rest)


def _xattr_key(name: str) -> bytes:
    return os.fsencode(name).replace(b"%", b"%25").replace(b"=", b"%3D")


def _sparse_map(segments: Sequence[Segment], size: int) -> bytes:
    """The map before a sparse member's data; a hole at the end is a segment of no bytes there."""
    mapped = list(segments)
    if not mapped or sum(mapped[-1]) < size:
        mapped.append((size, 0))
    numbers = [len(mapped)] + [number for segment in mapped for number in segment]
    text = b"".join([b"%d\n" % number for number in numbers])
    return text + padding(len(text))
