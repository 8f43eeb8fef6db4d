"""What the fetcher keeps of objects that come and go, and that nothing it keeps gets lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import transfers
from bootseer.blocks.fetch.block_memory import KEPT_OBJECTS
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, Priority
from bootseer.blocks.fetch.records import Block, Copy, Job, Piece, Waiter
from bootseer.blocks.fetch.scheduler import Scheduler, Want
from bootseer.blocks.fetch.workers import Workers
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store
from tests.support.faulty_store import WrappedStore
from tests.support.mounts.fuse import in_time
from tests.support.paths import ROOT
from tests.support.samples.block_sources import FileSource, block_of, make_source, some_bytes
from tests.support.waiting import until

BLOCK = 4096
SMALL = FetchSettings(memory_bytes=1 << 20, connections=8)


def files(folder: Path, count: int) -> list[FileSource]:
    """Small files of one store, as of a directory checkpoint."""
    sources = [make_source(folder, 2 * BLOCK + n % 7, seed=n) for n in range(count)]
    for source in sources:
        source.store = sources[0].store
    return sources


def read(fetcher: Fetcher, source: FileSource, deadline_s: float = 20.0) -> None:
    buffer = bytearray(source.size_bytes)
    fetcher.read_into(source, 0, memoryview(buffer), deadline_s=deadline_s)
    assert buffer == b"".join(block_of(source, n) for n in range(3) if n * BLOCK < len(buffer))


def small_reads(fetcher: Fetcher, source: FileSource) -> None:
    """Through the pool's memory, not into the reader's own."""
    buffer = bytearray(100)
    fetcher.read_into(source, 50, memoryview(buffer), deadline_s=20)
    assert buffer == block_of(source, 0)[50:150]


def test_forgetting_one_file_leaves_the_others_of_its_store_readable(tmp_path: Path):
    one, other = files(tmp_path, 2)
    with Fetcher(SMALL) as fetcher:
        read(fetcher, one)
        small_reads(fetcher, other)
        fetcher.forget(one)
        read(fetcher, other)
        read(fetcher, one)


@pytest.mark.parametrize("size", [100, BLOCK, 50 << 10])
def test_misuse_is_told_before_anything_is_fetched(tmp_path: Path, size: int):
    source = make_source(tmp_path, 100 << 10)
    with Fetcher(SMALL) as fetcher:
        with pytest.raises(TypeError, match="read-only"):
            in_time(lambda: fetcher.read_into(source, 0, memoryview(bytes(size))))
        with pytest.raises(TypeError, match="integer"):
            in_time(lambda: fetcher.read_many([(source, 1.5, memoryview(bytearray(size)))]))
        with pytest.raises(TypeError, match="integer"):
            in_time(lambda: fetcher.read_into(source, 1.5, memoryview(bytearray(size))))
        assert fetcher.stats.total().requests == 0
        buffer = bytearray(size)
        in_time(lambda: fetcher.read_into(source, 0, buffer))
        assert buffer == some_bytes(100 << 10)[:size]


def test_a_copy_that_fails_ends_its_reader_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fault injection: memory of a reader that cannot be copied to when its block arrives."""
    source = make_source(tmp_path, 2 * BLOCK)
    begun, go_on = threading.Event(), threading.Event()
    real_open = source.open_block

    def open_block(index: int, stored: memoryview, raw: memoryview) -> None:
        begun.set()
        go_on.wait(60)
        real_open(index, stored, raw)

    original = transfers.copy_from

    def copy_from(block: Block, copies: Sequence[Copy]) -> None:
        if any(len(item.target) == 13 for item in copies):
            raise ValueError("no such memory (injected)")
        original(block, copies)

    monkeypatch.setattr(source, "open_block", open_block)
    monkeypatch.setattr(transfers, "copy_from", copy_from)
    outcomes: dict[int, object] = {}

    def read_some(fetcher: Fetcher, size: int) -> None:
        buffer = bytearray(size)
        try:
            fetcher.read_into(source, 5, memoryview(buffer))
            outcomes[size] = bytes(buffer)
        except ValueError as error:
            outcomes[size] = str(error)

    with Fetcher(SMALL) as fetcher:
        readers = [
            threading.Thread(target=read_some, args=(fetcher, size), daemon=True)
            for size in (13, 17)
        ]
        for reader in readers:
            reader.start()
        assert begun.wait(60)
        (found,) = fetcher._workers.scheduler.memory.objects.values()
        block = found.blocks[0]
        until(lambda: len(block.waiters) == 2)
        go_on.set()
        for reader in readers:
            reader.join(30)
        assert outcomes == {13: "no such memory (injected)", 17: some_bytes(2 * BLOCK)[5:22]}
        assert block.pins == 0


