"""The fetcher on stores that work: right bytes, each fetched once, wanted ones first."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, HeldBytes, Priority
from bootseer.blocks.fetch.records import Block
from bootseer.errors import StoreUnavailableError, UsageError
from bootseer.storage.store import PreferredReads
from tests.support.examples import examples
from tests.support.faulty_store import Fault, FaultyStore, Request, SlowStore
from tests.support.samples.fetch_sources import Arrival, Source, fetch_threads, noise
from tests.support.waiting import until

KIB = 1 << 10
SMALL = FetchSettings(connections=4, memory_bytes=1 << 20, least_range_bytes=8 * KIB)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert fetch_threads() == []


class Gate:
    """Fault injection: holds the requests it is asked to hold until it is opened."""

    def __init__(self, source: Source, streams: int = 4) -> None:
        self._open = threading.Event()
        self.held: Callable[[Request], bool] = lambda request: True
        self.arrived = threading.Semaphore(0)
        preferred = PreferredReads(range_bytes=64 * KIB, streams=streams)
        source.store = self.store = FaultyStore(source.store, self._wait, preferred=preferred)

    def _wait(self, request: Request) -> Fault | None:
        self.arrived.release()
        if self.held(request):
            self._open.wait()
        return None

    def open(self) -> None:
        self._open.set()


# --- bytes -----------------------------------------------------------------------------------

SHAPES = {
    "plain": {"block_bytes": 16 * KIB},
    "striped": {"block_bytes": 4 * KIB, "parts": 3},
    "packed": {"block_bytes": 10_000, "packed": True},
    "packed stripes in stretches": {
        "block_bytes": 7_001,
        "packed": True,
        "parts": 2,
        "stretch_bytes": 20_000,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory_kib", [96, 1024])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_range_has_the_right_bytes(
    shape: str, memory_kib: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = data.draw(st.sampled_from([0, 1, 7_001, 16 * KIB - 1, 16 * KIB + 1, 200_001]))
    source = Source(tmp_path_factory.mktemp("s"), noise(size), **SHAPES[shape])  # type: ignore[arg-type]
    ranges = st.tuples(st.integers(0, size + 10), st.integers(0, 100_000))
    asked = data.draw(st.lists(ranges, max_size=8))
    with Fetcher(FetchSettings(connections=3, memory_bytes=memory_kib * KIB)) as fetcher:
        for offset, length in asked:
            buffer = bytearray(length)
            count = fetcher.read_into(source, offset, buffer)
            assert buffer[:count] == source.data[offset : offset + length]
            assert count == max(0, min(length, size - offset))
        buffers = [bytearray(length) for _, length in asked]
        jobs = [(source, o, memoryview(b)) for (o, _), b in zip(asked, buffers, strict=True)]
        counts = fetcher.read_many(jobs)
        for (offset, length), buffer, count in zip(asked, buffers, counts, strict=True):
            assert buffer[:count] == source.data[offset : offset + length]


def test_many_readers_and_prefetches_of_little_memory(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(600_000), block_bytes=8 * KIB, parts=2, packed=True)
    wrong: list[object] = []

    def read(fetcher: Fetcher, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            offset, length = chance.randrange(600_000), chance.randrange(1, 60_000)
            if chance.random() < 0.3:
                ticket = fetcher.prefetch(source, offset, length, chance.choice(list(Priority)))
                if chance.random() < 0.5:
                    ticket.cancel()
            buffer = bytearray(length)
            count = fetcher.read_into(source, offset, buffer)
            if buffer[:count] != source.data[offset : offset + length]:
                wrong.append((offset, length))

    with Fetcher(FetchSettings(connections=6, memory_bytes=256 * KIB)) as fetcher:
        threads = [threading.Thread(target=read, args=(fetcher, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fetcher.memory_bytes <= 256 * KIB
    assert wrong == []


def test_a_negative_offset_is_refused(tmp_path: Path) -> None:
    source = Source(tmp_path, b"abc", block_bytes=2)
    with Fetcher(SMALL) as fetcher, pytest.raises(UsageError):
        fetcher.read_into(source, -1, bytearray(1))


# --- once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_that_many_want_is_fetched_once(tmp_path: Path, packed: bool) -> None:
    source = Source(tmp_path, noise(32 * KIB), block_bytes=32 * KIB, packed=packed)
    gate = Gate(source)
    with Fetcher(SMALL) as fetcher:
        # The first reads the whole block into its own memory; the others get copies of that.
        spans = [(0, 32 * KIB), (0, 32 * KIB), (5, 1000), (31 * KIB, KIB), (0, 4)]
        buffers = [bytearray(length) for _, length in spans]
        threads = []
        for (offset, _), buffer in zip(spans, buffers, strict=True):
            thread = threading.Thread(target=fetcher.read_into, args=(source, offset, buffer))
            thread.start()
            threads.append(thread)
            if len(threads) == 1:
                gate.arrived.acquire()
        there = Arrival()
        assert fetcher.hold(source, 7, 70, there.set) is None
        waiters = fetcher._workers.scheduler.memory.objects[id(source)].blocks[0].waiters
        while len(waiters) < 6:
            threading.Event().wait(0.001)
        gate.open()
        for thread in threads:
            thread.join()
        for (offset, length), buffer in zip(spans, buffers, strict=True):
            assert buffer == source.data[offset : offset + length]
        assert there.wait(10)
        held = there.held()
        assert b"".join(held.views) == source.data[7:77]
        held.release()
    assert len(gate.store.requests) == 1


def test_neighbours_come_in_one_request(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(256 * KIB), block_bytes=8 * KIB)
    gate = Gate(source)
    gate.open()
    with Fetcher(SMALL) as fetcher:
        fetcher.read_into(source, 0, bytearray(256 * KIB))
        lengths = [request.length for request in gate.store.requests]
        assert lengths == [64 * KIB] * 4
    assert fetcher.stats.total().requests == 4
    assert fetcher.stats.total().bytes == 256 * KIB


def test_ready_blocks_are_not_fetched_again_until_memory_is_short(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(256 * KIB), block_bytes=16 * KIB)
    gate = Gate(source)
    gate.open()
    with Fetcher(FetchSettings(memory_bytes=128 * KIB)) as fetcher:
        for _ in range(3):
            fetcher.read_into(source, 100, bytearray(10))
        assert len(gate.store.requests) == 1
        assert fetcher.prefetch(source, 16 * KIB, 240 * KIB).wait(10)
        fetcher.read_into(source, 100, bytearray(10))
        assert gate.store.requests[-1].offset == 0
        assert fetcher.memory_bytes <= 128 * KIB


# --- order -----------------------------------------------------------------------------------


def test_demand_overtakes_and_promotes_what_waits(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB)
    gate = Gate(source, streams=1)
    gate.held = lambda request: request.number == 0
    one = FetchSettings(connections=1, memory_bytes=1 << 20, least_range_bytes=KIB)
    with Fetcher(one) as fetcher:
        background = [fetcher.prefetch(source, n * KIB, KIB) for n in range(8)]
        gate.arrived.acquire()  # block 0 occupies the one connection
        hot = fetcher.prefetch(source, 20 * KIB, KIB, Priority.HOT)
        buffer = bytearray(KIB)
        reader = threading.Thread(target=fetcher.read_into, args=(source, 6 * KIB, buffer))
        reader.start()
        while (
            fetcher._workers.scheduler.memory.objects[id(source)].blocks[6].priority
            != Priority.DEMAND
        ):
            threading.Event().wait(0.001)
        gate.open()
        reader.join()
        assert buffer == source.data[6 * KIB : 7 * KIB]
        assert all(ticket.wait(10) for ticket in [*background, hot])
    offsets = [request.offset // KIB for request in gate.store.requests]
    assert offsets == [0, 6, 20, 1, 2, 3, 4, 5, 7]


def test_a_small_read_waits_for_a_few_requests_of_a_large_one(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(128 * KIB), block_bytes=KIB)
    gate = Gate(source, streams=1)
    gate.held = lambda request: request.number == 0
    one = FetchSettings(connections=1, memory_bytes=1 << 20, least_range_bytes=KIB)
    with Fetcher(one) as fetcher:
        large = bytearray(64 * KIB)
        reader = threading.Thread(
            target=fetcher.read_many,
            args=(
                [(source, n * KIB, memoryview(large)[n * KIB :][:KIB]) for n in range(0, 64, 2)],
            ),
        )
        reader.start()
        gate.arrived.acquire()
        blocks = fetcher._workers.scheduler.memory.objects[id(source)].blocks
        small = threading.Thread(target=fetcher.read_into, args=(source, 99 * KIB, bytearray(7)))
        small.start()
        while 99 not in blocks or blocks[99].job is None:
            threading.Event().wait(0.001)
        gate.open()
        small.join()
        reader.join()
    order = [request.offset // KIB for request in gate.store.requests]
    assert order.index(99) <= 3
    order.remove(99)
    assert order == list(range(0, 64, 2))


def test_what_lies_far_behind_in_a_long_request_is_asked_for_apart(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB)
    gate = Gate(source)
    gate.open()
    source.store = SlowStore(source.store, bytes_per_s=16 * KIB)
    with Fetcher(FetchSettings(connections=2, hedge_s=0)) as fetcher:
        ticket = fetcher.prefetch(source, 0, 64 * KIB)
        gate.arrived.acquire()
        near, far = bytearray(KIB), bytearray(KIB)
        fetcher.read_into(source, KIB, near)
        fetcher.read_into(source, 60 * KIB, far)
        assert (near, far) == (source.data[KIB : 2 * KIB], source.data[60 * KIB : 61 * KIB])
        assert not ticket.done
        ranges = [(request.offset, request.length) for request in gate.store.requests]
    assert ranges == [(0, 64 * KIB), (60 * KIB, KIB)]


def test_background_leaves_connections_for_demand(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB)
    gate = Gate(source, streams=4)
    gate.held = lambda request: request.offset < 32 * KIB
    settings_ = FetchSettings(connections=4, memory_bytes=1 << 20, least_range_bytes=KIB)
    with Fetcher(settings_) as fetcher:
        tickets = [fetcher.prefetch(source, n * KIB, KIB) for n in range(8)]
        for _ in range(2):
            gate.arrived.acquire()
        buffer = bytearray(KIB)
        fetcher.read_into(source, 40 * KIB, buffer)  # while both background requests hang
        assert buffer == source.data[40 * KIB : 41 * KIB]
        gate.open()
        assert all(ticket.wait(10) for ticket in tickets)


def test_a_cancelled_prefetch_is_not_fetched(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB)
    gate = Gate(source, streams=1)
    one = FetchSettings(connections=1, memory_bytes=1 << 20, least_range_bytes=KIB)
    with Fetcher(one) as fetcher:
        first = fetcher.prefetch(source, 0, KIB)
        gate.arrived.acquire()
        second = fetcher.prefetch(source, 10 * KIB, 4 * KIB)
        third = fetcher.prefetch(source, 12 * KIB, 4 * KIB)
        second.cancel()
        assert second.done
        assert not second.wait(10)
        gate.open()
        assert first.wait(10)
        assert third.wait(10)
    assert {r.offset // KIB for r in gate.store.requests[1:]} <= {12, 13, 14, 15}


# --- memory ----------------------------------------------------------------------------------


def test_held_memory_is_never_used_again_before_its_release(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(256 * KIB), block_bytes=16 * KIB)
    with Fetcher(FetchSettings(memory_bytes=96 * KIB)) as fetcher:
        there = Arrival()
        held = fetcher.hold(source, 10_000, 20_000, there.set)
        if held is None:
            assert there.wait(10)
            held = there.held()
        for offset in range(0, 256 * KIB, 5000):  # pushes everything else out, twice
            fetcher.read_into(source, offset, bytearray(100))
        assert b"".join(held.views) == source.data[10_000:30_000]
        held.release()
        held.release()
        assert fetcher.memory_bytes <= 96 * KIB


def test_a_read_for_which_no_thread_starts_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injected: a process at its limit of threads."""
    source = Source(tmp_path, noise(64 * KIB), block_bytes=16 * KIB)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Fetcher(SMALL) as fetcher:
        there = Arrival()
        with monkeypatch.context() as limit:
            limit.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                fetcher.hold(source, 0, 100, there.set)
        assert fetcher._workers.scheduler.waiters.watched == {}
        held = fetcher.hold(source, 0, 100, there.set)
        if held is None:
            assert there.wait(10)
            held = there.held()
        assert b"".join(held.views) == source.data[:100]
        held.release()
        (block,) = fetcher._workers.scheduler.memory.objects[id(source)].blocks.values()
        assert (block.pins, block.waiters) == (0, [])


