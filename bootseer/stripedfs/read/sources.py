"""What the fetcher reads of a checkpoint: chunks of a striped file, or blocks of a plain one.

A striped file's chunks are verified against the manifest's digests. A plain file has none, so the
store is asked again for its version after bytes have arrived and before they are used: a file
that changes while it is read gives an error, never a mixture of old and new bytes.

What the manifest of a striped file promises is compared with what the store holds before the first
byte is read: one request a stripe, all at the same time, returns its length and its replicas.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from bootseer.blocks.source import BlockSource, Location
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.retry import another
from bootseer.storage.store import BlockLocation, Stat, Store
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.manifest import Manifest
from bootseer.stripedfs.format.pointer import StripedObject, Version
from bootseer.stripedfs.workers import call_in_parallel

PLAIN_BLOCK_BYTES = 1 << 20
MIN_PLAIN_BLOCK_BYTES = 64 << 10
RECHECK_S = 5.0


class FileSource(BlockSource, Protocol):
    """A block source that knows whether fetched bytes are still those of its object."""

    @property
    def identity(self) -> str:
        """Names the bytes as well as the store can, for as long as this process lives."""

    def doubtful(self, offset: int, length: int) -> bool:
        """Whether `confirm` must succeed before these bytes, already fetched, may be used."""

    def confirm(self) -> None:
        """Settle all doubts so far; may ask the store. CorruptDataError: the object changed."""


class Stretches:
    """Where one stored object lies: stretches of equal replicas, looked up by offset."""

    __slots__ = ("_placed", "length", "starts")

    def __init__(self, placed: Sequence[BlockLocation]) -> None:
        self._placed = tuple(placed)
        self.starts = tuple(p.offset for p in self._placed)
        self.length = self._placed[-1].offset + self._placed[-1].length if placed else 0

    def at(self, offset: int) -> BlockLocation:
        """The stretch that holds a byte; the last one for a byte past the end."""
        return self._placed[max(0, bisect.bisect_right(self.starts, offset) - 1)]

    def end(self, offset: int) -> int:
        """The first byte after the stretch that holds `offset`."""
        stretch = self.at(offset)
        return stretch.offset + stretch.length


def _source_key(digest: str, store: Store, place: str) -> str:
    """A key that contains the place: the copy that was read first may be removed before others."""
    return f"{digest}@{store.url}/{place}"


class DigestedSource(BlockSource):
    """A source whose every block has a digest: nothing of it is ever in doubt."""

    in_place = True
    source_class = "checkpoint"
    digest: str
    """Names the bytes wherever they lie."""

    @property
    def identity(self) -> str:
        """The key: it has the digest in it."""
        return self.key

    def doubtful(self, offset: int, length: int) -> bool:
        return False

    def confirm(self) -> None:
        """Every block was verified by its digest."""


INCOMPLETE = "the checkpoint is incomplete, put it anew"
LOST = "what was opened was replaced since, or is incomplete: open it again, or put it anew"


def as_damage(error: BootseerError, source: FileSource, what: str = LOST) -> BootseerError:
    """Turn a missing object of a checkpoint into CorruptDataError, which says what to do (`what`).

    An object that a checkpoint lists and its store lacks is damage, not a mistyped name. A program
    that treats a missing file as one that was never written (zarr) would go on without its bytes.
    """
    if not (isinstance(error, NotFoundError) and isinstance(source, DigestedSource)):
        return error
    text = str(error).partition("; check the ")[0]  # without the advice to check the path or name
    return CorruptDataError(f"{text}; {what}")


class StripedSource(DigestedSource):
    """`BlockSource` over the chunks of one striped file, verified chunk by chunk."""

    has_raw_digests = True

    def __init__(
        self, store: Store, striped: StripedObject, label: str, stretches: Mapping[str, Stretches]
    ) -> None:
        """`stretches` has those of every stripe that is not empty, by its name on the store."""
        self.store = store
        self.layout = striped.manifest.layout
        self.size_bytes = self.layout.size_bytes
        self.block_bytes = self.layout.chunk_bytes
        self.digest = striped.manifest.key
        self.key = _source_key(self.digest, store, striped.folder)
        self.label = label
        self._digests = striped.manifest.digests
        self._parts = tuple(striped.part(s) for s in range(self.layout.width))
        self._stretches = stretches

    def locate(self, index: int) -> Location:
        stripe, offset = self.layout.chunk_location(index)
        return Location(self._parts[stripe], offset, self.layout.chunk_length(index))

    def ends_stretch(self, part: str, offset: int) -> int:
        return self._stretches[part].end(offset)

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return self._stretches[part].at(offset).replicas

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        self.check_raw(index, stored)

    def check_raw(self, index: int, raw: memoryview) -> None:
        """Raise CorruptDataError unless these are the bytes of chunk `index`."""
        if compute_digest(raw) != self._digests[16 * index : 16 * index + 16]:
            part, offset, _ = self.locate(index)
            raise CorruptDataError(
                f"chunk {index} of {self.label} does not match its digest (byte {offset} of "
                f"{part}); check the checkpoint by `bootseer stripe verify` and put it anew"
            )


class SmallSource(DigestedSource):
    """`BlockSource` over a file of a tree that is stored as one plain object: one block."""

    def __init__(self, store: Store, name: str, size_bytes: int, digest: bytes, label: str) -> None:
        self.store = store
        self.size_bytes = size_bytes
        self.block_bytes = max(1, size_bytes)
        self.digest = f"xxh3-128-{digest.hex()}-{size_bytes}-whole"
        self.key = _source_key(self.digest, store, name)
        self.label = label
        self._name = name
        self._wanted = digest

    def locate(self, index: int) -> Location:
        return Location(self._name, 0, self.size_bytes)

    def ends_stretch(self, part: str, offset: int) -> int:
        return self.size_bytes

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return ()

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        if compute_digest(stored) != self._wanted:
            raise CorruptDataError(
                f"{self.label} does not match its digest ({self._name}); check the checkpoint by "
                "`bootseer stripe verify` and put it anew"
            )


class PlainSource(BlockSource):
    """`BlockSource` over an ordinary object."""

    in_place = True
    source_class = "plain"
    volatile = True

    def __init__(self, store: Store, stat: Stat, placed: Sequence[BlockLocation]) -> None:
        self.store = store
        self.size_bytes = stat.size_bytes
        self.label = f"{stat.name} in {store.url}"
        self._stat = stat
        self._stretches = Stretches(placed)
        if self._stretches.length != stat.size_bytes:
            raise CorruptDataError(
                f"{self.label} has {stat.size_bytes} bytes by its status and "
                f"{self._stretches.length} by its blocks; it is being written: wait for its end"
            )
        self.block_bytes = plain_block_bytes(self._stretches.starts)
        # Where the store has no versions, nothing may be kept from one opening to the next.
        known = f"plain:{store.url}/{stat.name}:{stat.size_bytes}:{stat.version}"
        self.key = known if stat.version else ""
        self._settled = threading.Condition()
        self._unsettled: set[int] = set()
        self._checks_begun = 0
        self._checks_done = 0
        self._checking = False
        self._checked_at_s = time.monotonic()
        self._fault: BootseerError | None = None
        self._outage: tuple[int, BootseerError] | None = None

    @property
    def identity(self) -> str:
        """Names the bytes as well as the store can, for as long as this process lives."""
        return repr(_identity(self._stat))

    def locate(self, index: int) -> Location:
        offset = index * self.block_bytes
        length = min(self.block_bytes, self.size_bytes - offset)
        return Location(self._stat.name, offset, length)

    def ends_stretch(self, part: str, offset: int) -> int:
        return self._stretches.end(offset)

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return self._stretches.at(offset).replicas

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        with self._settled:
            if self._fault is not None:
                raise self._fault
            self._unsettled.add(index)

    def doubtful(self, offset: int, length: int) -> bool:
        first, last = offset // self.block_bytes, (offset + max(length, 1) - 1) // self.block_bytes
        with self._settled:
            if self._fault is not None:
                return True
            if time.monotonic() - self._checked_at_s > RECHECK_S:
                return True
            wanted = range(first, last + 1)
            if len(wanted) > len(self._unsettled):
                return any(index in wanted for index in self._unsettled)
            return any(index in self._unsettled for index in wanted)

    def confirm(self) -> None:
        """Ask the store for the version again; callers at the same time share one answer."""
        with self._settled:
            needed = self._checks_begun + 1  # one begun earlier may not have seen our bytes' change
            while self._checks_done < needed:
                if self._fault is not None:
                    raise self._fault
                if self._outage is not None and self._outage[0] >= needed:
                    raise another(self._outage[1])
                if self._checking:
                    self._settled.wait()
                    continue
                self._check_now()

    def _check_now(self) -> None:
        """Make one check; called and left with the lock held, which is released meanwhile."""
        self._checking = True
        self._checks_begun += 1
        number, arrived = self._checks_begun, frozenset(self._unsettled)
        self._settled.release()
        stat: Stat | None = None
        fault: BootseerError | None = None
        try:
            stat = self.store.stat(self._stat.name)
        except BootseerError as error:
            fault = error
        finally:
            self._settled.acquire()
            self._checking = False
            self._settled.notify_all()
        if fault is not None and isinstance(fault, StoreUnavailableError) and not arrived:
            stat, fault = self._stat, None  # only `RECHECK_S` was over: nothing new is in doubt
        if fault is not None and fault.retryable:
            self._outage = (number, fault)
            raise fault
        if stat is None or _identity(stat) != _identity(self._stat):
            self._fault = CorruptDataError(
                f"{self.label} changed while it was read; open it again to read the new bytes"
            )
            raise self._fault from fault
        self._unsettled -= arrived
        self._checks_done = number
        self._checked_at_s = time.monotonic()


def _identity(stat: Stat) -> tuple[object, ...]:
    return (stat.size_bytes, stat.mtime_s, stat.version, stat.is_folder)


def plain_block_bytes(starts: Sequence[int]) -> int:
    """Block size of a plain file whose stretches begin at these offsets.

    The largest power of two up to 1 MiB that divides them all, so that no block lies in two
    stretches. At odd offsets some blocks do, and their requests cross a boundary.
    """
    block_bytes = PLAIN_BLOCK_BYTES
    while block_bytes > MIN_PLAIN_BLOCK_BYTES and any(start % block_bytes for start in starts):
        block_bytes //= 2
    return block_bytes if not any(start % block_bytes for start in starts) else PLAIN_BLOCK_BYTES


def open_striped_file(store: Store, version: Version, manifest: Manifest) -> FileSource:
    """Open a striped file whose manifest was read."""
    label = f"{version.folder} in {store.url}"
    return open_stripes(store, StripedObject(version.folder, manifest), label)


def open_plain_file(store: Store, name: str) -> PlainSource:
    """Open an ordinary object by its stretches. Raises UsageError for a folder."""
    stat = store.stat(name)
    if stat.is_folder:
        raise UsageError(f"{name} in {store.url} is a folder; name a file in it")
    return PlainSource(store, stat, store.locations(name) if stat.size_bytes else [])


def open_stripes(store: Store, striped: StripedObject, label: str) -> StripedSource:
    """Compare every stripe's length with the manifest, and learn where it lies."""
    layout = striped.manifest.layout
    lengths = {striped.part(s): n for s in range(layout.width) if (n := layout.stripe_length(s))}
    placed = call_in_parallel(lambda part: _read_stretches(store, part, label), list(lengths))
    for (part, length), stretches in zip(lengths.items(), placed, strict=True):
        if stretches.length != length:
            raise CorruptDataError(
                f"{part} of {label} has {stretches.length} bytes and the manifest says {length}; "
                "put the checkpoint anew"
            )
    return StripedSource(store, striped, label, dict(zip(lengths, placed, strict=True)))


def _read_stretches(store: Store, part: str, label: str) -> Stretches:
    try:
        return Stretches(store.locations(part))
    except NotFoundError as error:
        raise CorruptDataError(f"{part} of {label} is missing; put the checkpoint anew") from error
