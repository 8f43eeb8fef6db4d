"""Requests of the kernel's FUSE protocol: bytes to records, no I/O.

The format is that of `linux/fuse.h` (protocol 7.38, of Linux 6.1) with what later kernels added:
FUSE_DIRECT_IO_ALLOW_MMAP (7.39), passthrough and NOTIFY_RESEND (7.40). Every structure is little
endian here, as on all machines we run on, and a multiple of eight bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from bootseer.fuse.operations import Handle, Inode

MAJOR = 7
MINOR = 41
"""The newest minor version whose structures we know."""


class ProtocolError(ValueError):
    """A request that breaks the protocol: cut short, or of another length than it says."""


class Opcode(IntEnum):
    """Requests that get another reply than ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    TMPFILE = 51


class Layout:
    """One C structure: its fields as "name:code …", codes of `struct`; `_name` = newer than 7.38.

    The names are those of the C header, with which a test compares every layout.
    """

    __slots__ = ("fields", "name", "struct")

    def __init__(self, name: str, fields: str) -> None:
        self.name = name
        pairs = [field.split(":") for field in fields.split()]
        self.fields = tuple((field, code) for field, code in pairs)
        self.struct = struct.Struct("<" + "".join(code for _, code in pairs))


IN_HEADER = Layout(
    "fuse_in_header",
    "len:I opcode:I unique:Q nodeid:Q uid:I gid:I pid:I total_extlen:H padding:H",
)
OUT_HEADER = Layout("fuse_out_header", "len:I error:i unique:Q")
FORGET_IN = Layout("fuse_forget_in", "nlookup:Q")
FORGET_ONE = Layout("fuse_forget_one", "nodeid:Q nlookup:Q")
BATCH_FORGET_IN = Layout("fuse_batch_forget_in", "count:I dummy:I")
GETATTR_IN = Layout("fuse_getattr_in", "getattr_flags:I dummy:I fh:Q")
SETATTR_IN = Layout(
    "fuse_setattr_in",
    "valid:I padding:I fh:Q size:Q lock_owner:Q atime:Q mtime:Q ctime:Q atimensec:I mtimensec:I"
    " ctimensec:I mode:I unused4:I uid:I gid:I unused5:I",
)
MKNOD_IN = Layout("fuse_mknod_in", "mode:I rdev:I umask:I padding:I")
MKDIR_IN = Layout("fuse_mkdir_in", "mode:I umask:I")
RENAME_IN = Layout("fuse_rename_in", "newdir:Q")
RENAME2_IN = Layout("fuse_rename2_in", "newdir:Q flags:I padding:I")
OPEN_IN = Layout("fuse_open_in", "flags:I open_flags:I")
CREATE_IN = Layout("fuse_create_in", "flags:I mode:I umask:I open_flags:I")
READ_IN = Layout(
    "fuse_read_in",
    "fh:Q offset:Q size:I read_flags:I lock_owner:Q flags:I padding:I",
)
WRITE_IN = Layout(
    "fuse_write_in",
    "fh:Q offset:Q size:I write_flags:I lock_owner:Q flags:I padding:I",
)
RELEASE_IN = Layout("fuse_release_in", "fh:Q flags:I release_flags:I lock_owner:Q")
FUSE_WRITE_LOCKOWNER = 1 << 1
"""`lock_owner` of WRITE_IN is set."""
FLUSH_IN = Layout("fuse_flush_in", "fh:Q unused:I padding:I lock_owner:Q")
FSYNC_IN = Layout("fuse_fsync_in", "fh:Q fsync_flags:I padding:I")
FALLOCATE_IN = Layout("fuse_fallocate_in", "fh:Q offset:Q length:Q mode:I padding:I")
GETXATTR_IN = Layout("fuse_getxattr_in", "size:I padding:I")
INIT_IN = Layout("fuse_init_in", "major:I minor:I max_readahead:I flags:I flags2:I unused:44s")
INTERRUPT_IN = Layout("fuse_interrupt_in", "unique:Q")

READ_FIELDS = struct.Struct("<4xIQQ16xQQI")
"""Of the header and body of a READ: opcode, unique, inode, handle, offset, size."""

FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FATTR_MTIME, FATTR_MTIME_NOW = 1 << 5, 1 << 8
GETATTR_FH = 1 << 0


class Name(NamedTuple):
    """LOOKUP, UNLINK, RMDIR: a name in the header's directory."""

    name: bytes


class Forget(NamedTuple):
    """FORGET: the kernel drops so many references to the header's inode."""

    references: int


class BatchForget(NamedTuple):
    """BATCH_FORGET: pairs of inode and count."""

    items: tuple[tuple[Inode, int], ...]


class Getattr(NamedTuple):
    """`handle` is None unless the attributes of an open file are wanted."""

    handle: Handle | None


class Setattr(NamedTuple):
    """`valid` says which of the values count (FATTR_…)."""

    valid: int
    handle: Handle
    size_bytes: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int