def test_what_is_held_beyond_the_budget_still_comes(tmp_path: Path) -> None:
    """All memory is held by readers who will not let go before another one was served."""
    source = Source(tmp_path, noise(256 * KIB), block_bytes=16 * KIB)
    with Fetcher(FetchSettings(memory_bytes=32 * KIB)) as fetcher:
        holds = []
        for number in range(6):
            there = Arrival()
            held = fetcher.hold(source, number * 16 * KIB, 10, there.set)
            if held is None:
                assert there.wait(10)
                held = there.held()
            holds.append(held)
        for number, held in enumerate(holds):
            assert b"".join(held.views) == source.data[number * 16 * KIB :][:10]
            held.release()
        fetcher.read_into(source, 200 * KIB, bytearray(10))
        assert fetcher.memory_bytes <= 64 * KIB


def test_ready_is_called_once_and_from_inside_one_may_ask_again(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=4 * KIB, packed=True)
    got: list[bytes] = []
    there = threading.Event()
    with Fetcher(SMALL) as fetcher:

        def ready(arrived: HeldBytes | Exception) -> None:
            assert isinstance(arrived, HeldBytes)
            held = fetcher.hold(source, 1000, 9000)
            assert held is not None
            assert held.views == arrived.views
            got.append(b"".join(held.views))
            arrived.release()
            held.release()
            there.set()

        assert fetcher.hold(source, 1000, 9000, ready) is None
        assert there.wait(10)
    assert got == [source.data[1000:10_000]]


