"""A process that reads an object through a fetcher with a node cache; run as a program by tests.

Arguments as JSON: `path` of the object, `cache` directory, `log` file, `latency_s` of a request,
`bytes_per_s` of one, `block_bytes`, `memory_bytes`, `chunk_bytes` of one read. Every request
appends "offset length" to the log in one write. Prints `ready`, then at the end the object's digest
with what the fetcher counted as JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import PreferredReads, Store
from tests.support.faulty_store import SlowStore
from tests.support.samples.block_sources import FileSource

PR_SET_PDEATHSIG = 1


class CountingStore(SlowStore):
    """A slow store that notes each request, where several processes can write."""

    def __init__(self, inner: Store, log: str, latency_s: float, bytes_per_s: float) -> None:
        preferred = PreferredReads(range_bytes=1 << 20, streams=4)
        super().__init__(inner, latency_s=latency_s, bytes_per_s=bytes_per_s, preferred=preferred)
        self._log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        os.write(self._log_fd, b"%d %d\n" % (offset, sum(map(len, buffers))))
        super().read_scatter(name, offset, buffers, attempt, filled)


def requests(log: Path) -> list[tuple[int, int]]:
    """Offset and length of every request made."""
    if not log.exists():
        return []
    rows = [line.split() for line in log.read_text(encoding="ascii").splitlines()]
    return [(int(offset), int(length)) for offset, length in rows]


def main(words: dict[str, object]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    source = FileSource(Path(str(words["path"])), block_bytes=int(str(words["block_bytes"])))
    latency_s, bytes_per_s = float(str(words["latency_s"])), float(str(words["bytes_per_s"]))
    source.store = CountingStore(source.store, str(words["log"]), latency_s, bytes_per_s)
    settings = FetchSettings(memory_bytes=int(str(words["memory_bytes"])))
    chunk_bytes = int(str(words["chunk_bytes"]))
    print("ready", flush=True)
    digest = hashlib.sha256()
    with (
        NodeCache.at(str(words["cache"]), 1 << 30) as cache,
        Fetcher(settings, cache=cache) as fetcher,
    ):
        buffer = bytearray(chunk_bytes)
        for offset in range(0, source.size_bytes, chunk_bytes):
            count = fetcher.read_into(source, offset, memoryview(buffer))  # type: ignore[arg-type]
            digest.update(buffer[:count])
        counted = dataclasses.asdict(fetcher.stats.total())
    print(json.dumps({"digest": digest.hexdigest(), **counted}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
