"""HDFS by the cluster's own libhdfs, through pyarrow: for clusters whose client must be theirs.

Needs what pyarrow's `HadoopFileSystem` needs: Java, HADOOP_HOME, CLASSPATH and libhdfs.so. The
same class works over any other `pyarrow.fs.FileSystem` whose `move` refuses a name that is taken,
as HDFS does. libhdfs cannot rename over an existing object, so `replace` and `rename` remove the
old one first: for a moment the name does not exist, and readers here look again before they raise
NotFoundError. The replica cannot be chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from bootseer.errors import (
    BusyError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.bounded_calls import Transfer, call_within
from bootseer.storage.hdfs.libhdfs_errors import from_libhdfs_error
from bootseer.storage.hdfs.libhdfs_writer import LibhdfsWriter
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.store import (
    BlockLocation,
    Stat,
    WriteHints,
    check_limit,
    check_name,
    truncated_error,
)
from bootseer.storage.temporary_name_store import TemporaryNameStore, block_locations
from bootseer.storage.urls import StoreUrl, parse_url, redact, split_authority

try:
    from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, HadoopFileSystem
except ImportError as missing:
    raise NotSupportedError(
        "hdfs:// through libhdfs needs the package pyarrow: pip install pyarrow, "
        "or use hdfs-native (--hdfs-backend native) or webhdfs://"
    ) from missing

PIECE_BYTES = 1 << 20
BLOCK_BYTES = 128 << 20  # HDFS's default: libhdfs does not report block sizes
# How often, and after what wait, a name is looked for that may be missing while it is replaced.
READ_TRIES, READ_WAIT_S = 5, 0.02
STAT_TRIES, STAT_WAIT_S = 3, 0.05

T = TypeVar("T")


class LibhdfsStore(TemporaryNameStore):
    """`Store` below one folder of a pyarrow file system."""

    def __init__(self, at: StoreUrl, options: StoreOptions, files: FileSystem) -> None:
        super().__init__(at, options)
        self._root = at.path.rstrip("/")
        self._files = files

    @classmethod
    def open(cls, url: str, options: StoreOptions = DEFAULTS) -> Self:
        """The store of a URL, through libhdfs. Raises NotSupportedError where that is missing."""
        at = parse_url(url)
        host = (*at.hosts, *options.hosts)[0]
        return cls(at, options, _libhdfs(host, options.user or at.user))

    def close(self) -> None:
        """pyarrow keeps its connection as long as the file system lives."""

    def path(self, name: str) -> str:
        """An object's path in the file system."""
        return f"{self._root}/{check_name(name)}"

    def describe(self, name: str) -> str:
        """An object's name for a message."""
        return f"{name or 'the root'} in {self.url}"

    def call(self, what: str, call: Callable[[], T]) -> T:
        """One short call: bounded, its errors mapped, retried while the cluster is away."""

        def once() -> T:
            try:
                return call_within(call, self._options.stall_s, what)
            except Exception as error:  # the library raises its own kinds, OSError and ValueError
                raise from_libhdfs_error(error, what) from error

        return retrying(once, retry_s=self._options.retry_s)

    def locations(self, name: str) -> list[BlockLocation]:
        return block_locations(self.stat(name).size_bytes, BLOCK_BYTES)

    def stat(self, name: str) -> Stat:
        info = self._info(self.path(name), f"look at {self.describe(name)}")
        if info is None:
            raise NotFoundError(f"cannot look at {self.describe(name)}: it is not there")
        return _stat(name, info)

    def _info(self, path: str, what: str) -> FileInfo | None:
        """None when nothing is there, looked for more than once: see the module's text."""
        for number in range(STAT_TRIES):
            info = self.call(what, lambda: self._files.get_file_info(path))
            if info.type != FileType.NotFound:
                return info
            if number + 1 < STAT_TRIES:
                time.sleep(STAT_WAIT_S)
        return None

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        attempt = Attempt(stall_s=self._options.stall_s)
        self.read_scatter(name, offset, [memoryview(buffer).cast("B")], attempt)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        path, what = self.path(name), f"read {self.describe(name)}"
        end = offset + sum(len(b) for b in buffers)

        def pieces() -> Iterator[bytes]:
            with self._files.open_input_file(path) as file:
                if end > file.size():
                    raise truncated_error(self.describe(name), file.size(), end)
                for at in range(offset, end, PIECE_BYTES):
                    yield file.read_at(min(PIECE_BYTES, end - at), at)

        if end > offset:
            self.stat(name)
        transfer = Transfer(pieces, buffers, attempt, filled)
        try:
            transfer.run(what)
        except Exception as error:  # as above
            raise from_libhdfs_error(error, what) from error
        if not transfer.complete:
            raise StoreUnavailableError(f"cannot {what}: the answer was too short")

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        # While it is replaced the name is not there for a moment (see `move`): look again.
        for _ in range(READ_TRIES):
            try:
                return self._read(name, limit_bytes)
            except NotFoundError:
                time.sleep(READ_WAIT_S)
        return self._read(name, limit_bytes)

    def _read(self, name: str, limit_bytes: int) -> bytes:
        size = self.stat(name).size_bytes
        check_limit(self.describe(name), size, limit_bytes)
        path = self.path(name)

        def whole() -> bytes:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())

        return self.call(f"read {self.describe(name)}", whole)

    def _new_writer(self, name: str, hints: WriteHints, *, keep_existing: bool) -> LibhdfsWriter:
        return LibhdfsWriter(
            self, self._files, name, keep_existing=keep_existing, stall_s=self._options.stall_s
        ).open()

    def _exists(self, name: str) -> bool:
        path = self.path(name)  # looked for once: `move` sees a name that is being replaced
        return self.call(f"write {self.describe(name)}", lambda: self._is_there(path))

    def _is_there(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type != FileType.NotFound)

    def _children(self, folder: str) -> Sequence[Stat]:
        path = self.path(folder) if folder else self._root or "/"
        what = f"list {self.describe(folder)}"
        infos = self.call(what, lambda: self._files.get_file_info(FileSelector(path)))
        prefix = f"{folder}/" if folder else ""
        return [_stat(prefix + info.base_name, info) for info in infos]

    def rename(self, old: str, new: str) -> None:
        what = f"rename {self.describe(old)} to {new}"
        source, target = self.path(old), self.path(new)
        is_folder = self.stat(old).is_folder
        taken_by = self.call(what, lambda: self._files.get_file_info(target)).type
        if not is_folder and taken_by not in (FileType.File, FileType.NotFound):
            raise UsageError(f"cannot {what}: a folder has that name; choose another")
        taken = is_folder and taken_by != FileType.NotFound
        if taken or not self.move(source, target, what, overwrite=not is_folder):
            raise BusyError(f"cannot {what}: that name is taken; choose another")

    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """Rename; False when the target exists and may not be overwritten."""

        def once() -> bool:
            self._files.create_dir(target.rpartition("/")[0], recursive=True)
            if not overwrite and self._is_there(target):
                return False
            try:
                self._files.move(source, target)
            except OSError:
                if not self._is_there(source) and self._is_there(target):
                    return True  # the answer to a first attempt was lost
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
        path, what = self.path(name), f"delete {self.describe(name)}"

        def once() -> None:
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
            kind = self._files.get_file_info(path).type
            if kind == FileType.Directory:
                self._files.delete_dir(path)
            elif kind != FileType.NotFound:
                self._files.delete_file(path)

        self.call(f"delete {self.describe(folder)}", once)

    def mkdir(self, folder: str) -> None:
        path = self.path(folder)
        what = f"make the folder {self.describe(folder)}"
        self.call(what, lambda: self._files.create_dir(path, recursive=True))


def _libhdfs(host: str, user: str) -> FileSystem:
    name, port = split_authority(host) if ":" in host else (host, 0)
    try:
        return HadoopFileSystem(name, port, user=user or None)
    except OSError as error:
        reason = redact(str(error)).partition("\n")[0]
        raise NotSupportedError(
            f"cannot use the cluster's libhdfs for {host}: {reason}; it needs Java, HADOOP_HOME, "
            "CLASSPATH and ARROW_LIBHDFS_DIR, or use hdfs-native (--hdfs-backend native)"
        ) from error


def _stat(name: str, info: FileInfo) -> Stat:
    mtime_s = (info.mtime_ns or 0) / 1e9
    if not info.is_file:
        return Stat(name, 0, mtime_s, True)
    return Stat(name, int(info.size), mtime_s, False, f"{info.mtime_ns}:{int(info.size)}")
