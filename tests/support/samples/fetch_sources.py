"""Sources with known bytes for the fetcher's tests."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import xxhash
import zstandard

from bootseer.blocks.fetch.fetcher import HeldBytes
from bootseer.blocks.source import BlockSource, Location
from bootseer.errors import CorruptDataError
from bootseer.storage.local import LocalStore
from bootseer.storage.store import Store
from bootseer.stripedfs.shared_fetcher import _shared


class Source(BlockSource):
    """`BlockSource` over stored parts that are written at once.

    Block i lies in part i mod `parts`; with `packed` it is compressed. `places` are the replicas
    of every byte.
    """

    def __init__(
        self,
        folder: Path,
        data: bytes,
        *,
        block_bytes: int,
        parts: int = 1,
        packed: bool = False,
        places: tuple[str, ...] = (),
        key: str = "",
        stretch_bytes: int = 0,
    ) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.block_bytes = block_bytes
        self.in_place = not packed
        self.key = key
        self.store: Store = LocalStore(str(folder))
        self._places = places
        self._stretch_bytes = stretch_bytes
        blocks = [data[n : n + block_bytes] for n in range(0, len(data), block_bytes)]
        self._digests = [xxhash.xxh3_128_digest(block) for block in blocks]
        self._locations: list[Location] = []
        stored = [bytearray() for _ in range(parts)]
        for number, block in enumerate(blocks):
            text = zstandard.compress(block, 1) if packed else block
            part = number % parts
            self._locations.append(Location(f"part-{part}", len(stored[part]), len(text)))
            stored[part] += text
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(stored):
            (folder / f"part-{number}").write_bytes(content)

    def locate(self, index: int) -> Location:
        return self._locations[index]

    def ends_stretch(self, part: str, offset: int) -> int:
        if not self._stretch_bytes:
            return 1 << 62
        return (offset // self._stretch_bytes + 1) * self._stretch_bytes

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return self._places

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        if not self.in_place:
            try:
                text = zstandard.ZstdDecompressor().decompress(stored, len(raw))
            except zstandard.ZstdError as error:
                raise CorruptDataError(f"block {index} is no zstd frame") from error
            if len(text) == len(raw):
                raw[:] = text
        if xxhash.xxh3_128_digest(raw) != self._digests[index]:
            raise CorruptDataError(f"block {index} is not what was written; use another replica")


class Arrival:
    """What a `Fetcher.hold` delivers: give it `set`, wait, then take the bytes or the error."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._result: HeldBytes | Exception | None = None
        self.is_set = self._arrived.is_set
        self.wait = self._arrived.wait

    def set(self, result: HeldBytes | Exception) -> None:
        assert self._result is None
        self._result = result
        self._arrived.set()

    def held(self) -> HeldBytes:
        """The bytes, for the caller to release. Raises the error."""
        assert self._result is not None
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere and compress a little."""
    text = random.Random(seed).randbytes(size_bytes // 2 + 1)
    doubled = bytearray(2 * len(text))
    doubled[::2] = doubled[1::2] = text
    return bytes(doubled[:size_bytes])


def fetch_threads() -> list[threading.Thread]:
    """Threads of fetchers that are still alive, but for the process's own fetcher.

    Tests of files and file systems use that one; it is never closed and rests for a while.
    """
    fetcher = _shared.fetcher
    resting = (
        set() if fetcher is None else {*fetcher._workers._threads, fetcher._workers._clock_thread}
    )
    alive = [t for t in threading.enumerate() if t.name.startswith("bootseer-fetch")]
    return [thread for thread in alive if thread not in resting]
