"""HDFS by its own protocols, through hdfs-native: no Java, checksums verified at this end.

Data comes as a stream of packets, not as one large `bytes` a range: that is as fast, needs no
tuning of malloc, keeps a request's own memory below a few MiB and shows progress. The library
chooses the replica itself, and may block for minutes; so every call runs in a thread that can be
left behind (see `bounded_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.storage.bounded_calls import call_with_limit
from bootseer.storage.hdfs.library_store import BLOCK_BYTES, LibraryStore, block_locations
from bootseer.storage.hdfs.native_clients import Clients, ReaderPool
from bootseer.storage.hdfs.native_errors import from_native_error
from bootseer.storage.hdfs.native_writer import NativeWriter
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import (
    BlockLocation,
    Stat,
    WriteHints,
    check_limit,
    truncated_error,
)
from bootseer.storage.urls import StoreUrl, parse_url

if TYPE_CHECKING:
    from hdfs_native import FileStatus

NO_REPLICA = "All DataNodes failed"
"""What the library says when it has tried all replicas of a block."""
PACKET_BYTES = 64 << 10  # what a DataNode sends at once
CHECKED_BYTES = 512  # what it sends one checksum for, as most clusters are set


class NativeStore(LibraryStore):
    """`Store` below one folder of HDFS. Nothing is contacted before the first call."""

    def __init__(self, at: StoreUrl, options: StoreOptions, clients: Clients) -> None:
        super().__init__(at, options)
        self._clients = clients
        self._readers = ReaderPool(clients)

    @classmethod
    def open(cls, url: str, options: StoreOptions = DEFAULTS) -> Self:
        """The store of a URL. Raises UsageError where the process uses another user or token."""
        at = parse_url(url)
        clients = Clients(at, options)
        clients.set_environment()
        return cls(at, options, clients)

    def close(self) -> None:
        self._readers.drop()
        self._clients.close()

    def locations(self, name: str) -> list[BlockLocation]:
        status = self._status(name)
        return block_locations(status.length, status.blocksize or BLOCK_BYTES)

    def stat(self, name: str) -> Stat:
        return _stat(name, self._status(name))

    def _status(self, name: str) -> FileStatus:
        path, client = self.path(name), self._clients.metadata
        status = self.call(f"look at {self.describe(name)}", lambda: client().get_file_info(path))
        self._readers.note_status(path, status)
        return status

    def map_error(self, error: Exception, what: str) -> BootseerError:
        return from_native_error(error, what)

    def _disconnect(self) -> None:
        self._clients.close()

    def _read_pieces(self, name: str, offset: int, total: int, attempt: Attempt) -> Iterator[bytes]:
        path = self.path(name)
        pooled = self._readers.take(path, fresh=attempt.number > 0)
        size = len(pooled.reader)
        if offset + total > size:
            self._readers.drop(path)
            raise truncated_error(self.describe(name), size, offset + total)
        yield from pooled.reader.read_range_stream(offset, total)
        self._readers.give_back(pooled)

    def _read_error(self, name: str, at: int, attempt: Attempt, error: Exception) -> BootseerError:
        self._readers.drop(self.path(name))
        if isinstance(error, StoreUnavailableError) and not attempt.cancelled:
            self._disconnect()  # or the next attempt would wait on the same connection
        self._raise_if_damaged(name, at, error)
        return super()._read_error(name, at, attempt, error)

    def _raise_if_damaged(self, name: str, at: int, error: Exception) -> None:
        """Distinguish a block whose replicas all fail their checksums from DataNodes that are down.

        The library raises the same for both. A damaged part fails again, alone, while another part
        of the same block can be read.
        """
        if NO_REPLICA not in str(error):
            return
        path, what = self.path(name), f"read {self.describe(name)}"

        def is_damaged() -> bool:
            status = self._clients.metadata().get_file_info(path)
            block = status.blocksize or BLOCK_BYTES
            start = at - at % block
            end = min(start + block, status.length)
            reader = self._clients.data_client().read(path)
            try:
                reader.read_range(at, min(PACKET_BYTES, end - at))
            except Exception:  # of whatever kind: this part cannot be read
                pass
            else:
                return False
            elsewhere = start if at - start >= CHECKED_BYTES else at + PACKET_BYTES
            if elsewhere < end:
                reader.read_range(elsewhere, 1)
            return elsewhere < end

        try:
            damaged = call_with_limit(is_damaged, self._options.stall_s, what)
        except Exception:
            return  # the cluster cannot say: `error` stays what it is
        if damaged:
            raise CorruptDataError(
                f"{self.describe(name)} is damaged near byte {at}: every replica of that block"
                " fails its checksum; restore it from another copy"
            ) from error

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        path, what = self.path(name), f"read {self.describe(name)}"
        client = self._clients.data_client

        def whole() -> bytes:
            reader = client().read(path)
            size = len(reader)
            check_limit(self.describe(name), size, limit_bytes)
            try:
                data = reader.read_range(0, size)
            except Exception as error:  # as above
                self._raise_if_damaged(name, 0, error)
                raise
            if len(data) != size:
                raise StoreUnavailableError(f"cannot {what}: the answer was too short")
            return data

        return self.call(what, whole)

    def _new_writer(self, name: str, hints: WriteHints, *, keep_existing: bool) -> NativeWriter:
        return NativeWriter(
            self,
            self._clients.metadata,
            name,
            hints,
            keep_existing=keep_existing,
            stall_s=self._options.stall_s,
        ).open()

    def _children(self, folder: str) -> Sequence[Stat]:
        path = self.path(folder) if folder else self._root or "/"
        client, what = self._clients.metadata, f"list {self.describe(folder)}"
        entries = self.call(what, lambda: list(client().list_status(path)))
        if len(entries) == 1 and entries[0].path.rstrip("/") == path and path != "/":
            raise NotFoundError(f"cannot {what}: it is no folder; check the path")
        prefix = f"{folder}/" if folder else ""
        return [_stat(prefix + entry.path.rpartition("/")[2], entry) for entry in entries]

    def rename(self, old: str, new: str) -> None:
        what = f"rename {self.describe(old)} to {new}"
        if not self._status(old).isdir:
            self.move(self.path(old), self.path(new), what, overwrite=True)
        elif not self.move(self.path(old), self.path(new), what, overwrite=False):
            raise BusyError(f"cannot {what}: that name is taken; choose another")

    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """Rename; False when the target exists and may not be overwritten."""
        client = self._clients.metadata
        self._readers.drop(target)

        def once() -> bool:
            try:
                client().rename(source, target, overwrite)
            except FileExistsError:
                # The answer to a first attempt may have been lost: then the source is not there.
                return self._is_missing(source)
            except FileNotFoundError:
                if self._is_missing(source):
                    if not self._is_missing(target):
                        return True
                    raise
                client().mkdirs(target.rpartition("/")[0], create_parent=True)
                client().rename(source, target, overwrite)
            return True

        return self.call(what, once)

    def _is_missing(self, path: str) -> bool:
        try:
            self._clients.metadata().get_file_info(path)
        except FileNotFoundError:
            return True
        return False

    def delete(self, name: str) -> None:
        self._delete(name, recursive=False)

    def delete_tree(self, folder: str) -> None:
        self._delete(folder, recursive=True)

    def _delete(self, name: str, *, recursive: bool) -> None:
        path, client = self.path(name), self._clients.metadata
        self.call(f"delete {self.describe(name)}", lambda: client().delete(path, recursive))
        self._readers.drop(path)

    def mkdir(self, folder: str) -> None:
        path, client = self.path(folder), self._clients.metadata
        what = f"make the folder {self.describe(folder)}"
        self.call(what, lambda: client().mkdirs(path, create_parent=True))


def _stat(name: str, status: FileStatus) -> Stat:
    mtime_s = status.modification_time / 1000
    if status.isdir:
        return Stat(name, 0, mtime_s, True)
    version = f"{status.modification_time}:{status.length}"
    return Stat(name, status.length, mtime_s, False, version)
