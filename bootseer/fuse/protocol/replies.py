"""Answers and notifications of the kernel's FUSE protocol: records to bytes, no I/O."""

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
INVAL_INODE_OUT = Layout("fuse_notify_inval_inode_out", "ino:Q off:q len:q")
INVAL_ENTRY_OUT = Layout("fuse_notify_inval_entry_out", "parent:Q namelen:I flags:I")
STORE_OUT = Layout("fuse_notify_store_out", "nodeid:Q offset:Q size:I padding:I")

LAYOUTS = [OUT_HEADER] + [value for value in list(vars().values()) if isinstance(value, Layout)]

HEADER_BYTES = OUT_HEADER.struct.size
NOTIFY_INVAL_INODE, NOTIFY_INVAL_ENTRY, NOTIFY_STORE, NOTIFY_RESEND = 2, 3, 4, 7

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
"""Head of an answer that is no error: its whole length, whose upper half is the errno 0; unique."""

_BLOCK_BYTES = 4096
_NS = 10**9
_ENTRY_PREFIX = struct.Struct("<QQQQII")
_ATTR_PREFIX = struct.Struct("<QII")


def header(unique: int, length: int = 0, error: int = 0) -> bytes:
    """Head of an answer with `length` bytes, or of one with an errno."""
    return OUT_HEADER.struct.pack(HEADER_BYTES + length, -error, unique)


def attributes(attr: Attr) -> bytes:
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


def entry(attr: Attr, timeout_s: float) -> bytes:
    """Answer to LOOKUP, MKDIR, …: name and attributes may be cached for `timeout_s`."""
    seconds, ns = _split(timeout_s)
    prefix = _ENTRY_PREFIX.pack(attr.inode, 0, seconds, seconds, ns, ns)
    return prefix + attributes(attr)


def no_entry(timeout_s: float) -> bytes:
    """Answer to LOOKUP: no such name, and that may be cached for `timeout_s`."""
    seconds, ns = _split(timeout_s)
    return _ENTRY_PREFIX.pack(0, 0, seconds, 0, ns, 0) + bytes(ATTR.struct.size)


def attr_answer(attr: Attr, timeout_s: float) -> bytes:
    """Answer to GETATTR and SETATTR."""
    seconds, ns = _split(timeout_s)
    return _ATTR_PREFIX.pack(seconds, ns, 0) + attributes(attr)


def opened(handle: Handle, flags: int, backing_id: int = 0) -> bytes:
    """Answer to OPEN and OPENDIR; `flags` are FOPEN_…"""
    return OPEN_OUT.struct.pack(handle, flags, backing_id)


def written(size: int) -> bytes:
    """Answer to WRITE."""
    return WRITE_OUT.struct.pack(size, 0)


def xattr_size(size: int) -> bytes:
    """Answer to GETXATTR and LISTXATTR that asked for the length only."""
    return GETXATTR_OUT.struct.pack(size, 0)


def statfs(
    total_bytes: int, free_bytes: int, files: int, free_files: int, *, name_bytes: int
) -> bytes:
    """Answer to STATFS."""
    blocks, free = -(-total_bytes // _BLOCK_BYTES), free_bytes // _BLOCK_BYTES
    sizes = (_BLOCK_BYTES, name_bytes, _BLOCK_BYTES, 0, b"")
    return STATFS_OUT.struct.pack(blocks, free, free, files, free_files, *sizes)


def init(
    *,
    minor: int,
    max_readahead: int,
    flags: int,
    max_background: int,
    max_write: int,
    max_pages: int,
) -> bytes:
    """Answer to INIT; `flags` holds both words, as in `wire.Init`."""
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


def _dirent(inode: Inode, following: int, name: bytes, mode: int) -> bytes:
    packed = DIRENT.struct.pack(inode, following, len(name), mode >> 12) + name
    return packed + bytes(-len(packed) % 8)


def listing(entries: Sequence[Entry], inode: Inode, offset: int, size: int) -> bytes:
    """Answer to READDIR from the `offset`th name on: as many whole entries as fit `size`."""
    return _pack_listing(entries, inode, offset, size, None)


def listing_plus(
    entries: Sequence[Entry], inode: Inode, offset: int, size: int, timeout_s: float
) -> bytes:
    """Answer to READDIRPLUS: each entry counts as a lookup of its inode, but for the dots."""
    return _pack_listing(entries, inode, offset, size, timeout_s)


def listed(answer: bytes) -> Iterator[Inode]:
    """The inodes that an answer to READDIRPLUS gives references to."""
    at, head = 0, ENTRY_OUT.struct.size
    while at < len(answer):
        (inode,) = struct.unpack_from("<Q", answer, at)
        if inode:
            yield Inode(inode)
        (length,) = struct.unpack_from("<I", answer, at + head + 16)
        at += head + (DIRENT.struct.size + length + 7) // 8 * 8


def _pack_listing(
    entries: Sequence[Entry], inode: Inode, offset: int, size: int, timeout_s: float | None
) -> bytes:
    """The parent's inode number is not known here, and nobody depends on it: `..` gets ours."""
    parts: list[bytes] = []
    used = 0
    for index in range(offset, len(entries) + 2):
        if index < 2:
            packed = _dirent(inode or ROOT, index + 1, b"." * (index + 1), 0o040000)
            prefix = bytes(ENTRY_OUT.struct.size)
        else:
            name, attr = entries[index - 2]
            packed = _dirent(attr.inode, index + 1, name, attr.mode)
            if timeout_s is not None and attr.mode:
                prefix = entry(attr, timeout_s)
            else:
                prefix = bytes(ENTRY_OUT.struct.size)
        if timeout_s is not None:
            packed = prefix + packed
        used += len(packed)
        if used > size:
            break
        parts.append(packed)
    return b"".join(parts)


def notify(code: int, length: int = 0) -> bytes:
    """Head of a notification of `length` bytes: no request asked for it, so `unique` is 0."""
    return OUT_HEADER.struct.pack(HEADER_BYTES + length, code, 0)


def notify_store(inode: Inode, offset: int, size: int) -> bytes:
    """Head of NOTIFY_STORE; the bytes follow."""
    head = notify(NOTIFY_STORE, STORE_OUT.struct.size + size)
    return head + STORE_OUT.struct.pack(inode, offset, size, 0)


def notify_inval_inode(inode: Inode, offset: int, length: int) -> bytes:
    """NOTIFY_INVAL_INODE: cached attributes, and pages from `offset` (none: < 0; length 0: all)."""
    head = notify(NOTIFY_INVAL_INODE, INVAL_INODE_OUT.struct.size)
    return head + INVAL_INODE_OUT.struct.pack(inode, offset, length)


def notify_inval_entry(parent: Inode, name: bytes) -> bytes:
    """NOTIFY_INVAL_ENTRY: the kernel forgets what it knows of a name."""
    head = notify(NOTIFY_INVAL_ENTRY, INVAL_ENTRY_OUT.struct.size + len(name) + 1)
    return head + INVAL_ENTRY_OUT.struct.pack(parent, len(name), 0) + name + b"\0"