def test_at_the_end_there_is_nothing_to_hold(tmp_path: Path) -> None:
    source = Source(tmp_path, b"abcdef", block_bytes=4)
    with Fetcher(SMALL) as fetcher:
        held = fetcher.hold(source, 6, 10)
        assert held is not None
        assert held.views == []
        held.release()


def test_nothing_of_many_small_reads_stays(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB)
    buffer = bytearray(100)
    with Fetcher(FetchSettings(connections=2, memory_bytes=64 * KIB)) as fetcher:
        for number in range(300):
            fetcher.read_into(source, number * 37 % 60_000, buffer)
        gc.collect()
        before = len(gc.get_objects())
        for number in range(3000):
            fetcher.read_into(source, number * 7919 % 60_000, buffer)
        gc.collect()
        assert len(gc.get_objects()) < before + 500


def test_a_forgotten_source_is_let_go(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(16 * KIB), block_bytes=4 * KIB)
    with Fetcher(SMALL) as fetcher:
        fetcher.read_into(source, 0, bytearray(10))
        fetcher.forget(source)
        fetcher.forget(source)
        gone = weakref.ref(source)
        del source
        until(lambda: gc.collect() >= 0 and gone() is None, "the source to go", limit_s=10)


def test_what_arrives_of_a_forgotten_source_is_let_go(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(16 * KIB), block_bytes=4 * KIB)
    gate = Gate(source)
    with Fetcher(SMALL) as fetcher:
        ticket = fetcher.prefetch(source, 0, 16 * KIB)
        assert gate.arrived.acquire(timeout=10)
        fetcher.forget(source)
        gate.open()
        assert ticket.wait(10)
        scheduler = fetcher._workers.scheduler
        until(lambda: not scheduler.memory.objects, "the record to go", limit_s=10)
        with scheduler.lock:
            assert scheduler.memory.pool.used_bytes == 0
            assert not scheduler.queues.queues


