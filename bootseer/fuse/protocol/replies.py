"""Replies of the kernel's FUSE protocol: records to bytes, no I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from bootseer.fuse.operations import ROOT, Attr, Entry, Handle, Inode
from bootseer.fuse.protocol.requests import MAJOR, MINOR, OUT_HEADER, Layout

_ATTR_FIELDS = (
    "ino:Q size:Q blocks:Q atime:Q mtime:Q ctime:Q atimensec:I mtimensec:I ctimensec:I"
    " mode:I nlink:I uid:I gid:I rdev:I blksize:I flags:I"
)
ATTR = Layout("fuse_attr", _ATTR_FIELDS)
ATTR_OUT = Layout("fuse_attr_out", "attr_valid:Q attr_valid_nsec:I dummy:I attr:88s")
ENTRY_OUT = Layout(
    "fuse_entry_out",
    "nodeid:Q generation:Q entry_valid:Q attr_valid:Q entry_valid_nsec:I attr_valid_nsec:I"
    " attr:88s",
)
# Since 7.40 the last field is the backing id of passthrough.
OPEN_OUT = Layout("fuse_open_out", "fh:Q open_flags:I padding:i")
WRITE_OUT = Layout("fuse_write_out", "size:I padding:I")
GETXATTR_OUT = Layout("fuse_getxattr_out", "size:I padding:I")
STATFS_OUT = Layout(
    "fuse_kstatfs",
    "blocks:Q bfree:Q bavail:Q files:Q ffree:Q bsize:I namelen:I frsize:I padding:I spare:24s",
)
INIT_OUT = Layout(
    "fuse_init_out",
    "major:I minor:I max_readahead:I flags:I max_background:H congestion_threshold:H max_write:I"
    " time_gran:I max_pages:H map_alignment:H flags2:I _max_stack_depth:I _unused:24s",
)
DIRENT = Layout("fuse_dirent", "ino:Q off:Q namelen:I type:I")

HEADER_BYTES = OUT_HEADER.struct.size

FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE = 1 << 0, 1 << 1
FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 5, 1 << 7

ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES = 1 << 0, 1 << 3, 1 << 5
DO_READDIRPLUS, READDIRPLUS_AUTO, ASYNC_DIO = 1 << 13, 1 << 14, 1 << 15
PARALLEL_DIROPS, MAX_PAGES, CACHE_SYMLINKS = 1 << 18, 1 << 22, 1 << 23
HANDLE_KILLPRIV_V2, INIT_EXT = 1 << 28, 1 << 30
DIRECT_IO_ALLOW_MMAP, PASSTHROUGH, HAS_RESEND = 1 << 36, 1 << 37, 1 << 39

BACKING_OPEN, BACKING_CLOSE = 0x4010E501, 0x4004E502
"""ioctls on the device (7.40): `struct fuse_backing_map {s32 fd; u32 flags; u64 padding}`, u32."""
BACKING_MAP = struct.Struct("<iIQ")

SUCCESS = struct.Struct("<QQ")
"""Header of a reply that is no error: its whole length, whose upper half is the errno 0; unique."""
NOTIFY_RESEND = OUT_HEADER.struct.pack(HEADER_BYTES, 7, 0)
"""A notification: send again every request that was received and not replied to (7.40)."""

_BLOCK_BYTES = 4096
_NS = 10**9


def pack_error(unique: int, number: int) -> bytes:
    """A reply that is an errno."""
    return OUT_HEADER.struct.pack(HEADER_BYTES, -number, unique)


def pack_attributes(attr: Attr) -> bytes:
    """`struct fuse_attr`; all three times are the file's mtime, as nothing here changes later."""
    seconds, ns = divmod(attr.mtime_ns, _NS)
    seconds &= (1 << 64) - 1  # before 1970: two's complement, as the kernel reads it
    return ATTR.struct.pack(
        attr.inode,
        attr.size_bytes,
        -(-attr.size_bytes // 512),
        *(seconds,) * 3,
        *(ns,) * 3,
        attr.mode,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.rdev,
        _BLOCK_BYTES,
        0,
    )


def _split(timeout_s: float) -> tuple[int, int]:
    seconds = int(timeout_s)
    return seconds, int((timeout_s - seconds) * _NS)


def pack_entry(attr: Attr, timeout_s: float) -> bytes:
    """Reply to LOOKUP, MKDIR, …: name and attributes may be cached for `timeout_s`."""
    seconds, ns = _split(timeout_s)
    valid = (seconds, seconds, ns, ns)
    return ENTRY_OUT.struct.pack(attr.inode, 0, *valid, pack_attributes(attr))


def pack_no_entry(timeout_s: float) -> bytes:
    """Reply to LOOKUP: no such name, and that may be cached for `timeout_s`."""
    seconds, ns = _split(timeout_s)
    return ENTRY_OUT.struct.pack(0, 0, seconds, 0, ns, 0, b"")


def pack_attr(attr: Attr, timeout_s: float) -> bytes:
    """Reply to GETATTR and SETATTR."""
    return ATTR_OUT.struct.pack(*_split(timeout_s), 0, pack_attributes(attr))


def pack_open(handle: Handle, flags: int, backing_id: int = 0) -> bytes:
    """Reply to OPEN and OPENDIR; `flags` are FOPEN_…"""
    return OPEN_OUT.struct.pack(handle, flags, backing_id)


def pack_write(size: int) -> bytes:
    """Reply to WRITE: how many bytes were taken."""
    return WRITE_OUT.struct.pack(size, 0)


def pack_xattr_size(size: int) -> bytes:
    """Reply to GETXATTR and LISTXATTR that asked for the length only."""
    return GETXATTR_OUT.struct.pack(size, 0)


def pack_statfs(
    total_bytes: int, free_bytes: int, files: int, free_files: int, *, name_bytes: int
) -> bytes:
    """Reply to STATFS."""
    blocks, free = -(-total_bytes // _BLOCK_BYTES), free_bytes // _BLOCK_BYTES
    sizes = (_BLOCK_BYTES, name_bytes, _BLOCK_BYTES, 0, b"")
    return STATFS_OUT.struct.pack(blocks, free, free, files, free_files, *sizes)


def pack_init(
    *,
    minor: int,
    max_readahead: int,
    flags: int,
    max_background: int,
    max_write: int,
    max_pages: int,
) -> bytes:
    """Reply to INIT; `flags` holds both words, as in `requests.Init`."""
    return INIT_OUT.struct.pack(
        MAJOR,
        min(minor, MINOR),
        max_readahead,
        flags & 0xFFFFFFFF,
        max_background,
        max_background * 3 // 4,
        max_write,
        1,
        max_pages,
        0,
        flags >> 32,
        1 if flags & PASSTHROUGH else 0,
        b"",
    )


def _pack_dirent(inode: Inode, next_offset: int, name: bytes, mode: int) -> bytes:
    packed = DIRENT.struct.pack(inode, next_offset, len(name), mode >> 12) + name
    return packed + bytes(-len(packed) % 8)


def pack_listing(
    entries: Sequence[Entry],
    inode: Inode,
    offset: int,
    size: int,
    *,
    plus_timeout_s: float | None = None,
) -> bytes:
    """Reply to READDIR from the `offset`th name on: as many whole entries as fit `size`.

    With `plus_timeout_s`, the reply to READDIRPLUS: attributes that may be cached so long come
    with each name, and the kernel gains a reference to each of their inodes. `..` gets the
    directory's own inode number, as that of its parent is not known here and is not used.
    """
    no_attributes = bytes(ENTRY_OUT.struct.size)
    parts: list[bytes] = []
    used_bytes = 0
    for index in range(offset, len(entries) + 2):
        if index < 2:
            packed = _pack_dirent(inode or ROOT, index + 1, b"." * (index + 1), 0o040000)
            prefix = no_attributes
        else:
            name, attr = entries[index - 2]
            packed = _pack_dirent(attr.inode, index + 1, name, attr.mode)
            if plus_timeout_s is not None and attr.mode:
                prefix = pack_entry(attr, plus_timeout_s)
            else:
                prefix = no_attributes
        if plus_timeout_s is not None:
            packed = prefix + packed
        used_bytes += len(packed)
        if used_bytes > size:
            break
        parts.append(packed)
    return b"".join(parts)


def unpack_references(reply: bytes) -> Iterator[Inode]:
    """The inodes to which a reply to READDIRPLUS gives the kernel a reference."""
    at, entry_bytes = 0, ENTRY_OUT.struct.size
    while at < len(reply):
        (inode,) = struct.unpack_from("<Q", reply, at)
        if inode:
            yield Inode(inode)
        (name_bytes,) = struct.unpack_from("<I", reply, at + entry_bytes + 16)
        at += entry_bytes + (DIRENT.struct.size + name_bytes + 7) // 8 * 8