class Symlink(NamedTuple):
    name: bytes
    target: bytes


class Mknod(NamedTuple):
    """`mode` holds the kind of file as well."""

    mode: int
    umask: int
    name: bytes


class Fallocate(NamedTuple):
    """`mode` as in fallocate(2)."""

    handle: Handle
    offset: int
    length: int
    mode: int


class Mkdir(NamedTuple):
    mode: int
    umask: int
    name: bytes


class Rename(NamedTuple):
    """`flags` are those of renameat2(2)."""

    new_parent: Inode
    flags: int
    name: bytes
    new_name: bytes


class Open(NamedTuple):
    """OPEN and OPENDIR; `flags` are those of open(2)."""

    flags: int


class Create(NamedTuple):
    flags: int
    mode: int
    umask: int
    name: bytes


class Read(NamedTuple):
    """READ, READDIR and READDIRPLUS."""

    handle: Handle
    offset: int
    size: int


class Write(NamedTuple):
    """`data` is a view of the request itself; `owner` as in `Flush`, 0 = not known."""

    handle: Handle
    offset: int
    data: memoryview
    owner: int = 0


class Flush(NamedTuple):
    """`owner` stands for the table of open files whose descriptor was closed.

    Threads share it, a forked process has its own (`fuse_lock_owner_id` in fs/fuse/file.c).
    """

    handle: Handle
    owner: int


class HandleOnly(NamedTuple):
    """RELEASE, RELEASEDIR, FSYNC and FSYNCDIR."""

    handle: Handle


class Getxattr(NamedTuple):
    """`size` 0 asks for the length only."""

    size: int
    name: bytes


class Listxattr(NamedTuple):
    size: int


class Init(NamedTuple):
    """`flags` holds both words: bit 36 is bit 4 of the second one."""

    major: int
    minor: int
    max_readahead: int
    flags: int


class Interrupt(NamedTuple):
    """The process that waits for request `unique` got a signal."""

    unique: int


class Request(NamedTuple):
    """One request; `body` is one of the records above, or None where it is not used."""

    opcode: int
    unique: int
    inode: Inode
    uid: int
    gid: int
    pid: int
    body: Any


def parse(data: memoryview) -> Request:
    """A whole request, as one read of the device returns it. Raises ProtocolError."""
    try:
        length, opcode, unique, inode, uid, gid, pid, _, _ = IN_HEADER.struct.unpack_from(data)
    except struct.error:
        raise ProtocolError(f"a request of {len(data)} bytes has no whole header") from None
    if length != len(data):
        raise ProtocolError(f"a request says {length} bytes and has {len(data)}")
    parser = _PARSERS.get(opcode)
    try:
        body = parser(data[IN_HEADER.struct.size :]) if parser else None
    except (struct.error, ProtocolError) as error:
        raise ProtocolError(f"request {opcode} of {length} bytes is cut short: {error}") from None
    return Request(opcode, unique, inode, uid, gid, pid, body)


def _split_names(data: memoryview, count: int) -> list[bytes]:
    """`count` names that end with NUL; extensions may follow."""
    parts = bytes(data).split(b"\0", count)
    if len(parts) <= count:
        raise ProtocolError("a name has no end")
    if not all(parts[:count]):
        raise ProtocolError("a name is empty")
    return parts[:count]


def _parse_name(data: memoryview) -> Name:
    return Name(_split_names(data, 1)[0])


def _parse_forget(data: memoryview) -> Forget:
    return Forget(FORGET_IN.struct.unpack_from(data)[0])


def _parse_batch_forget(data: memoryview) -> BatchForget:
    count, _ = BATCH_FORGET_IN.struct.unpack_from(data)
    start, step = BATCH_FORGET_IN.struct.size, FORGET_ONE.struct.size
    if count * step > len(data) - start:
        raise ProtocolError(f"{count} entries do not fit")
    return BatchForget(tuple(FORGET_ONE.struct.iter_unpack(data[start : start + count * step])))


def _parse_getattr(data: memoryview) -> Getattr:
    flags, _, handle = GETATTR_IN.struct.unpack_from(data)
    return Getattr(handle if flags & GETATTR_FH else None)


def _parse_setattr(data: memoryview) -> Setattr:
    fields = SETATTR_IN.struct.unpack_from(data)
    valid, _, handle, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = fields
    seconds = mtime - (1 << 64) if mtime >> 63 else mtime  # before 1970
    return Setattr(valid, handle, size, seconds * 10**9 + mtime_ns, mode, uid, gid)


def _parse_symlink(data: memoryview) -> Symlink:
    return Symlink(*_split_names(data, 2))


def _parse_mknod(data: memoryview) -> Mknod:
    mode, _, umask, _ = MKNOD_IN.struct.unpack_from(data)
    return Mknod(mode, umask, *_split_names(data[MKNOD_IN.struct.size :], 1))


