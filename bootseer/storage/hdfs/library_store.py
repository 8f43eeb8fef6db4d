"""What the stores over client libraries have in common: bounded calls, mapped errors, reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bootseer.errors import BootseerError, DeadlineError, StoreUnavailableError
from bootseer.storage.bounded_calls import Transfer, call_with_limit
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import BlockLocation, check_name
from bootseer.storage.temporary_name_store import TemporaryNameStore
from bootseer.storage.urls import StoreUrl

BLOCK_BYTES = 128 << 20
"""HDFS's default, where the library does not say."""

T = TypeVar("T")


class LibraryStore(TemporaryNameStore):
    """`Store` below one folder of HDFS, through a library whose calls may block for minutes."""

    def __init__(self, at: StoreUrl, options: StoreOptions) -> None:
        super().__init__(at, options)
        self._root = at.path.rstrip("/")

    def path(self, name: str) -> str:
        """An object's path in HDFS."""
        return f"{self._root}/{check_name(name)}"

    def describe(self, name: str) -> str:
        """An object's name for a message."""
        return f"{name or 'the root'} in {self.url}"

    def call(self, what: str, call: Callable[[], T]) -> T:
        """One short call: bounded, its errors mapped, retried while the cluster is away."""
        return retry_call(lambda: self._call_once(what, call), retry_s=self._options.retry_s)

    def _call_once(self, what: str, call: Callable[[], T]) -> T:
        """As `call`, without retries."""
        try:
            return call_with_limit(call, self._options.stall_s, what)
        except DeadlineError:
            self._disconnect()  # or each attempt would wait on the same connection
            raise
        except BootseerError:
            raise
        except Exception as error:  # libraries raise many kinds, unnamed ones too
            raise self.map_error(error, what) from error

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")

        def once() -> None:
            attempt = Attempt(stall_s=self._options.stall_s)
            self.read_scatter(name, offset, [view], attempt)

        retry_call(once, retry_s=self._options.retry_s)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        what, total = f"read {self.describe(check_name(name))}", sum(map(len, buffers))

        def pieces() -> Iterator[bytes]:
            return self._read_pieces(name, offset, total, attempt)

        transfer = Transfer(pieces, buffers, attempt, filled)
        try:
            transfer.run(what)
        except Exception as error:  # as above
            failed_at = offset + transfer.received_bytes
            raise self._read_error(name, failed_at, attempt, error) from error
        if not transfer.complete:
            raise StoreUnavailableError(f"cannot {what}: the answer was too short")

    def _read_error(self, name: str, at: int, attempt: Attempt, error: Exception) -> BootseerError:
        """Our error for a read that failed at the object's byte `at`."""
        return self.map_error(error, f"read {self.describe(name)}")

    def _disconnect(self) -> None:
        """Drop connections, so that the next call makes new ones."""

    @abstractmethod
    def map_error(self, error: Exception, what: str) -> BootseerError:
        """Our error for what the library raised; `what` completes "cannot …"."""

    @abstractmethod
    def move(self, source: str, target: str, what: str, *, overwrite: bool) -> bool:
        """Rename a path; False when the target exists and may not be overwritten."""

    @abstractmethod
    def _read_pieces(self, name: str, offset: int, total: int, attempt: Attempt) -> Iterator[bytes]:
        """The bytes of a range, piece by piece."""


def block_locations(size_bytes: int, block_bytes: int) -> list[BlockLocation]:
    """The locations of a file in blocks of one size, whose servers are not known."""
    starts = range(0, size_bytes, block_bytes) or range(1)
    return [BlockLocation(start, min(block_bytes, size_bytes - start)) for start in starts]