# --- the node cache --------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_node_cache_holds_is_not_fetched(tmp_path: Path, packed: bool) -> None:
    source = Source(tmp_path / "s", noise(100_000), block_bytes=8 * KIB, packed=packed, key="k1")
    gate = Gate(source)
    gate.open()
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        with Fetcher(SMALL, cache=cache) as fetcher:
            fetcher.read_into(source, 0, bytearray(50_000))
            assert fetcher.prefetch(source, 50_000, 50_000).wait(10)
        fetched = len(gate.store.requests)
        assert fetched
        with Fetcher(SMALL, cache=cache) as fetcher:
            buffer = bytearray(100_000)
            assert fetcher.read_into(source, 0, buffer) == 100_000
            assert buffer == source.data
            assert fetcher.stats.total().cache_hits == 13
        assert len(gate.store.requests) == fetched


def test_a_cached_block_that_becomes_urgent_before_it_is_planned_is_read_once(
    tmp_path: Path,
) -> None:
    """It is wanted by one thread, and promoted by another: both times it is to be planned."""
    source = Source(tmp_path / "s", noise(16 * KIB), block_bytes=8 * KIB, key="k1")
    with (
        NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache,
        Fetcher(SMALL, cache=cache) as fetcher,
    ):
        fetcher.read_into(source, 0, bytearray(16 * KIB))
        workers = fetcher._workers
        with fetcher._decision as scheduler, scheduler.lock:
            record = scheduler.memory.record_of(source)
            blocks = [Block(record, index, 8 * KIB, Priority.DEMAND) for index in (0, 1)]
        jobs = workers._planner.jobs(record, [blocks[0], *blocks, blocks[1]], Priority.DEMAND)
        assert record.cached is not None
        assert [job.queue for job in jobs] == [record.cache_queue] * 2
        assert [job.items[0][0] for job in jobs] == blocks


