"""A checkpoint file as a Python file object: seekable, read in parallel, verified.

`open` takes a striped checkpoint by its name, a file within a directory checkpoint, or any plain
object of a store. The result can be given to `torch.load`, pandas, pyarrow or anything else that
reads binary files; large reads go straight to the reader's own buffer.
"""

from __future__ import annotations

import contextlib
import errno
import io
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.readahead import ReadAhead
from bootseer.blocks.fetch.slabs import copy, writable
from bootseer.blocks.settings import Priority
from bootseer.errors import BootseerError, CorruptDataError, UsageError
from bootseer.storage.open import open_object
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.store import Store
from bootseer.stripedfs.file_errors import file_error
from bootseer.stripedfs.new_bytes import fill_bytes
from bootseer.stripedfs.read.open import locate, open_any, open_file
from bootseer.stripedfs.read.sources import FileSource, as_damage
from bootseer.stripedfs.read.tree import Tree
from bootseer.stripedfs.shared_fetcher import share_of, shared_fetcher

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PEEK_BYTES = 64 << 10
HELD_BYTES = (32 << 10, 1 << 20)
"""Sizes of reads that are copied from the fetcher's memory where it holds them.

Smaller reads have a quick path of their own; larger ones are fetched into the reader's buffer.
"""


class StripedFile(io.RawIOBase):
    """A checkpoint file for reading; `open` makes one.

    `read_at` may be called from any number of threads; the position of `read` and `seek` is one
    for all, as with every file object. Reads are short only at the end. They raise our errors,
    each an OSError as well (`file_errors`): CorruptDataError (wrong bytes on every replica, or a
    plain file that changed meanwhile), StoreUnavailableError, DeadlineError. The file can be
    pickled, and used after a fork: the receiving process opens it again and refuses other bytes.
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
        process's own is shared. With `own_store`, the source's store is used by this file alone,
        and its idle connections are closed with it.
        """
        super().__init__()
        self.name = name
        self._source = source
        self._key = source.key
        self._fetcher = fetcher
        self._own_store = own_store
        self._reopen = reopen
        self._pid = os.getpid()
        self._position = 0
        self._peeked, self._peeked_at = b"", 0  # what lines are read from, and its offset
        self._ahead: ReadAhead | None = None

    @classmethod
    def open(
        cls,
        reopen: Callable[[], FileSource],
        *,
        fetcher: Fetcher | None = None,
        name: str = "",
        own_store: bool = False,
    ) -> StripedFile:
        """Open a file by what opens it again elsewhere."""
        _release_dropped()
        return cls(reopen(), fetcher=fetcher, reopen=reopen, name=name, own_store=own_store)

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
        view, offset = writable(buffer), operator.index(offset)
        source, fetcher, ahead = self._ensure_open()
        wanted = min(len(view), source.size_bytes - offset)
        if offset < 0:
            raise ValueError(f"a file has no byte {offset}")
        if wanted <= 0:
            return 0
        for begin, length in ahead.note(offset, wanted):
            fetcher.prefetch(source, begin, length, Priority.HOT)
        done = _copy_held(fetcher, source, offset, view[:wanted])
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
        data = fill_bytes(wanted, lambda view: self.read_at(self._position, view))
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def write(self, data: object, /) -> NoReturn:
        """Never: it is for reading."""
        raise io.UnsupportedOperation("not writable")

    def peek(self, size: int = 0, /) -> bytes:
        """Some bytes from the position on, which does not change."""
        self._check()
        done = self._position - self._peeked_at
        if 0 <= done < len(self._peeked):
            return self._peeked[done:]
        length = max(0, min(PEEK_BYTES, self.size - self._position))
        self._peeked = fill_bytes(length, lambda view: self.read_at(self._position, view))
        self._peeked_at = self._position
        return self._peeked

    def readline(self, size: int | None = -1, /) -> bytes:
        self._check()
        most = operator.index(size) if size is not None and size >= 0 else sys.maxsize
        parts: list[bytes] = []
        left = most
        while left > 0:
            done = self._position - self._peeked_at
            if not 0 <= done < len(self._peeked):
                if not self.peek():
                    break
                done = 0
            newline = self._peeked.find(b"\n", done)
            end = min(len(self._peeked) if newline < 0 else newline + 1, done + left)
            part = self._peeked[done:end]
            self._position += len(part)
            left -= len(part)
            if not parts and (left <= 0 or newline >= 0):
                return part
            parts.append(part)
            if newline >= 0:
                break
        return b"".join(parts)

    def __iter__(self) -> Iterator[bytes]:
        """The lines from here on; reads and seeks in between take effect, as in every file."""
        self._check()
        while peeked := self.peek():
            end = peeked.rfind(b"\n") + 1
            if not end:
                yield self.readline()  # longer than what is peeked at
                continue
            begin = self._position
            for line in io.BytesIO(peeked[:end]):
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
        """Stop reading ahead, and release memory and own connections; twice is safe."""
        _release_dropped()
        self._detach().release()
        self._peeked = b""
        super().close()

    def __del__(self) -> None:
        # Unlike other files it does not close itself here: the garbage collector may run at any
        # moment, even in a fetcher's thread that holds the lock needed to release its blocks.
        with contextlib.suppress(AttributeError):  # where `__init__` failed
            resources = self._detach()
            if resources.ahead is not None or resources.store is not None:
                _dropped.append(resources)

    def _detach(self) -> _Resources:
        """Take what must be released with the file; nothing is left for a second call."""
        ahead, self._ahead = self._ahead, None
        store = self._source.store if self._own_store and not self.closed else None
        return _Resources(self._pid, self._source, self._fetcher, ahead, store)

    def __repr__(self) -> str:
        return f"<StripedFile {self.name!r} of {self.size} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is None:
            raise TypeError("this file was made from a source; only one from a URL can be pickled")
        return (_unpickle, (self._reopen, self._key, self.name, self._position))

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")

    def _ensure_open(self) -> tuple[FileSource, Fetcher, ReadAhead]:
        """The source, fetcher and read-ahead of this process."""
        self._check()
        _release_dropped()
        if self._pid != os.getpid():
            self._reopen_after_fork()
        fetcher = self._fetcher if self._fetcher is not None else shared_fetcher()
        ahead = self._ahead
        if ahead is None:
            source = self._source
            ahead = self._ahead = ReadAhead(
                source.size_bytes, share_of(fetcher), block_bytes=source.block_bytes
            )
        return self._source, fetcher, ahead

    def _reopen_after_fork(self) -> None:
        """Open the file again: neither connections nor threads are shared with the parent."""
        if self._reopen is None:
            raise UsageError("this file was made from a source; open it in the child process")
        self._source = _check_same(self._reopen(), self._key, self.name)
        self._pid, self._ahead, self._fetcher = os.getpid(), None, None


