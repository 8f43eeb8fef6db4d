"""A checkpoint file as a Python file object: seekable, read in parallel, verified.

`open` takes a striped checkpoint by its name, a file within a directory checkpoint, or any plain
object of a store. The object can be given to `torch.load`, pandas, pyarrow or anything else that
reads binary files; whole large reads land in the reader's own buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bootseer.blocks.fetch.slabs import copy, writable
from bootseer.errors import BootseerError, CorruptDataError, UsageError
from bootseer.storage.open import open_object
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.stripedfs.file_errors import file_error
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.locate import locate
from bootseer.stripedfs.read.open import Tree, open_entry
from bootseer.stripedfs.read.sources import FileSource, as_damage
from bootseer.stripedfs.shared_fetcher import share_of, shared_fetcher

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.blocks.fetch.plan.readahead import ReadAhead
    from bootseer.storage.store import Store

PEEK_BYTES = 64 << 10
HELD_BYTES = (32 << 10, 1 << 20)
"""Smaller reads have a quick way of their own, larger ones land in their reader's memory."""


class StripedFile(io.RawIOBase):
    """A checkpoint file for reading; `open` makes one.

    `read_at` may be called from any number of threads; the position of `read` and `seek` is one
    for all, as with every file object. Reads are short only at the end. They raise our errors,
    each an OSError as well (`fileerrors`): CorruptDataError (wrong bytes on every replica, or a
    plain file that changed meanwhile), StoreUnavailableError, DeadlineError. It can be pickled,
    and used after a fork: the receiving process opens it anew and refuses other bytes than these.
    """

    mode = "rb"

    def __init__(
        self,
        source: FileSource,
        *,
        fetcher: Fetcher | None = None,
        reopen: Callable[[], FileSource] | None = None,
        name: str = "",
        own_store: bool = False,
    ) -> None:
        """`reopen` opens the same file again, elsewhere; it must be picklable for the file to be.

        `name` is what messages and `repr` show: no credentials in it. Without a fetcher, the
        process's own is shared. With `own_store`, nobody else uses the source's store, and its
        idle connections are closed with the file.
        """
        super().__init__()
        _clear_left()
        self.name = name
        self._source = source
        self._key = source.key
        self._given = fetcher
        self._own_store = own_store
        self._reopen = reopen
        self._pid = os.getpid()
        self._position = 0
        self._lines, self._lines_at = b"", 0  # what lines are read from, and where that lies
        self._ahead: ReadAhead | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._source.size_bytes

    @property
    def source(self) -> FileSource:
        """What the fetcher reads; its `key` names the bytes."""
        return self._source

    def read_at(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill `buffer` from `offset` on; returns its bytes, fewer only at the end of the file."""
        try:
            return self._read_at(offset, buffer)
        except BootseerError as error:
            raise file_error(as_damage(error, self._source)) from error

    def _read_at(self, offset: int, buffer: WriteableBuffer) -> int:
        from bootseer.blocks.settings import Priority

        view, offset = writable(buffer), operator.index(offset)
        source, fetcher, ahead = self._ready()
        wanted = min(len(view), source.size_bytes - offset)
        if offset < 0:
            raise ValueError(f"a file has no byte {offset}")
        if wanted <= 0:
            return 0
        for begin, length in ahead.note(offset, wanted):
            fetcher.prefetch(source, begin, length, Priority.HOT)
        done = _copied(fetcher, source, offset, view[:wanted])
        if not done:
            done = fetcher.read_into(source, offset, view[:wanted])
        if source.doubtful(offset, done):
            source.confirm()
        return done

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        done = self.read_at(self._position, buffer)
        self._position += done
        return done

    def read(self, size: int | None = -1, /) -> bytes:
        self._check()
        left = max(0, self.size - self._position)
        size = -1 if size is None else operator.index(size)
        wanted = left if size < 0 else min(size, left)
        data = bytes_filled(wanted, lambda view: self.read_at(self._position, view))
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def write(self, data: object, /) -> NoReturn:
        """Never: it is for reading."""
        raise io.UnsupportedOperation("not writable")

    def peek(self, size: int = 0, /) -> bytes:
        """Some bytes from here on without moving."""
        self._check()
        done = self._position - self._lines_at
        if 0 <= done < len(self._lines):
            return self._lines[done:]
        length = max(0, min(PEEK_BYTES, self.size - self._position))
        self._lines = bytes_filled(length, lambda view: self.read_at(self._position, view))
        self._lines_at = self._position
        return self._lines

    def readline(self, size: int | None = -1, /) -> bytes:
        self._check()
        most = operator.index(size) if size is not None and size >= 0 else sys.maxsize
        parts: list[bytes] = []
        left = most
        while left > 0:
            done = self._position - self._lines_at
            if not 0 <= done < len(self._lines):
                if not self.peek():
                    break
                done = 0
            found = self._lines.find(b"\n", done)
            end = min(len(self._lines) if found < 0 else found + 1, done + left)
            part = self._lines[done:end]
            self._position += len(part)
            left -= len(part)
            if not parts and (left <= 0 or found >= 0):
                return part
            parts.append(part)
            if found >= 0:
                break
        return b"".join(parts)

    def __iter__(self) -> Iterator[bytes]:
        """The lines from here on; reads and seeks in between are obeyed, as in every file."""
        self._check()
        while piece := self.peek():
            end = piece.rfind(b"\n") + 1
            if not end:
                yield self.readline()  # longer than what is looked at together
                continue
            begin = self._position
            for line in io.BytesIO(piece[:end]):
                self._position = begin = begin + len(line)
                yield line
                if self._position != begin or self.closed:
                    break

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check()
        offset = operator.index(offset)
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}.get(whence)
        if base is None:
            raise ValueError(f"whence is {whence}, not 0, 1 or 2")
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a position before the file's begin")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        self._check()
        return self._position

    def readable(self) -> bool:
        self._check()
        return True

    def seekable(self) -> bool:
        self._check()
        return True

    def close(self) -> None:
        """Read nothing ahead any more, and let memory and own connections go; twice is safe."""
        _clear_left()
        self._let_go().done()
        self._lines = b""
        super().close()

    def __del__(self) -> None:
        # Not `close`, as of other files: the garbage collector comes in the midst of anything, also
        # in a thread of the fetcher's that holds the lock by which its blocks are let go.
        with contextlib.suppress(AttributeError):  # where `__init__` failed
            left = self._let_go()
            if left.ahead is not None or left.store is not None:
                _left.append(left)

    def _let_go(self) -> _Left:
        """What is to be ended with the file; nothing of it the second time."""
        ahead, self._ahead = self._ahead, None
        store = self._source.store if self._own_store and not self.closed else None
        return _Left(self._pid, self._source, self._given, ahead, store)

    def __repr__(self) -> str:
        return f"<StripedFile {self.name!r} of {self.size} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is None:
            raise TypeError("this file was made from a source; only one from a URL can be pickled")
        return (_unpickled, (self._reopen, self._key, self.name, self._position))

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")

    def _ready(self) -> tuple[FileSource, Fetcher, ReadAhead]:
        """The source, fetcher and read-ahead of this process."""
        from bootseer.blocks.fetch.plan.readahead import ReadAhead

        self._check()
        _clear_left()
        if self._pid != os.getpid():
            self._arrive()
        fetcher = self._given if self._given is not None else shared_fetcher()
        ahead = self._ahead
        if ahead is None:
            source = self._source
            ahead = self._ahead = ReadAhead(
                source.size_bytes, share_of(fetcher), block_bytes=source.block_bytes
            )
        return self._source, fetcher, ahead

    def _arrive(self) -> None:
        """After a fork: neither connections nor threads are to be shared with the parent."""
        if self._reopen is None:
            raise UsageError("this file was made from a source; open it in the child process")
        self._source = _same(self._reopen(), self._key, self.name)
        self._pid, self._ahead, self._given = os.getpid(), None, None


class _Left(NamedTuple):
    """What a file leaves."""

    pid: int
    source: FileSource
    given: Fetcher | None
    ahead: ReadAhead | None
    store: Store | None

    def done(self) -> None:
        """End it."""
        if self.ahead is not None and self.pid == os.getpid():
            self.ahead.close()
            fetcher = self.given if self.given is not None else shared_fetcher()
            fetcher.forget(self.source)  # or a process that opens many files would fill up
        if self.store is not None:
            self.store.close()


_left: deque[_Left] = deque()
"""Of files that nobody closed, until the next one is opened, read or closed."""


_makers: list[_Left] = []
"""Of files of the process that forked this one. They stay, for a client of HDFS waits at its end
for threads that no fork has."""


def _clear_left() -> None:
    while _left:
        try:
            left = _left.popleft()
        except IndexError:  # another thread was quicker
            return
        if left.pid == os.getpid():
            left.done()
        else:
            _makers.append(left)


class _Reopen:
    """Opens a URL again, wherever it was pickled to."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._url, self._options = url, options

    def __call__(self) -> FileSource:
        return _source_at(self._url, self._options)


def open(  # noqa: A001 - `stripedfs.open(url)` is the name users know
    url: str | os.PathLike[str], *, options: StoreOptions = DEFAULTS, fetcher: Fetcher | None = None
) -> StripedFile:
    """Open a file for reading, by the URL or path of a striped checkpoint or any plain object.

    `…/ckpt.pt` and `…/ckpt.pt.stripes` name the same striped file; `…/ckpt/rank0.pt` may lie in
    the directory checkpoint `…/ckpt`. Raises NotFoundError, AccessDeniedError, CorruptDataError
    (a damaged manifest, a missing stripe, lengths that lie), NotSupportedError (made by a newer
    version), StoreUnavailableError; UsageError for a folder or a directory checkpoint.
    """
    from bootseer.storage.urls import safe_url

    url = os.fspath(url)
    reopen = _Reopen(url, options)
    return StripedFile(reopen(), fetcher=fetcher, reopen=reopen, name=safe_url(url), own_store=True)


def open_tree(url: str | os.PathLike[str], *, options: StoreOptions = DEFAULTS) -> Tree:
    """Open a directory checkpoint: `.manifest` lists it, `.source(entry)` opens a file of it.

    Raises as `open`; UsageError when the URL names a file.
    """
    store, name = open_object(os.fspath(url), options)
    opened = open_entry(store, name)
    if not isinstance(opened, Tree):
        raise UsageError(f"{name} in {store.url} is a file, not a directory checkpoint")
    return opened


class NewBytes:
    """Bytes that are filled through `view` and then taken, without a second copy of them.

    The C interface lets whoever made a bytes object without contents fill it, as long as nobody
    else has it; a copy of a large one would cost more than fetching it, and twice the memory.
    """

    __slots__ = ("_data", "view")

    def __init__(self, length: int) -> None:
        self._data: bytes = _new_bytes(None, length)
        self.view = memoryview(b"")
        if length:
            # A bytes object ends in its contents and one zero byte, which its size counts.
            begin = id(self._data) + bytes.__basicsize__ - 1
            memory = (ctypes.c_char * length).from_address(begin)
            setattr(memory, "owner", self._data)  # noqa: B010 - it lives as long as any view
            self.view = memoryview(memory).cast("B")

    def taken(self, length: int) -> bytes:
        """The first `length` bytes; nothing may write to `view` any more."""
        return self._data if length == len(self._data) else self._data[:length]


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def bytes_filled(length: int, fill: Callable[[memoryview], int]) -> bytes:
    """New bytes that `fill` writes and counts."""
    new = NewBytes(max(0, length))
    return new.taken(fill(new.view) if length > 0 else 0)


def _copied(fetcher: Fetcher, source: FileSource, offset: int, view: memoryview) -> int:
    """Copy a read of middle size whose blocks are in memory: cheaper than joining for them."""
    if not HELD_BYTES[0] <= len(view) <= HELD_BYTES[1]:
        return 0
    held = fetcher.held(source, offset, len(view))
    if held is None:
        return 0
    done = 0
    try:
        for part in held.views:
            copy(view[done : done + len(part)], part)
            done += len(part)
    finally:
        held.release()
    return done


def _source_at(url: str, options: StoreOptions) -> FileSource:
    store, found = locate(url, options)
    return namespace.source_of(store, found)


def _same(source: FileSource, key: str, name: str) -> FileSource:
    if source.key != key:
        raise CorruptDataError(f"{name} is another one since it was opened; open it again")
    return source


def _unpickled(reopen: Callable[[], FileSource], key: str, name: str, position: int) -> StripedFile:
    source = reopen()
    try:
        file = StripedFile(_same(source, key, name), reopen=reopen, name=name, own_store=True)
    except BaseException:
        source.store.close()
        raise
    file.seek(position)
    return file
