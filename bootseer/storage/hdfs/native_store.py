"""HDFS by its own protocols, through hdfs-native: no Java, checksums verified at this end.

Data comes as a stream of packets, not as one large `bytes` a range: that is as fast, needs no
tuning of malloc, keeps a request's own memory below a few MiB and shows progress. The library
chooses the replica itself, cannot be told which, and blocks for as long as it likes; so every
call runs where it can be left behind (see `errand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from bootseer.errors import (
    BusyError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.storage.bounded_calls import Transfer, within
from bootseer.storage.hdfs.native_clients import Clients, Readers
from bootseer.storage.hdfs.native_errors import from_native_error
from bootseer.storage.hdfs.native_writer import HdfsWriter
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.store import NO_HINTS, Placed, Preferred, Stat, WriteHints, check_name
from bootseer.storage.temporary_name_store import RenamingStore
from bootseer.storage.urls import parse_url

if TYPE_CHECKING:
    from hdfs_native import FileStatus

RANGE_BYTES = 32 << 20
STREAMS = 8
# What the library says when it has tried all replicas of a block.
NO_REPLICA = "All DataNodes failed"
PACKET_BYTES = 64 << 10  # what a DataNode sends at once
CHECKED_BYTES = 512  # what it sends one checksum for, as most clusters are set
BLOCK_BYTES = 128 << 20  # HDFS's own default, where a status says none

T = TypeVar("T")


class HdfsStore(RenamingStore):
    """`Store` below one folder of HDFS. Nothing is contacted before the first call."""

    def __init__(self, url: str, options: StoreOptions = DEFAULTS) -> None:
        parsed = parse_url(url)
        self.url = parsed.shown
        self._root = parsed.path.rstrip("/")
        self._options = options
        self.stall_s = options.stall_s
        self._clients = Clients(parsed, options)
        self.metadata = self._clients.metadata
        self._readers = Readers(self._clients)
        self.preferred = Preferred(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    def __repr__(self) -> str:
        return f"HdfsStore({self.url!r})"

    def path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _folder(self, folder: str) -> str:
        return self.path(folder) if folder else self._root or "/"

    def call(self, what: str, call: Callable[[], T]) -> T:
        """One short call to the NameNode: bounded, mapped, tried again while it is away."""

        def once() -> T:
            try:
                return within(call, self._options.stall_s, what)
            except DeadlineError:
                self._clients.close()  # or each try would wait on the same connection
                raise
            except Exception as error:  # the library raises many kinds, unnamed ones too
                raise from_native_error(error, what) from error

        return retrying(once, retry_s=self._options.retry_s)

    def close(self) -> None:
        self._readers.forget()
        self._clients.close()

    def places(self, name: str) -> list[Placed]:
        status = self._status(name)
        block, size = status.blocksize or BLOCK_BYTES, status.length
        starts = range(0, size, block) or range(1)
        return [Placed(at, min(block, size - at)) for at in starts]

    def stat(self, name: str) -> Stat:
        return _stat(name, self._status(name))

    def _status(self, name: str) -> FileStatus:
        path, client = self.path(name), self.metadata
        found = self.call(f"look at {self.told(name)}", lambda: client().get_file_info(path))
        self._readers.saw(path, found)
        return found

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        retrying(
            lambda: self.read_scatter(name, offset, [view], Attempt(stall_s=self.stall_s)),
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
        total = sum(len(b) for b in buffers)

        def pieces() -> Iterator[bytes]:
            lent = self._readers.take(path, fresh=attempt.number > 0)
            size = len(lent.reader)
            if offset + total > size:
                self._readers.forget(path)
                raise CorruptDataError(
                    f"{self.told(name)} ends at byte {size}, before {offset + total}; "
                    "it is truncated"
                )
            yield from lent.reader.read_range_stream(offset, total)
            self._readers.give(lent)

        transfer = Transfer(pieces, buffers, attempt, filled)
        try:
            transfer.run(what)
        except Exception as error:  # as above
            self._readers.forget(path)
            if isinstance(error, StoreUnavailableError) and not attempt.cancelled:
                self._clients.close()  # as above
            self._raise_if_damaged(name, offset + transfer.received_bytes, error)
            raise from_native_error(error, what) from error
        if not transfer.complete:
            raise StoreUnavailableError(f"cannot {what}: the answer was too short")

    def _raise_if_damaged(self, name: str, at: int, error: Exception) -> None:
        """Tell a block whose replicas all fail their checksums from DataNodes that are away.

        The library says the same of both. A damaged place fails again, alone, while another place
        of the same block can be read.
        """
        if NO_REPLICA not in str(error):
            return
        path, what = self.path(name), f"read {self.told(name)}"

        def is_damaged() -> bool:
            status = self.metadata().get_file_info(path)
            block = status.blocksize or BLOCK_BYTES
            start = at - at % block
            end = min(start + block, status.length)
            reader = self._clients.reading().read(path)
            try:
                reader.read_range(at, min(PACKET_BYTES, end - at))
            except Exception:  # whatever it is, this place cannot be read
                pass
            else:
                return False
            elsewhere = start if at - start >= CHECKED_BYTES else at + PACKET_BYTES
            if elsewhere < end:
                reader.read_range(elsewhere, 1)
            return elsewhere < end

        try:
            damaged = within(is_damaged, self.stall_s, what)
        except Exception:
            return  # who cannot be asked changes nothing: the bytes could not be had
        if damaged:
            raise CorruptDataError(
                f"{self.told(name)} is damaged near byte {at}: every replica of that block fails"
                " its checksum; restore it from another copy"
            ) from error

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        path, what = self.path(name), f"read {self.told(name)}"
        client = self._clients.reading

        def whole() -> bytes:
            reader = client().read(path)
            size = len(reader)
            if size > limit_bytes:
                raise CorruptDataError(
                    f"{self.told(name)} has {size} bytes, more than the {limit_bytes} it may have"
                )
            try:
                data = reader.read_range(0, size)
            except Exception as error:  # as above
                self._raise_if_damaged(name, 0, error)
                raise
            if len(data) != size:
                raise StoreUnavailableError(f"cannot {what}: the answer was too short")
            return data

        return self.call(what, whole)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> HdfsWriter:
        return HdfsWriter(self, name, hints)

    def _publish(self, name: str, pieces: Iterable[bytes], *, keep_existing: bool) -> bool:
        if keep_existing and self._exists(name):
            return False
        with HdfsWriter(self, name, NO_HINTS, keep_existing=keep_existing) as out:
            for piece in pieces:
                out.write(piece)
        return out.created

    def _exists(self, name: str) -> bool:
        try:
            self._status(name)
        except NotFoundError:
            return False
        return True

    def _children(self, folder: str) -> Sequence[Stat]:
        path, client = self._folder(folder), self.metadata
        what = f"list {self.told(folder)}"
        found = self.call(what, lambda: list(client().list_status(path)))
        if len(found) == 1 and found[0].path.rstrip("/") == path and path != "/":
            raise NotFoundError(f"cannot {what}: it is no folder; check the path")
        prefix = f"{folder}/" if folder else ""
        return [_stat(prefix + s.path.rpartition("/")[2], s) for s in found]

    def rename(self, old: str, new: str) -> None:
        what = f"rename {self.told(old)} to {new}"
        if not self._status(old).isdir:
            self.move(self.path(old), self.path(new), what, overwrite=True)
        elif not self.move(self.path(old), self.path(new), what, overwrite=False):
            raise BusyError(f"cannot {what}: that name is taken; choose another")

    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """False when the target is there and may not be overwritten."""
        client = self.metadata
        self._readers.forget(target)

        def once() -> bool:
            try:
                client().rename(source, target, overwrite)
            except FileExistsError:
                # The answer to a first try may have been lost: then the source is ours no more.
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
            self.metadata().get_file_info(path)
        except FileNotFoundError:
            return True
        return False

    def delete(self, name: str) -> None:
        self._delete(name, recursive=False)

    def delete_tree(self, folder: str) -> None:
        self._delete(folder, recursive=True)

    def _delete(self, name: str, *, recursive: bool) -> None:
        path, client = self.path(name), self.metadata
        self.call(f"delete {self.told(name)}", lambda: client().delete(path, recursive))
        self._readers.forget(path)

    def mkdir(self, folder: str) -> None:
        path, client = self.path(folder), self.metadata
        what = f"make the folder {self.told(folder)}"
        self.call(what, lambda: client().mkdirs(path, create_parent=True))

    def told(self, name: str) -> str:
        return f"{name or 'the root'} in {self.url}"


def _stat(name: str, status: FileStatus) -> Stat:
    folder = status.isdir
    version = "" if folder else f"{status.modification_time}:{status.length}"
    return Stat(
        name, 0 if folder else status.length, status.modification_time / 1000, folder, version
    )