@pytest.mark.parametrize("cached", [False, True])
def test_files_that_came_and_went_take_no_room(tmp_path: Path, cached: bool):
    sources = files(tmp_path / "files", KEPT_OBJECTS + 200)
    cache = NodeCache.at(str(tmp_path / "cache"), 1 << 30) if cached else None
    before = len(os.listdir("/proc/self/fd"))
    with Fetcher(SMALL, cache=cache) as fetcher:
        for source in sources:
            small_reads(fetcher, source)
        scheduler = fetcher._workers.scheduler
        assert len(scheduler.memory.objects) <= KEPT_OBJECTS + 1
        assert len(scheduler.queues.queues) <= 2 * KEPT_OBJECTS + 2
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * KEPT_OBJECTS + 20
        for source in sources[:5]:
            read(fetcher, source)
    assert len(os.listdir("/proc/self/fd")) <= before
    if cache is not None:
        assert cache.stopped == ""
        cache.close()


class Halting(WrappedStore):
    """A store whose requests wait before their bytes come, and before they return: injected."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.begun, self.go_on, self.came, self.end = (threading.Event() for _ in range(4))

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self.inner.read_scatter(name, offset, buffers, attempt, filled)
        self.came.set()
        assert self.end.wait(60)


def test_a_forgotten_object_is_closed_while_a_copy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its last block goes just before a block arrives that two readers want."""
    kept = make_source(tmp_path / "files", BLOCK)
    other = make_source(tmp_path / "files", BLOCK, seed=1, key="")
    kept.store = slow = Halting(kept.store)  # type: ignore[assignment]
    other.store = shared = Halting(other.store)  # type: ignore[assignment]
    shared.end.set()
    with (
        NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache,
        Fetcher(SMALL, cache=cache) as fetcher,
    ):
        ticket = fetcher.prefetch(kept, 0, BLOCK)
        assert slow.begun.wait(60)
        memory = fetcher._workers.scheduler.memory
        (found,) = memory.objects.values()
        cached = found.cached
        assert cached is not None
        closed = threading.Event()
        real_close = cached.close

        def close() -> None:
            closed.set()
            real_close()

        monkeypatch.setattr(cached, "close", close)
        fetcher.forget(kept)
        buffers = [bytearray(BLOCK), bytearray(100)]
        readers = [
            threading.Thread(target=fetcher.read_into, args=(other, 0, buffer), daemon=True)
            for buffer in buffers
        ]
        readers[0].start()
        assert shared.begun.wait(60)
        readers[1].start()
        block = memory.record_of(other).blocks[0]
        until(lambda: len(block.waiters) == 2)
        slow.go_on.set()
        assert slow.came.wait(60)
        shared.go_on.set()
        for reader in readers:
            reader.join(60)
        slow.end.set()
        assert ticket.wait(60)
        assert [bytes(buffer) for buffer in buffers] == [
            some_bytes(BLOCK, 1),
            some_bytes(BLOCK, 1)[:100],
        ]
        assert closed.wait(10)