def test_a_spoiled_cached_block_is_fetched_again(tmp_path: Path) -> None:
    source = Source(tmp_path / "s", noise(64 * KIB), block_bytes=8 * KIB, key="k2")
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        with Fetcher(SMALL, cache=cache) as fetcher:
            fetcher.read_into(source, 0, bytearray(64 * KIB))
        (data,) = (tmp_path / "cache").glob("*/data")
        with data.open("r+b") as file:
            file.seek(9 * KIB)
            file.write(b"spoiled")
        gate = Gate(source)
        gate.open()
        with Fetcher(SMALL, cache=cache) as fetcher:
            buffer = bytearray(64 * KIB)
            fetcher.read_into(source, 0, buffer)
            assert buffer == source.data
        assert [request.offset for request in gate.store.requests] == [8 * KIB]


# --- the end ---------------------------------------------------------------------------------


def test_closing_ends_reads_that_are_under_way(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB)
    store = source.store = FaultyStore(source.store, lambda request: Fault(hang=True))
    fetcher = Fetcher(SMALL)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            fetcher.read_into(source, 0, bytearray(64 * KIB))
        except StoreUnavailableError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not store.requests:
        threading.Event().wait(0.001)
    told = Arrival()
    assert fetcher.hold(source, 0, 10, told.set) is None
    ticket = fetcher.prefetch(source, 0, 64 * KIB)
    fetcher.close()
    fetcher.close()
    reader.join(10)
    assert len(ended) == 1
    assert told.is_set()
    assert ticket.done
    assert not ticket.wait(1)
    with pytest.raises(UsageError):
        fetcher.read_into(source, 0, bytearray(10))


def test_a_close_while_the_clock_looks_elsewhere_waits_for_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock rests for half a minute, and nobody wakes it any more."""
    fetcher = Fetcher(SMALL)
    looking, closing = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        closing.wait()

    monkeypatch.setattr(fetcher._workers, "_look_for_left_blocks", look)
    source = Source(tmp_path, b"abcdef", block_bytes=4)
    fetcher.read_into(source, 0, bytearray(6))
    looking.wait()
    closer = threading.Thread(target=fetcher.close)
    closer.start()
    while not fetcher._workers.closed:
        threading.Event().wait(0.001)
    closing.set()
    closer.join()
    assert fetch_threads() == []


def test_a_child_process_is_told_to_make_its_own(tmp_path: Path) -> None:
    source = Source(tmp_path, b"abcdef", block_bytes=4)
    fetcher = Fetcher(SMALL)
    child = os.fork()  # before there are threads
    if child == 0:
        try:
            fetcher.read_into(source, 0, bytearray(1))
        except UsageError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    fetcher.close()