def _parse_fallocate(data: memoryview) -> Fallocate:
    handle, offset, length, mode, _ = FALLOCATE_IN.struct.unpack_from(data)
    return Fallocate(handle, offset, length, mode)


def _parse_mkdir(data: memoryview) -> Mkdir:
    mode, umask = MKDIR_IN.struct.unpack_from(data)
    return Mkdir(mode, umask, *_split_names(data[MKDIR_IN.struct.size :], 1))


def _parse_rename(data: memoryview) -> Rename:
    (new_parent,) = RENAME_IN.struct.unpack_from(data)
    name, new_name = _split_names(data[RENAME_IN.struct.size :], 2)
    return Rename(new_parent, 0, name, new_name)


def _parse_rename2(data: memoryview) -> Rename:
    new_parent, flags, _ = RENAME2_IN.struct.unpack_from(data)
    name, new_name = _split_names(data[RENAME2_IN.struct.size :], 2)
    return Rename(new_parent, flags, name, new_name)


def _parse_open(data: memoryview) -> Open:
    return Open(OPEN_IN.struct.unpack_from(data)[0])


def _parse_create(data: memoryview) -> Create:
    flags, mode, umask, _ = CREATE_IN.struct.unpack_from(data)
    return Create(flags, mode, umask, *_split_names(data[CREATE_IN.struct.size :], 1))


def _parse_read(data: memoryview) -> Read:
    handle, offset, size, *_ = READ_IN.struct.unpack_from(data)
    return Read(handle, offset, size)


def _parse_write(data: memoryview) -> Write:
    handle, offset, size, write_flags, owner, *_ = WRITE_IN.struct.unpack_from(data)
    start = WRITE_IN.struct.size
    if size > len(data) - start:
        raise ProtocolError(f"{size} bytes to write, {len(data) - start} sent")
    known = owner if write_flags & FUSE_WRITE_LOCKOWNER else 0
    return Write(handle, offset, data[start : start + size], known)


def _parse_flush(data: memoryview) -> Flush:
    handle, _, _, owner = FLUSH_IN.struct.unpack_from(data)
    return Flush(handle, owner)


def _parser_of_handle(layout: Layout) -> Callable[[memoryview], HandleOnly]:
    return lambda data: HandleOnly(layout.struct.unpack_from(data)[0])


def _parse_getxattr(data: memoryview) -> Getxattr:
    size, _ = GETXATTR_IN.struct.unpack_from(data)
    return Getxattr(size, *_split_names(data[GETXATTR_IN.struct.size :], 1))


def _parse_listxattr(data: memoryview) -> Listxattr:
    return Listxattr(GETXATTR_IN.struct.unpack_from(data)[0])


def _parse_init(data: memoryview) -> Init:
    """Kernels before 7.36 send 16 bytes only."""
    padded = bytes(data).ljust(INIT_IN.struct.size, b"\0") if len(data) == 16 else data
    major, minor, max_readahead, flags, flags2, _ = INIT_IN.struct.unpack_from(padded)
    return Init(major, minor, max_readahead, flags | flags2 << 32)


def _parse_interrupt(data: memoryview) -> Interrupt:
    return Interrupt(INTERRUPT_IN.struct.unpack_from(data)[0])


_PARSERS: dict[int, Callable[[memoryview], Any]] = {
    Opcode.LOOKUP: _parse_name,
    Opcode.FORGET: _parse_forget,
    Opcode.GETATTR: _parse_getattr,
    Opcode.SETATTR: _parse_setattr,
    Opcode.SYMLINK: _parse_symlink,
    Opcode.MKNOD: _parse_mknod,
    Opcode.FALLOCATE: _parse_fallocate,
    Opcode.MKDIR: _parse_mkdir,
    Opcode.UNLINK: _parse_name,
    Opcode.RMDIR: _parse_name,
    Opcode.RENAME: _parse_rename,
    Opcode.RENAME2: _parse_rename2,
    Opcode.OPEN: _parse_open,
    Opcode.OPENDIR: _parse_open,
    Opcode.READ: _parse_read,
    Opcode.READDIR: _parse_read,
    Opcode.READDIRPLUS: _parse_read,
    Opcode.WRITE: _parse_write,
    Opcode.RELEASE: _parser_of_handle(RELEASE_IN),
    Opcode.RELEASEDIR: _parser_of_handle(RELEASE_IN),
    Opcode.FLUSH: _parse_flush,
    Opcode.FSYNC: _parser_of_handle(FSYNC_IN),
    Opcode.FSYNCDIR: _parser_of_handle(FSYNC_IN),
    Opcode.GETXATTR: _parse_getxattr,
    Opcode.LISTXATTR: _parse_listxattr,
    Opcode.INIT: _parse_init,
    Opcode.CREATE: _parse_create,
    Opcode.INTERRUPT: _parse_interrupt,
    Opcode.BATCH_FORGET: _parse_batch_forget,
}
