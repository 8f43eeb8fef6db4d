"""Everything at once against stores at their worst: right bytes, no late writes, nothing left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, HeldBytes, Priority
from bootseer.blocks.fetch.records import Status
from bootseer.errors import BootseerError, StoreUnavailableError
from tests.support.faulty_store import Fault, FaultyStore, Request
from tests.support.samples.fetch_sources import Arrival, Source, noise

pytestmark = pytest.mark.slow

BLOCK = 8192
PLACES = ("a", "b", "c")
SIZE = 300_000
IMPATIENT = FetchSettings(
    memory_bytes=40 * BLOCK,  # a little more than one object: blocks come and go
    connections=8,
    hedge_s=0.05,
    hedge_limit_s=0.1,
    backoff_s=0.005,
    backoff_limit_s=0.02,
    suspect_s=0.1,
    stall_s=0.3,
    least_range_bytes=BLOCK,
    demand_deadline_s=5,
)
FAULTS = (
    Fault(error=StoreUnavailableError("gone")),
    Fault(after=1, error=StoreUnavailableError("gone in the middle")),
    Fault(after=1),  # claims to have brought all of it
    Fault(flip=True),
    Fault(hang=True),
    Fault(after=1, hang=True),
    Fault(error=OSError("foreign")),
)


class StallingStore(FaultyStore):
    """Its requests hang until they are cancelled or their stall time is over."""

    def _hang(self, request: Request, rest: Sequence[memoryview]) -> None:
        given_up = threading.Event()
        request.attempt.on_cancel(given_up.set)
        given_up.wait(request.attempt.stall_s)
        request.attempt.on_cancel(None)
        for buffer in rest:
            buffer[:] = b"\xee" * len(buffer)
        raise StoreUnavailableError("it hung")


class Crowd:
    """Threads that read, hold, prefetch, cancel and forget at random."""

    def __init__(self, folder: Path, seed: int, rounds: int, cache: NodeCache | None) -> None:
        self.seed, self.rounds = seed, rounds
        self.wrong: list[str] = []
        self.right = 0
        chance = random.Random(seed)
        data = noise(SIZE, seed)

        def decide(_: Request) -> Fault | None:
            return chance.choice(FAULTS) if chance.random() < 0.1 else None

        self.sources = []
        for n in range(6):
            turned = data[n * 1000 :] + data[: n * 1000]
            options = {"block_bytes": BLOCK, "parts": 3, "places": PLACES, "key": f"{n}"}
            source = Source(folder / str(n), turned, packed=n % 2 == 1, **options)  # type: ignore[arg-type]
            source.store = StallingStore(source.store, decide, replicas=PLACES)
            self.sources.append(source)
        self.fetcher = Fetcher(IMPATIENT, cache=cache)

    def run(self) -> None:
        threads = [threading.Thread(target=self._visit, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _visit(self, number: int) -> None:
        chance = random.Random(self.seed * 100 + number)
        acts = [self._read] * 10 + [self._hold] * 5 + [self._prefetch] * 4 + [self._forget]
        for _ in range(self.rounds):
            source = chance.choice(self.sources)
            offset = chance.randrange(SIZE)
            if chance.random() < 0.3:
                offset -= offset % BLOCK  # whole blocks land in the reader's own memory
            length = chance.choice([10, 4096, BLOCK, 20_000, 100_000])
            try:
                chance.choice(acts)(chance, source, offset, length)
            except BootseerError:
                pass

    def _compare(self, what: str, source: Source, offset: int, found: bytes) -> None:
        if found == source.data[offset : offset + len(found)]:
            self.right += 1
        else:
            self.wrong.append(f"{what} {offset} {len(found)}")

    def _read(self, chance: random.Random, source: Source, offset: int, length: int) -> None:
        buffer = bytearray(length)
        try:
            count = self.fetcher.read_into(
                source, offset, buffer, deadline_s=chance.choice([0.01, 0.1, 5])
            )
        except BootseerError:
            buffer[:] = b"\x55" * length
            time.sleep(chance.random() * 0.02)
            if buffer != b"\x55" * length:
                self.wrong.append(f"late write {offset} {length}")
            raise
        self._compare("read", source, offset, bytes(buffer[:count]))

    def _hold(self, chance: random.Random, source: Source, offset: int, length: int) -> None:
        arrived, is_lost = Arrival(), chance.random() < 0.05
        held = self.fetcher.hold(source, offset, length, _let_go if is_lost else arrived.set)
        if held is None:
            if is_lost:
                return
            if not arrived.wait(60):
                self.wrong.append("nobody called")
                return
            held = arrived.held()
        time.sleep(chance.random() * 0.005)
        found = b"".join(map(bytes, held.views))
        held.release()
        self._compare("held", source, offset, found)

    def _prefetch(self, chance: random.Random, source: Source, offset: int, length: int) -> None:
        ticket = self.fetcher.prefetch(source, offset, length, chance.choice(list(Priority)))
        if chance.random() < 0.5:
            ticket.cancel()
        elif chance.random() < 0.5:
            ticket.wait(0.1)

    def _forget(self, chance: random.Random, source: Source, offset: int, length: int) -> None:
        self.fetcher.forget(source)

    def rest(self) -> None:
        """Wait until nothing is under way any more."""
        scheduler = self.fetcher._workers.scheduler
        queues = scheduler.queues
        for _ in range(3000):
            with self.fetcher._workers.scheduler.lock:
                queued = any(queue.heap for queue in queues.queues.values())
                if not (queues.requests or scheduler.waiters.watched or queued):
                    return
            time.sleep(0.02)

    def left_over(self) -> list[str]:
        """Whatever the books still hold that nobody wants."""
        memory, queues = (
            self.fetcher._workers.scheduler.memory,
            self.fetcher._workers.scheduler.queues,
        )
        with self.fetcher._workers.scheduler.lock:
            blocks = [b for found in memory.objects.values() for b in found.blocks.values()]
            out = [f"block {b.index} {b.status.name}" for b in blocks if b.status != Status.READY]
            out += [f"pins of {b.index}" for b in blocks if b.pins]
            kept = sum(b.slot.size_bytes for b in blocks if b.slot is not None)
            if kept != memory.pool.used_bytes:
                out.append(f"{memory.pool.used_bytes} bytes used, {kept} known")
            if memory.pool.mapped_bytes > IMPATIENT.memory_bytes:
                out.append(f"{memory.pool.mapped_bytes} bytes mapped")
            out += [f"queue {queue.active}" for queue in queues.queues.values() if queue.active]
        return out


def _let_go(arrived: HeldBytes | Exception) -> None:
    if isinstance(arrived, HeldBytes):
        arrived.release()


def crowd(tmp_path: Path, seed: int, rounds: int, *, cached: bool) -> None:
    cache = NodeCache.at(str(tmp_path / "cache"), 200 * BLOCK) if cached else None
    some = Crowd(tmp_path / "store", seed, rounds, cache)
    with some.fetcher:
        some.run()
        some.rest()
        left_over = some.left_over()
    assert some.wrong == []
    assert left_over == []
    assert some.right > rounds
    if cache is not None:
        assert cache.corrupt_blocks == 0
        assert cache.stopped == ""
        cache.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_crowd_on_bad_stores(tmp_path: Path, cached: bool):
    crowd(tmp_path, 1, 15, cached=cached)


@pytest.mark.soak
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_many_crowds_on_bad_stores(tmp_path: Path, seed: int, cached: bool):
    crowd(tmp_path, seed, 200, cached=cached)
