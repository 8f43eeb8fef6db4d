"""HDFS by the cluster's own libhdfs, through pyarrow: for clusters whose client must be theirs.

Needs what pyarrow's `HadoopFileSystem` needs: Java, HADOOP_HOME, CLASSPATH and libhdfs.so. The
same class works over any other `pyarrow.fs.FileSystem` whose `move` refuses a name that is taken,
as HDFS does. libhdfs cannot rename over an existing object, so `replace` and `rename` remove the
old one first: for a moment the name is not there, and readers here look again before they believe
that. The replica cannot be chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from bootseer.errors import (
    BusyError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.events.redaction import redact_message
from bootseer.storage.bounded_calls import Transfer, within
from bootseer.storage.hdfs.libhdfs_writer import ArrowWriter, mapped
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.store import NO_HINTS, Placed, Preferred, Stat, WriteHints, check_name
from bootseer.storage.temporary_name_store import RenamingStore
from bootseer.storage.urls import parse_url, split_authority

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

RANGE_BYTES = 32 << 20
STREAMS = 8
PIECE_BYTES = 1 << 20
REPLACED_TRIES, REPLACED_S = 5, 0.02
STRETCH_BYTES = 128 << 20
"""libhdfs tells no block sizes; this is HDFS's default."""
GONE_TRIES, GONE_WAIT_S = 3, 0.05

T = TypeVar("T")