def test_threads_open_many_files_at_once(tmp_path: Path):
    sources = files(tmp_path / "files", 300)
    wrong: list[BaseException] = []
    with (
        NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache,
        Fetcher(SMALL, cache=cache) as fetcher,
    ):

        def visit(first: int) -> None:
            try:
                for n in range(len(sources)):
                    small_reads(fetcher, sources[(first + n) % len(sources)])
            except BaseException as error:
                wrong.append(error)

        for _ in range(2):  # the second time most come from the cache, over lines of their own
            threads = [threading.Thread(target=visit, args=(71 * n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for source in sources:
                fetcher.forget(source)
        assert wrong == []
        assert all(worker.is_alive() for worker in fetcher._workers._threads)


def test_a_demand_is_not_left_in_a_job_of_lower_priority(tmp_path: Path):
    """Two plans of one block under way: the urgent one counts, whichever is ready first."""
    (source,) = files(tmp_path, 1)
    scheduler = Scheduler(SMALL)
    found = scheduler.memory.record_of(source)
    scheduler.want(found, [Want(0)], Waiter(Priority.BACKGROUND))
    (block,) = scheduler.effects.to_plan
    scheduler.want(found, [Want(0)], Waiter(Priority.DEMAND))
    items: list[tuple[Block, Piece]] = [(block, Piece(0, "object-0", 0, BLOCK))]
    scheduler.enqueue([Job(found.queue, list(items), Priority.BACKGROUND)])
    scheduler.enqueue([Job(found.queue, list(items), Priority.DEMAND)])
    request = scheduler.start_next(0.0)
    assert request is not None
    assert request.priority is Priority.DEMAND
    assert scheduler.start_next(0.0) is None


def test_the_clock_does_not_sleep_while_a_job_waits_for_its_thread(tmp_path: Path):
    (source,) = files(tmp_path, 1)
    scheduler = Scheduler(SMALL)
    found = scheduler.memory.record_of(source)
    assert scheduler.next_due_s(0.0, 0.1) is None
    scheduler.want(found, [Want(0)], Waiter(Priority.DEMAND))
    (block,) = scheduler.effects.to_plan
    scheduler.enqueue(
        [Job(found.queue, [(block, Piece(0, "object-0", 0, BLOCK))], Priority.DEMAND)]
    )
    assert scheduler.next_due_s(0.0, 0.1) == 0.1


def test_whatever_was_decided_is_done_however_a_decision_is_left(tmp_path: Path):
    (source,) = files(tmp_path, 1)
    workers = Workers(SMALL, None, None)
    called: list[str] = []

    def decide() -> str:
        with workers.decision as scheduler, scheduler.lock:
            scheduler.effects.to_call.append(lambda: called.append("returned"))
            return "early"

    assert decide() == "early"
    assert called == ["returned"]
    waiter = Waiter(Priority.DEMAND, lambda: called.append("arrived"))

    def fail() -> None:
        with workers.decision as scheduler, scheduler.lock:
            scheduler.want(scheduler.memory.record_of(source), [Want(0)], waiter)
            raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        fail()
    until(lambda: called == ["returned", "arrived"])
    workers.close()


def test_an_interrupt_leaves_the_lock_free():
    """Injected: a signal whose handler raises, at any line of a decision."""
    workers = Workers(SMALL, None, None)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    struck = 0
    try:
        while struck < 2000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 50e-6)
                for _ in range(10_000):  # the collector may swallow an interrupt
                    with workers.decision as scheduler, scheduler.lock:
                        pass
            except KeyboardInterrupt:
                struck += 1
                assert not workers.scheduler.lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    workers.close()


def test_idle_threads_are_not_counted_twice(tmp_path: Path):
    """Two threads were woken for two jobs; two jobs more need two threads more."""
    (source,) = files(tmp_path, 1)
    source.size_bytes = 64 * BLOCK
    workers = Workers(SMALL, None, None)
    scheduler = workers.scheduler
    found = scheduler.memory.record_of(source)
    with scheduler.lock:
        scheduler.want(found, [Want(n) for n in range(4)], Waiter(Priority.DEMAND))
        jobs = [
            Job(found.queue, [(b, Piece(n, "object-0", n * BLOCK, BLOCK))], Priority.DEMAND)
            for n, b in enumerate(scheduler.effects.to_plan)
        ]
        workers._clock_thread = threading.current_thread()
        workers._idle = 2
        scheduler.enqueue(jobs[:2])
        assert workers.wake_threads(scheduler.effects, starved=False) == []
        scheduler.enqueue(jobs[2:])
        assert len(workers.wake_threads(scheduler.effects, starved=False)) == 2


def test_a_connection_that_cannot_be_cancelled_ends_no_thread(tmp_path: Path):
    class Stubborn(FileSource):
        pass

    (source,) = files(tmp_path, 1)
    inner, began, go_on = source.store, threading.Event(), threading.Event()

    class Store:
        """A store whose connections raise when they are shut down: a fault, injected."""

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def read_scatter(
            self, name: str, offset: int, buffers: object, attempt: Attempt, filled: object = None
        ) -> None:
            def fail() -> None:
                raise OSError("not connected")

            attempt.on_cancel(fail)
            began.set()
            go_on.wait(30)
            attempt.on_cancel(None)
            inner.read_scatter(name, offset, buffers, Attempt(), filled)  # type: ignore[arg-type]

    source.store = Store()  # type: ignore[assignment]
    with Fetcher(SMALL) as fetcher:
        ticket = fetcher.prefetch(source, 0, BLOCK)
        assert began.wait(30)
        ticket.cancel()
        go_on.set()
        read(fetcher, source)


def test_what_it_cost_is_told_as_events_when_a_fetcher_is_closed(tmp_path: Path):
    """In a process of its own, as `bootseer run` starts one."""
    (source,) = files(tmp_path / "files", 1)
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.samples.block_sources import FileSource
from bootseer.blocks.fetch.fetcher import Fetcher
with Fetcher() as fetcher:
    source = FileSource(Path(sys.argv[2]))
    fetcher.read_into(source, 0, memoryview(bytearray(source.size_bytes)))
"""
    path = tmp_path / "files" / "object-0"
    words = [sys.executable, "-c", script, str(ROOT), str(path)]
    log = tmp_path / "events.jsonl"
    subprocess.run(words, env={**os.environ, "BOOTSEER_EVENTS": str(log)}, check=True)
    lines = [json.loads(line) for line in log.read_text(encoding="ascii").splitlines()]
    (found,) = [line["attributes"] for line in lines if line["name"] == "fetch.stats"]
    assert found["bootseer.source_class"] == "plain"
    assert found["bootseer.bytes"] == source.size_bytes
    assert found["bootseer.requests"] >= 1
