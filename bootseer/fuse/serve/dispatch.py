"""What every request but READ is answered with; knows the protocol, not the device."""

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

WRITING = frozenset(
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
UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
_BY_NAME = {
    "lookup": (Opcode.LOOKUP,),
    "getattr": (Opcode.GETATTR,),
    "readlink": (Opcode.READLINK,),
    "readdir": (Opcode.OPENDIR, Opcode.READDIR, Opcode.READDIRPLUS),
    "open": (Opcode.OPEN,),
    "release": (Opcode.RELEASE,),
    "statfs": (Opcode.STATFS,),
    "getxattr": (Opcode.GETXATTR,),
    "listxattr": (Opcode.LISTXATTR,),
}
KILLABLE = frozenset(
    opcode for name, opcodes in _BY_NAME.items() if name != "release" for opcode in opcodes
)
"""Who waits for these may be killed: they change nothing that `unwanted` does not take back."""
NAME_BYTES = 255
"""The longest name that Linux takes."""
_FIRST = struct.Struct("<Q")
_SLOW_WHEN_WRITABLE = WRITING | {Opcode.FLUSH, Opcode.FSYNC, Opcode.FSYNCDIR, Opcode.RELEASE}


class Negotiated(NamedTuple):
    """What INIT settled for the life of a mount; `flags` holds both words."""

    minor: int
    flags: int
    max_write_bytes: int

    @property
    def passthrough(self) -> bool:
        """The kernel may read backing files itself."""
        return bool(self.flags & replies.PASSTHROUGH)

    @property
    def resend(self) -> bool:
        """The kernel sends unanswered requests again when asked to."""
        return bool(self.flags & replies.HAS_RESEND)


def negotiate(request: requests.Init, options: MountOptions, *, privileged: bool) -> Negotiated:
    """Choose from what the kernel offers. Raises WireError for a protocol that is not ours."""
    if request.major != requests.MAJOR or request.minor < 23:
        raise requests.WireError(
            f"kernel speaks FUSE {request.major}.{request.minor}, not 7.23 or up"
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
        # Without the flag above a file that is being written, which goes past the page cache,
        # cannot be mapped for writing (ENODEV): its pages would come in no order.
        wanted |= replies.HANDLE_KILLPRIV_V2  # else each write asks for security.capability
    if options.passthrough and privileged:
        wanted |= replies.PASSTHROUGH
    max_write = 128 << 10 if options.read_only else options.max_write_bytes
    return Negotiated(request.minor, request.flags & wanted, max_write)


def init_answer(request: requests.Init, settled: Negotiated, options: MountOptions) -> bytes:
    """The answer to INIT that says what was settled."""
    return replies.init(
        minor=request.minor,
        max_readahead=min(request.max_readahead, options.read_ahead_kib << 10),
        flags=settled.flags,
        max_background=options.max_background,
        max_write=settled.max_write_bytes,
        max_pages=max(1, min(0xFFFF, max(options.max_read_bytes, settled.max_write_bytes) >> 12)),
    )


class Session:
    """Answers requests by asking the operations; safe to call from several threads.

    Listings with attributes (READDIRPLUS) count as lookups in the kernel, so it may forget more
    references than `lookup` gave; operations that have `referred` are told of these inodes.
    """

    def __init__(
        self, operations: Operations, options: MountOptions, backings: Backings, faults: Reporter
    ) -> None:
        self.operations = operations
        self._writable = cast(WritableOperations, operations)
        self._read_only = options.read_only or not hasattr(operations, "write")
        self._timeout_s = options.timeout_s
        self._backings = backings
        self._faults = faults
        self._listings: dict[Handle, Sequence[Entry]] = {}
        # Unlike those of the server before this one, whose listings we have not.
        self._next_listing = itertools.count(int.from_bytes(os.urandom(4)) << 24)
        self._answers: dict[int, Callable[[Request], Buffer]] = {
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
            Opcode.FSYNCDIR: _nothing,
            Opcode.FLUSH: _nothing,
            Opcode.FSYNC: _nothing,
            Opcode.DESTROY: _nothing,
        }
        if not self._read_only:
            self._answers |= {
                Opcode.SETATTR: self._setattr,
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
            }
            if hasattr(operations, "symlink"):
                self._answers[Opcode.SYMLINK] = self._symlink
            if hasattr(operations, "fallocate"):
                self._answers[Opcode.FALLOCATE] = self._fallocate

    def slow_opcodes(self) -> frozenset[int]:
        """Requests that may wait for a network, and so must not hold a receiving thread."""
        names: Sequence[str] = getattr(self.operations, "slow", ())
        slow = frozenset(int(opcode) for name in names for opcode in _BY_NAME[name])
        return slow if self._read_only else slow | _SLOW_WHEN_WRITABLE

    def answer(self, data: memoryview) -> tuple[int, int, Buffer]:
        """The unique id, errno (0 = fine) and answer of one request that wants an answer."""
        unique = 0
        try:
            request = requests.parse(data)
            unique = request.unique
            handler = self._answers.get(request.opcode)
            if handler is not None:
                return unique, 0, handler(request)
            refused = self._read_only and request.opcode in WRITING
            return unique, errno.EROFS if refused else errno.ENOSYS, b""
        except requests.WireError as error:
            self._faults.report_failure("a request of the kernel", error)
            if len(data) >= requests.IN_HEADER.struct.size:
                unique = requests.IN_HEADER.struct.unpack_from(data)[2]
            return unique, errno.EIO, b""
        except BaseException as error:  # whatever fails must cost one request, never the mount
            return unique, self.errno_of(error, _name_of(data)), b""

    def unwanted(self, data: memoryview, answer: Buffer) -> None:
        """Take back what an answer gave that nobody got: its asker was killed meanwhile."""
        try:
            self._take_back(requests.parse(data), answer)
        except FileSystemError:
            return
        except BaseException as error:  # nobody waits for it, and the mount goes on
            self._faults.report_failure("taking an answer back", error)

    def _take_back(self, request: Request, answer: Buffer) -> None:
        if request.opcode == Opcode.LOOKUP:
            (inode,) = _FIRST.unpack_from(answer)
            if inode:  # not that there is no such name
                self.operations.forget(Inode(inode), 1)
        elif request.opcode == Opcode.OPEN:
            self.operations.release(request.inode, Handle(_FIRST.unpack_from(answer)[0]))
            self._backings.released(request.inode)
        elif request.opcode == Opcode.OPENDIR:
            self._listings.pop(Handle(_FIRST.unpack_from(answer)[0]), None)
        elif request.opcode == Opcode.READDIRPLUS and hasattr(self.operations, "referred"):
            for inode in replies.listed(bytes(answer)):
                self.operations.forget(inode, 1)

    def errno_of(self, error: BaseException, what: str) -> int:
        """The answer to an exception: refusals are ordinary, all else is EIO and said once."""
        if isinstance(error, FileSystemError):
            return error.errno or errno.EIO
        if not isinstance(error, BootseerError):
            self._faults.report_failure(what, error)
        else:
            self._faults.report(f"{what} {type(error).__name__}", f"{what} failed: {error}")
        return errno.EIO

    def forget(self, data: memoryview) -> None:
        """FORGET and BATCH_FORGET, which nobody waits for."""
        try:
            request = requests.parse(data)
            if isinstance(request.body, requests.Forget):
                self.operations.forget(request.inode, request.body.dropped)
            else:
                for inode, count in request.body.items:
                    self.operations.forget(inode, count)
        except BaseException as error:  # nobody waits for an answer, and the mount goes on
            self._faults.report_failure("forget", error)

    def _lookup(self, request: Request) -> bytes:
        try:
            attr = self.operations.lookup(request.inode, request.body.name)
        except FileSystemError as error:
            if error.errno == errno.ENOENT:
                return replies.no_entry(self._timeout_s)
            raise
        return replies.entry(attr, self._timeout_s)

    def _getattr(self, request: Request) -> bytes:
        return self._attr_answer(self.operations.getattr(request.inode))

    def _attr_answer(self, attr: Attr) -> bytes:
        return replies.attr_answer(attr, self._timeout_s)

    def _open(self, request: Request) -> bytes:
        flags: int = request.body.flags
        if self._read_only and (flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC):
            raise FileSystemError(errno.EROFS)
        return self._opened(request.inode, flags, self.operations.open(request.inode, flags))

    def _opened(self, inode: Inode, flags: int, opened: Opened) -> bytes:
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        wanted = replies.FOPEN_NOFLUSH if reads_only else 0
        backing_id = self._backings.opened(inode, opened)
        if backing_id:
            # Nothing else: the cache is the backing file's, and KEEP_CACHE would make open fail.
            return replies.opened(opened.handle, wanted | replies.FOPEN_PASSTHROUGH, backing_id)
        if opened.keep_cache:
            wanted |= replies.FOPEN_KEEP_CACHE
        if opened.direct:
            wanted |= replies.FOPEN_DIRECT_IO
        return replies.opened(opened.handle, wanted)

    def _statfs(self, request: Request) -> bytes:
        most: int = getattr(self.operations, "most_name_bytes", NAME_BYTES)
        return replies.statfs(*self.operations.statfs(), name_bytes=most)

    def _release(self, request: Request) -> bytes:
        handle: Handle = request.body.handle
        try:
            self.operations.release(request.inode, handle)
        finally:
            self._backings.released(request.inode)
        return b""

    def _getxattr(self, request: Request) -> bytes:
        value = self.operations.getxattr(request.inode, request.body.name)
        return _sized(value, request.body.size)

    def _listxattr(self, request: Request) -> bytes:
        names = self.operations.listxattr(request.inode)
        return _sized(b"".join(name + b"\0" for name in names), request.body.size)

    def _opendir(self, request: Request) -> bytes:
        entries = self.operations.readdir(request.inode)
        handle = Handle(next(self._next_listing))
        self._listings[handle] = entries
        # Never kept by the kernel (FOPEN_CACHE_DIR), which would not see a tree that grows.
        return replies.opened(handle, 0)

    def _entries(self, request: Request) -> Sequence[Entry]:
        """The listing as of opening; one opened in a server before this one is made again."""
        handle: Handle = request.body.handle
        entries = self._listings.get(handle)
        if entries is None:
            entries = self._listings[handle] = self.operations.readdir(request.inode)
        return entries

    def _readdir(self, request: Request) -> bytes:
        _, offset, size = request.body
        return replies.listing(self._entries(request), request.inode, offset, size)

    def _readdirplus(self, request: Request) -> bytes:
        _, offset, size = request.body
        entries = self._entries(request)
        answer = replies.listing_plus(entries, request.inode, offset, size, self._timeout_s)
        referred = getattr(self.operations, "referred", None)
        if referred is not None:
            referred(replies.listed(answer))
        return answer

    def _releasedir(self, request: Request) -> bytes:
        self._listings.pop(request.body.handle, None)
        return b""

    def _setattr(self, request: Request) -> bytes:
        """A time of reading is taken and not kept; an owner is refused, and a mode or time, too,
        by operations that keep none.
        """
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
            if not hasattr(self.operations, "setattr"):
                raise FileSystemError(errno.EPERM)
            attr = self._writable.setattr(request.inode, mode=mode, mtime_ns=mtime_ns)
        return self._attr_answer(attr or self.operations.getattr(request.inode))

    def _mkdir(self, request: Request) -> bytes:
        body: requests.Mkdir = request.body
        attr = self._writable.mkdir(request.inode, body.name, body.mode & ~body.umask)
        return replies.entry(attr, self._timeout_s)

    def _symlink(self, request: Request) -> bytes:
        body: requests.Symlink = request.body
        attr = self._writable.symlink(request.inode, body.name, body.target)
        return replies.entry(attr, self._timeout_s)

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
        answer = self._opened(attr.inode, body.flags, opened)
        return replies.entry(attr, self._timeout_s) + answer

    def _mknod(self, request: Request) -> bytes:
        """An empty file; nothing else that a name can be made as would be the same elsewhere."""
        body: requests.Mknod = request.body
        if not stat.S_ISREG(body.mode):
            raise FileSystemError(errno.EPERM)
        mode = stat.S_IMODE(body.mode) & ~body.umask
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        attr, opened = self._writable.create(request.inode, body.name, mode, flags)
        self._writable.release(attr.inode, opened.handle)
        return replies.entry(attr, self._timeout_s)

    def _fallocate(self, request: Request) -> bytes:
        body: requests.Fallocate = request.body
        self._writable.fallocate(body.handle, body.offset, body.length, body.mode)
        return b""

    def _write(self, request: Request) -> bytes:
        body: requests.Write = request.body
        taken = self._writable.write(
            request.inode, body.handle, body.offset, body.data, owner=body.owner
        )
        return replies.written(taken)

    def _flush(self, request: Request) -> bytes:
        body: requests.Flush = request.body
        self._writable.flush(request.inode, body.handle, owner=body.owner, thread=request.pid)
        return b""

    def _fsync(self, request: Request) -> bytes:
        self._writable.fsync(request.inode, request.body.handle)
        return b""


def _nothing(_: Request) -> bytes:
    return b""


def _sized(value: bytes, size: int) -> bytes:
    if size == 0:
        return replies.xattr_size(len(value))
    if len(value) > size:
        raise FileSystemError(errno.ERANGE)
    return value


def _name_of(data: memoryview) -> str:
    number: Any = requests.IN_HEADER.struct.unpack_from(data)[1]
    return Opcode(number).name.lower()
