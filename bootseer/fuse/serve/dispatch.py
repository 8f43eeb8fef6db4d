"""Dispatching requests: every one but READ is answered by asking the operations.

Requests are received, and their replies sent, elsewhere (`receive_loop`).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from bootseer.errors import BootseerError
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.passthrough import Backings
from bootseer.fuse.operations import (
    Attr,
    Buffer,
    Entry,
    FileSystemError,
    Handle,
    Inode,
    Opened,
    Operations,
    WritableOperations,
)
from bootseer.fuse.protocol import replies, requests
from bootseer.fuse.protocol.requests import Opcode, Request
from bootseer.reporting import Reporter

MODIFYING = frozenset(
    {
        Opcode.SETATTR,
        Opcode.SYMLINK,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.LINK,
        Opcode.WRITE,
        Opcode.SETXATTR,
        Opcode.REMOVEXATTR,
        Opcode.CREATE,
        Opcode.FALLOCATE,
        Opcode.TMPFILE,
    }
)
"""Refused with EROFS by a read-only file system."""
WITHOUT_REPLY = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
REVERSIBLE = frozenset(
    {
        Opcode.LOOKUP,
        Opcode.GETATTR,
        Opcode.OPEN,
        Opcode.GETXATTR,
        Opcode.LISTXATTR,
        Opcode.OPENDIR,
        Opcode.READDIR,
        Opcode.READDIRPLUS,
    }
)
"""The requests that `Operations.may_block` covers. The process that waits for one of them may be
killed: they change nothing that `Dispatcher.take_back` does not take back."""
_BLOCKING_WHEN_WRITABLE = MODIFYING | {
    Opcode.FLUSH,
    Opcode.FSYNC,
    Opcode.FSYNCDIR,
    Opcode.RELEASE,
}
_FIRST_FIELD = struct.Struct("<Q")


class Negotiated(NamedTuple):
    """What INIT settled for the life of a mount; `flags` holds both words."""

    minor: int
    flags: int
    max_write_bytes: int

    @property
    def passthrough(self) -> bool:
        """Whether the kernel reads backing files itself."""
        return bool(self.flags & replies.PASSTHROUGH)

    @property
    def resend(self) -> bool:
        """Whether the kernel sends requests without a reply again when it is asked to."""
        return bool(self.flags & replies.HAS_RESEND)


def negotiate(init: requests.Init, options: MountOptions, *, privileged: bool) -> Negotiated:
    """Choose from what the kernel offers. Raises ProtocolError for a version that is too old."""
    if init.major != requests.MAJOR or init.minor < 23:
        raise requests.ProtocolError(
            f"kernel speaks FUSE {init.major}.{init.minor}, not 7.23 or up"
        )
    wanted = (
        replies.ASYNC_READ
        | replies.ATOMIC_O_TRUNC
        | replies.BIG_WRITES
        | replies.DO_READDIRPLUS
        | replies.READDIRPLUS_AUTO
        | replies.ASYNC_DIO
        | replies.PARALLEL_DIROPS
        | replies.MAX_PAGES
        | replies.CACHE_SYMLINKS
        | replies.INIT_EXT
        | replies.HAS_RESEND
    )
    if options.read_only:
        wanted |= replies.DIRECT_IO_ALLOW_MMAP
    else:
        # Without the flag above a file that is being written, which bypasses the page cache,
        # cannot be mapped for writing (ENODEV): its pages would be written in no order.
        wanted |= replies.HANDLE_KILLPRIV_V2  # else each write asks for security.capability
    if options.passthrough and privileged:
        wanted |= replies.PASSTHROUGH
    max_write_bytes = 128 << 10 if options.read_only else options.max_write_bytes
    return Negotiated(init.minor, init.flags & wanted, max_write_bytes)


def init_reply(init: requests.Init, negotiated: Negotiated, options: MountOptions) -> bytes:
    """The reply to INIT with what was negotiated."""
    max_bytes = max(options.max_read_bytes, negotiated.max_write_bytes)
    return replies.pack_init(
        minor=init.minor,
        max_readahead=min(init.max_readahead, options.read_ahead_kib << 10),
        flags=negotiated.flags,
        max_background=options.max_background,
        max_write=negotiated.max_write_bytes,
        max_pages=max(1, min(0xFFFF, max_bytes >> 12)),
    )


class Dispatcher:
    """Answers requests by asking the operations; safe to call from several threads."""

    def __init__(
        self, operations: Operations, options: MountOptions, backings: Backings, faults: Reporter
    ) -> None:
        self.operations = operations
        self._writable = cast(WritableOperations, operations)
        self._read_only = options.read_only or not isinstance(operations, WritableOperations)
        self._timeout_s = options.timeout_s
        self._backings = backings
        self._faults = faults
        self._listings: dict[Handle, Sequence[Entry]] = {}
        # Other handles than those of the server before this one, whose listings are not here.
        self._next_listing = itertools.count(int.from_bytes(os.urandom(4)) << 24)
        self._handlers: dict[int, Callable[[Request], Buffer]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.READLINK: lambda r: operations.readlink(r.inode),
            Opcode.OPEN: self._open,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: self._release,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.FSYNCDIR: _do_nothing,
            Opcode.FLUSH: _do_nothing,
            Opcode.FSYNC: _do_nothing,
            Opcode.DESTROY: _do_nothing,
        }
        if not self._read_only:
            self._handlers |= {
                Opcode.SETATTR: self._setattr,
                Opcode.SYMLINK: self._symlink,
                Opcode.MKNOD: self._mknod,
                Opcode.MKDIR: self._mkdir,
                Opcode.UNLINK: self._unlink,
                Opcode.RMDIR: self._rmdir,
                Opcode.RENAME: self._rename,
                Opcode.RENAME2: self._rename,
                Opcode.CREATE: self._create,
                Opcode.WRITE: self._write,
                Opcode.FLUSH: self._flush,
                Opcode.FSYNC: self._fsync,
                Opcode.FALLOCATE: self._fallocate,
            }

    def blocking_opcodes(self) -> frozenset[int]:
        """Requests that may wait for a network, and so must not hold a receiving thread."""
        blocking = REVERSIBLE if self.operations.may_block else frozenset()
        return blocking if self._read_only else blocking | _BLOCKING_WHEN_WRITABLE

    def dispatch(self, data: memoryview) -> tuple[int, int, Buffer]:
        """The unique id, errno (0 = none) and body of the reply to a request that gets one."""
        unique = 0
        try:
            request = requests.parse(data)
            unique = request.unique
            handler = self._handlers.get(request.opcode)
            if handler is not None:
                return unique, 0, handler(request)
            refused = self._read_only and request.opcode in MODIFYING
            return unique, errno.EROFS if refused else errno.ENOSYS, b""
        except requests.ProtocolError as error:
            self._faults.report_failure("a request of the kernel", error)
            if len(data) >= requests.IN_HEADER.struct.size:
                unique = requests.IN_HEADER.struct.unpack_from(data)[2]
            return unique, errno.EIO, b""
        except BaseException as error:  # whatever fails must cost one request, never the mount
            return unique, self.errno_of(error, _opcode_name(data)), b""

    def take_back(self, data: memoryview, reply: Buffer) -> None:
        """Undo a request of REVERSIBLE whose reply was not sent: its process was killed before."""
        try:
            self._take_back(requests.parse(data), reply)
        except FileSystemError:
            return
        except BaseException as error:  # no process waits for it, and the mount goes on
            self._faults.report_failure("taking an answer back", error)

    def _take_back(self, request: Request, reply: Buffer) -> None:
        if request.opcode == Opcode.LOOKUP:
            (inode,) = _FIRST_FIELD.unpack_from(reply)
            if inode:  # else the reply was that there is no such name
                self.operations.forget(Inode(inode), 1)
        elif request.opcode == Opcode.OPEN:
            self.operations.release(request.inode, Handle(_FIRST_FIELD.unpack_from(reply)[0]))
            self._backings.release(request.inode)
        elif request.opcode == Opcode.OPENDIR:
            self._listings.pop(Handle(_FIRST_FIELD.unpack_from(reply)[0]), None)
        elif request.opcode == Opcode.READDIRPLUS:
            for inode in replies.unpack_references(bytes(reply)):
                self.operations.forget(inode, 1)

    def errno_of(self, error: BaseException, what: str) -> int:
        """The errno for an exception: that of a refusal, else EIO after reporting the fault."""
        if isinstance(error, FileSystemError):
            return error.errno or errno.EIO
        if not isinstance(error, BootseerError):
            self._faults.report_failure(what, error)
        else:
            self._faults.report(f"{what} {type(error).__name__}", f"{what} failed: {error}")
        return errno.EIO

    def forget(self, data: memoryview) -> None:
        """FORGET and BATCH_FORGET, which get no reply."""
        try:
            request = requests.parse(data)
            if isinstance(request.body, requests.Forget):
                self.operations.forget(request.inode, request.body.references)
            else:
                for inode, count in request.body.items:
                    self.operations.forget(inode, count)
        except BaseException as error:  # it gets no reply, and the mount goes on
            self._faults.report_failure("forget", error)

    def _lookup(self, request: Request) -> bytes:
        try:
            attr = self.operations.lookup(request.inode, request.body.name)
        except FileSystemError as error:
            if error.errno == errno.ENOENT:
                return replies.pack_no_entry(self._timeout_s)
            raise
        return replies.pack_entry(attr, self._timeout_s)

    def _getattr(self, request: Request) -> bytes:
        return replies.pack_attr(self.operations.getattr(request.inode), self._timeout_s)

    def _open(self, request: Request) -> bytes:
        flags: int = request.body.flags
        if self._read_only and (flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC):
            raise FileSystemError(errno.EROFS)
        opened = self.operations.open(request.inode, flags)
        return self._open_reply(request.inode, flags, opened)

    def _open_reply(self, inode: Inode, flags: int, opened: Opened) -> bytes:
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        open_flags = replies.FOPEN_NOFLUSH if reads_only else 0
        backing_id = self._backings.acquire(inode, opened)
        if backing_id:
            # No other flag: the cache is the backing file's, and KEEP_CACHE would make open fail.
            open_flags |= replies.FOPEN_PASSTHROUGH
            return replies.pack_open(opened.handle, open_flags, backing_id)
        if opened.keep_cache:
            open_flags |= replies.FOPEN_KEEP_CACHE
        if opened.direct:
            open_flags |= replies.FOPEN_DIRECT_IO
        return replies.pack_open(opened.handle, open_flags)

    def _statfs(self, request: Request) -> bytes:
        name_bytes = self.operations.max_name_bytes
        return replies.pack_statfs(*self.operations.statfs(), name_bytes=name_bytes)

    def _release(self, request: Request) -> bytes:
        handle: Handle = request.body.handle
        try:
            self.operations.release(request.inode, handle)
        finally:
            self._backings.release(request.inode)
        return b""

    def _getxattr(self, request: Request) -> bytes:
        value = self.operations.getxattr(request.inode, request.body.name)
        return _xattr_reply(value, request.body.size)

    def _listxattr(self, request: Request) -> bytes:
        names = self.operations.listxattr(request.inode)
        return _xattr_reply(b"".join(name + b"\0" for name in names), request.body.size)

    def _opendir(self, request: Request) -> bytes:
        entries = self.operations.readdir(request.inode)
        handle = Handle(next(self._next_listing))
        self._listings[handle] = entries
        # Without FOPEN_CACHE_DIR: a kernel that keeps the listing does not see the tree grow.
        return replies.pack_open(handle, 0)

    def _entries(self, request: Request) -> Sequence[Entry]:
        """The listing made when it was opened; a new one if an earlier server made that."""
        handle: Handle = request.body.handle
        entries = self._listings.get(handle)
        if entries is None:
            entries = self._listings[handle] = self.operations.readdir(request.inode)
        return entries

    def _readdir(self, request: Request) -> bytes:
        _, offset, size = request.body
        return replies.pack_listing(self._entries(request), request.inode, offset, size)

    def _readdirplus(self, request: Request) -> bytes:
        _, offset, size = request.body
        entries = self._entries(request)
        reply = replies.pack_listing(
            entries, request.inode, offset, size, plus_timeout_s=self._timeout_s
        )
        self.operations.add_references(replies.unpack_references(reply))
        return reply

    def _releasedir(self, request: Request) -> bytes:
        self._listings.pop(request.body.handle, None)
        return b""

    def _setattr(self, request: Request) -> bytes:
        """A time of access is accepted and not kept; another owner is refused."""
        body: requests.Setattr = request.body
        attr: Attr | None = None
        if body.valid & (requests.FATTR_UID | requests.FATTR_GID):
            attr = self.operations.getattr(request.inode)
            owner_stays = not body.valid & requests.FATTR_UID or body.uid == attr.uid
            if not owner_stays or (body.valid & requests.FATTR_GID and body.gid != attr.gid):
                raise FileSystemError(errno.EPERM)
        if body.valid & requests.FATTR_SIZE:
            attr = self._writable.truncate(request.inode, body.size_bytes)
        mode = stat.S_IMODE(body.mode) if body.valid & requests.FATTR_MODE else None
        mtime_ns = body.mtime_ns if body.valid & requests.FATTR_MTIME else None
        if body.valid & requests.FATTR_MTIME_NOW:
            mtime_ns = time.time_ns()
        if mode is not None or mtime_ns is not None:
            attr = self._writable.setattr(request.inode, mode=mode, mtime_ns=mtime_ns)
        return replies.pack_attr(attr or self.operations.getattr(request.inode), self._timeout_s)

    def _mkdir(self, request: Request) -> bytes:
        body: requests.Mkdir = request.body
        attr = self._writable.mkdir(request.inode, body.name, body.mode & ~body.umask)
        return replies.pack_entry(attr, self._timeout_s)

    def _symlink(self, request: Request) -> bytes:
        body: requests.Symlink = request.body
        attr = self._writable.symlink(request.inode, body.name, body.target)
        return replies.pack_entry(attr, self._timeout_s)

    def _unlink(self, request: Request) -> bytes:
        self._writable.unlink(request.inode, request.body.name)
        return b""

    def _rmdir(self, request: Request) -> bytes:
        self._writable.rmdir(request.inode, request.body.name)
        return b""

    def _rename(self, request: Request) -> bytes:
        body: requests.Rename = request.body
        self._writable.rename(request.inode, body.name, body.new_parent, body.new_name, body.flags)
        return b""

    def _create(self, request: Request) -> bytes:
        body: requests.Create = request.body
        mode = stat.S_IMODE(body.mode) & ~body.umask
        attr, opened = self._writable.create(request.inode, body.name, mode, body.flags)
        open_reply = self._open_reply(attr.inode, body.flags, opened)
        return replies.pack_entry(attr, self._timeout_s) + open_reply

    def _mknod(self, request: Request) -> bytes:
        """Make an empty file; devices and pipes are refused, as no store keeps them."""
        body: requests.Mknod = request.body
        if not stat.S_ISREG(body.mode):
            raise FileSystemError(errno.EPERM)
        mode = stat.S_IMODE(body.mode) & ~body.umask
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        attr, opened = self._writable.create(request.inode, body.name, mode, flags)
        self._writable.release(attr.inode, opened.handle)
        return replies.pack_entry(attr, self._timeout_s)

    def _fallocate(self, request: Request) -> bytes:
        body: requests.Fallocate = request.body
        self._writable.fallocate(body.handle, body.offset, body.length, body.mode)
        return b""

    def _write(self, request: Request) -> bytes:
        body: requests.Write = request.body
        size = self._writable.write(
            request.inode, body.handle, body.offset, body.data, owner=body.owner
        )
        return replies.pack_write(size)

    def _flush(self, request: Request) -> bytes:
        body: requests.Flush = request.body
        self._writable.flush(request.inode, body.handle, owner=body.owner, thread=request.pid)
        return b""

    def _fsync(self, request: Request) -> bytes:
        self._writable.fsync(request.inode, request.body.handle)
        return b""


def _do_nothing(_: Request) -> bytes:
    return b""


def _xattr_reply(value: bytes, size: int) -> bytes:
    if size == 0:
        return replies.pack_xattr_size(len(value))
    if len(value) > size:
        raise FileSystemError(errno.ERANGE)
    return value


def _opcode_name(data: memoryview) -> str:
    opcode: Any = requests.IN_HEADER.struct.unpack_from(data)[1]
    return Opcode(opcode).name.lower()