class ArrowStore(RenamingStore):
    """`Store` below one folder of a pyarrow file system; libhdfs unless another is given."""

    def __init__(
        self,
        url: str,
        options: StoreOptions = DEFAULTS,
        *,
        filesystem: FileSystem | None = None,
    ) -> None:
        parsed = parse_url(url)
        self.url = parsed.shown
        self._root = parsed.path.rstrip("/")
        self._options = options
        if filesystem is None:
            host = (*parsed.hosts, *options.hosts)[0]
            filesystem = _libhdfs(host, options.user or parsed.user)
        self._files = filesystem
        self.preferred = Preferred(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    def __repr__(self) -> str:
        return f"ArrowStore({self.url!r})"

    def close(self) -> None:
        """pyarrow keeps its connection as long as the file system lives."""

    def path(self, name: str) -> str:
        """An object's path in the file system."""
        return f"{self._root}/{check_name(name)}"

    def told(self, name: str) -> str:
        """An object's name for a message."""
        return f"{name or 'the root'} in {self.url}"

    def call(self, what: str, call: Callable[[], T]) -> T:
        """One short call: bounded, mapped, tried again while the cluster is away."""

        def once() -> T:
            try:
                return within(call, self._options.stall_s, what)
            except Exception as error:  # the library raises its own kinds, OSError and ValueError
                raise mapped(error, what) from error

        return retrying(once, retry_s=self._options.retry_s)

    def places(self, name: str) -> list[Placed]:
        size = self.stat(name).size_bytes
        starts = range(0, size, STRETCH_BYTES) or range(1)
        return [Placed(at, min(STRETCH_BYTES, size - at)) for at in starts]

    def stat(self, name: str) -> Stat:
        found = self._info(self.path(name), f"look at {self.told(name)}")
        if found is None:
            raise NotFoundError(f"cannot look at {self.told(name)}: it is not there")
        return _stat(name, found)

    def _info(self, path: str, what: str) -> FileInfo | None:
        """None when nothing is there, looked at more than once: see the module text."""
        from pyarrow.fs import FileType

        for number in range(GONE_TRIES):
            found = self.call(what, lambda: self._files.get_file_info(path))
            if found.type != FileType.NotFound:
                return found
            if number + 1 < GONE_TRIES:
                time.sleep(GONE_WAIT_S)
        return None

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view, stall_s = memoryview(buffer).cast("B"), self._options.stall_s
        retrying(
            lambda: self.read_scatter(name, offset, [view], Attempt(stall_s=stall_s)),
            retry_s=self._options.retry_s,
        )

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        path, what = self.path(name), f"read {self.told(name)}"
        end = offset + sum(len(b) for b in buffers)

        def pieces() -> Iterator[bytes]:
            with self._files.open_input_file(path) as file:
                if end > file.size():
                    raise CorruptDataError(
                        f"{self.told(name)} ends at byte {file.size()}, before {end}; "
                        "it is truncated"
                    )
                for at in range(offset, end, PIECE_BYTES):
                    yield file.read_at(min(PIECE_BYTES, end - at), at)

        if end > offset:
            self.stat(name)
        transfer = Transfer(pieces, buffers, attempt, filled)
        try:
            transfer.run(what)
        except Exception as error:  # as above
            raise mapped(error, what) from error
        if not transfer.complete:
            raise StoreUnavailableError(f"cannot {what}: the answer was too short")

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        # While it is replaced the name is not there for a moment (see `move`): look again.
        for _ in range(REPLACED_TRIES):
            try:
                return self._read(name, limit_bytes)
            except NotFoundError:
                time.sleep(REPLACED_S)
        return self._read(name, limit_bytes)

    def _read(self, name: str, limit_bytes: int) -> bytes:
        size = self.stat(name).size_bytes
        if size > limit_bytes:
            raise CorruptDataError(
                f"{self.told(name)} has {size} bytes, more than the {limit_bytes} it may have"
            )
        path = self.path(name)

        def whole() -> bytes:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())

        return self.call(f"read {self.told(name)}", whole)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ArrowWriter:
        return ArrowWriter(self, self._files, name)

    def _publish(self, name: str, pieces: Iterable[bytes], *, keep_existing: bool) -> bool:
        what = f"write {self.told(name)}"
        if keep_existing and self.call(what, lambda: self._is_there(self.path(name))):
            return False
        with ArrowWriter(self, self._files, name, keep_existing=keep_existing) as out:
            for piece in pieces:
                out.write(piece)
        return out.created

    def _is_there(self, path: str) -> bool:
        from pyarrow.fs import FileType

        return bool(self._files.get_file_info(path).type != FileType.NotFound)

    def _children(self, folder: str) -> Sequence[Stat]:
        from pyarrow.fs import FileSelector

        path = self.path(folder) if folder else self._root or "/"
        what = f"list {self.told(folder)}"
        found = self.call(what, lambda: self._files.get_file_info(FileSelector(path)))
        prefix = f"{folder}/" if folder else ""
        return [_stat(prefix + info.base_name, info) for info in found]

    def rename(self, old: str, new: str) -> None:
        what = f"rename {self.told(old)} to {new}"
        source, target = self.path(old), self.path(new)
        folder = self.stat(old).is_folder
        there = self.call(what, lambda: self._files.get_file_info(target))
        if folder and self.call(what, lambda: self._is_there(target)):
            raise BusyError(f"cannot {what}: that name is taken; choose another")
        if not folder and not there.is_file and self.call(what, lambda: self._is_there(target)):
            raise UsageError(f"cannot {what}: a folder has that name; choose another")
        if not self.move(source, target, what, overwrite=not folder):
            raise BusyError(f"cannot {what}: that name is taken; choose another")

    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """False when the target is there and may not be overwritten."""
        asked = False

        def once() -> bool:
            nonlocal asked
            self._files.create_dir(target.rpartition("/")[0], recursive=True)
            if not overwrite and self._is_there(target):
                # The answer to a first try may have been lost: then the source is there no more.
                return asked and not self._is_there(source)
            asked = True
            try:
                self._files.move(source, target)
            except OSError:
                if not self._is_there(source) and self._is_there(target):
                    return True  # the answer to a first try was lost
                if not self._is_there(target):
                    raise
                if not overwrite:
                    return False
                # libhdfs moves over nothing: for a moment the name is not there.
                self._files.delete_file(target)
                self._files.move(source, target)
            return True

        return self.call(what, once)

    def delete(self, name: str) -> None:
        path, what = self.path(name), f"delete {self.told(name)}"

        def once() -> None:
            from pyarrow.fs import FileSelector, FileType

            kind = self._files.get_file_info(path).type
            if kind == FileType.Directory:
                if self._files.get_file_info(FileSelector(path)):
                    raise BusyError(f"cannot {what}: it is not empty; empty it first")
                self._files.delete_dir(path)
            elif kind != FileType.NotFound:
                self._files.delete_file(path)

        self.call(what, once)

    def delete_tree(self, folder: str) -> None:
        path = self.path(folder)

        def once() -> None:
            from pyarrow.fs import FileType

            kind = self._files.get_file_info(path).type
            if kind == FileType.Directory:
                self._files.delete_dir(path)
            elif kind != FileType.NotFound:
                self._files.delete_file(path)

        self.call(f"delete {self.told(folder)}", once)

    def mkdir(self, folder: str) -> None:
        path = self.path(folder)
        what = f"make the folder {self.told(folder)}"
        self.call(what, lambda: self._files.create_dir(path, recursive=True))


def _libhdfs(host: str, user: str) -> FileSystem:
    try:
        from pyarrow.fs import HadoopFileSystem
    except ImportError as error:
        raise NotSupportedError(
            "hdfs:// through libhdfs needs the package pyarrow: pip install pyarrow, "
            "or use hdfs-native (--hdfs-backend native) or webhdfs://"
        ) from error
    name, port = split_authority(host) if ":" in host else (host, 0)
    try:
        return HadoopFileSystem(name, port, user=user or None)
    except OSError as error:
        said = redact_message(str(error)).partition("\n")[0]
        raise NotSupportedError(
            f"cannot use the cluster's libhdfs for {host}: {said}; it needs Java, HADOOP_HOME, "
            "CLASSPATH and ARROW_LIBHDFS_DIR, or use hdfs-native (--hdfs-backend native)"
        ) from error


def _stat(name: str, info: FileInfo) -> Stat:
    folder = not info.is_file
    size = 0 if folder else int(info.size)
    version = "" if folder else f"{info.mtime_ns}:{size}"
    return Stat(name, size, (info.mtime_ns or 0) / 1e9, folder, version)