class _Resources(NamedTuple):
    """What a file holds that must be released with it."""

    pid: int
    source: FileSource
    fetcher: Fetcher | None
    ahead: ReadAhead | None
    store: Store | None

    def release(self) -> None:
        if self.ahead is not None and self.pid == os.getpid():
            self.ahead.close()
            fetcher = self.fetcher if self.fetcher is not None else shared_fetcher()
            fetcher.forget(self.source)  # or a process that opens many files would fill up
        if self.store is not None:
            self.store.close()


_dropped: deque[_Resources] = deque()
"""Of files that were not closed, until the next one is opened, read or closed."""


_inherited: list[_Resources] = []
"""Of such files of the parent process. They are kept: at its end a client of HDFS waits for its
threads, which a fork does not have."""


def _release_dropped() -> None:
    while _dropped:
        try:
            resources = _dropped.popleft()
        except IndexError:  # another thread was quicker
            return
        if resources.pid == os.getpid():
            resources.release()
        else:
            _inherited.append(resources)


class _Reopen:
    """Opens a URL again, wherever it was pickled to."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._url, self._options = url, options

    def __call__(self) -> FileSource:
        store, info = locate(self._url, self._options)
        return open_file(store, info)


def open(  # noqa: A001 - `stripedfs.open(url)` is the name users know
    url: str | os.PathLike[str], *, options: StoreOptions = DEFAULTS, fetcher: Fetcher | None = None
) -> StripedFile:
    """Open a file for reading, by the URL or path of a striped checkpoint or any plain object.

    `…/ckpt.pt` and `…/ckpt.pt.stripes` name the same striped file; `…/ckpt/rank0.pt` may lie in
    the directory checkpoint `…/ckpt`. Raises NotFoundError, AccessDeniedError, CorruptDataError
    (a damaged manifest, a missing stripe, wrong lengths), NotSupportedError (made by a newer
    version), StoreUnavailableError; UsageError for a folder or a directory checkpoint.
    """
    from bootseer.events.redaction import safe_url

    url = os.fspath(url)
    reopen = _Reopen(url, options)
    return StripedFile.open(reopen, fetcher=fetcher, name=safe_url(url), own_store=True)


def open_tree(url: str | os.PathLike[str], *, options: StoreOptions = DEFAULTS) -> Tree:
    """Open a directory checkpoint: `.manifest` lists it, `.source(entry)` opens a file of it.

    Raises as `open`; UsageError when the URL names a file.
    """
    store, name = open_object(os.fspath(url), options)
    opened = open_any(store, name)
    if not isinstance(opened, Tree):
        raise UsageError(f"{name} in {store.url} is a file, not a directory checkpoint")
    return opened


def _copy_held(fetcher: Fetcher, source: FileSource, offset: int, view: memoryview) -> int:
    """Copy a read of middle size whose blocks are in memory; 0 where they are not.

    This is cheaper than waiting for blocks as a reader of the fetcher.
    """
    if not HELD_BYTES[0] <= len(view) <= HELD_BYTES[1]:
        return 0
    held = fetcher.hold(source, offset, len(view))
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


def _check_same(source: FileSource, key: str, name: str) -> FileSource:
    if source.key != key:
        raise CorruptDataError(f"{name} is another one since it was opened; open it again")
    return source


def _unpickle(reopen: Callable[[], FileSource], key: str, name: str, position: int) -> StripedFile:
    _release_dropped()
    source = reopen()
    try:
        _check_same(source, key, name)
        file = StripedFile(source, reopen=reopen, name=name, own_store=True)
    except BaseException:
        source.store.close()
        raise
    file.seek(position)
    return file


_unpickled = _unpickle  # the name in pickles that earlier versions made
