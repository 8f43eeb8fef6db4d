"""Replay: in which order, how much at a time, and what faults and pauses do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import Priority
from bootseer.blocks.trace.recorder import Recorder
from bootseer.blocks.trace.replay import FAILURES, Replay, plan_replay
from bootseer.blocks.trace.trace_file import Touched, Trace, parse, serialise
from bootseer.errors import StoreUnavailableError, UsageError
from tests.support.samples.block_sources import make_source

PAGE = 4096
BLOCK = 4 * PAGE
SIZE = 50 * BLOCK - 1000


def of(*touched: tuple[int, int], key: str = "object", size: int = SIZE) -> Trace:
    """A trace of (first page, pages), in this order."""
    extents = []
    for at_ms, (page, count) in enumerate(touched):
        length = min(count * PAGE, size - page * PAGE)
        extents.append(Touched(page * PAGE, length, at_ms, 1))
    return Trace(key, size, "", 1, tuple(extents))


class FakeTicket:
    """Stands for a prefetch that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.arrived = self.cancelled = False

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def end(self, arrived: bool) -> None:
        self.arrived = arrived
        self.ended.set()

    def cancel(self) -> None:
        self.cancelled = True
        self.end(False)

    def wait(self, timeout_s: float) -> bool:
        self.ended.wait(timeout_s)
        return self.arrived


class FakeFetcher:
    """Stands for a fetcher whose prefetches the test ends, to inject faults and delays."""

    def __init__(self, answer: bool | None = None) -> None:
        self.asked: list[tuple[int, int, FakeTicket]] = []
        self.more = threading.Condition()
        self.answer = answer
        self.priorities: set[Priority] = set()

    def prefetch(self, source: object, offset: int, length: int, priority: Priority) -> FakeTicket:
        ticket = FakeTicket()
        if self.answer is not None:
            ticket.end(self.answer)
        with self.more:
            self.asked.append((offset, length, ticket))
            self.priorities.add(priority)
            self.more.notify_all()
        return ticket

    def wait_for(self, count: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: len(self.asked) >= count, 30)


@given(
    st.lists(st.tuples(st.integers(0, 196), st.integers(1, 3)), max_size=20),
    st.integers(1, 9 * BLOCK),
)
def test_a_plan_has_every_touched_block_once_in_order(
    touched: list[tuple[int, int]], step_bytes: int
):
    some = of(*touched)
    steps = plan_replay(some, BLOCK, step_bytes=step_bytes)
    blocks = [b for s in steps for b in range(s.offset // BLOCK, -(-s.end // BLOCK))]
    expected: dict[int, None] = {}
    for e in some.extents:
        for block in range(e.offset // BLOCK, -(-(e.offset + e.length) // BLOCK)):
            expected[block] = None
    assert blocks == list(expected)
    assert all(s.length <= max(BLOCK, step_bytes) for s in steps)
    assert all(s.offset % BLOCK == 0 and (s.end % BLOCK == 0 or s.end == SIZE) for s in steps)


def test_a_plan_ends_with_its_memory():
    steps = plan_replay(of((0, 200)), BLOCK, step_bytes=2 * BLOCK, most_bytes=5 * BLOCK + 1)
    assert [s.length // BLOCK for s in steps] == [2, 2, 1]
    assert plan_replay(of((0, 200)), BLOCK, most_bytes=0) == []


def test_blocks_are_asked_for_in_order_as_hot(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    fetcher = FakeFetcher(answer=True)
    ended = threading.Event()
    with Replay(of((80, 1), (0, 1), (40, 4)), fetcher, source, finished=ended.set) as replay:
        assert replay.wait(30)
        assert ended.wait(30)
    assert [offset // BLOCK for offset, _, _ in fetcher.asked] == [20, 0, 10]
    assert fetcher.priorities == {Priority.HOT}
    assert replay.replayed_bytes == 3 * BLOCK
    assert replay.failed == ""


def test_the_window_bounds_what_is_under_way(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    fetcher = FakeFetcher()
    # Every second block, so that none can be joined to another.
    some = of(*((8 * n, 1) for n in range(20)))
    with Replay(some, fetcher, source, window_bytes=4 * BLOCK) as replay:
        fetcher.wait_for(4)
        assert not replay.wait(0.05)
        assert len(fetcher.asked) == 4
        fetcher.asked[0][2].end(True)
        fetcher.wait_for(5)
        fetcher.answer = True
        for _, _, ticket in fetcher.asked:
            ticket.end(True)
        assert replay.wait(30)
    assert len(fetcher.asked) == 20


def test_a_paused_replay_asks_for_nothing_and_goes_on_later(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    fetcher = FakeFetcher(answer=True)
    replay = Replay(of(*((8 * n, 1) for n in range(20))), fetcher, source)
    replay.pause()
    replay.start()
    assert not replay.wait(0.05)
    assert fetcher.asked == []
    replay.resume()
    assert replay.wait(30)
    assert len(fetcher.asked) == 20
    replay.close()


def test_closing_cancels_and_ends_even_when_the_store_hangs(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    fetcher = FakeFetcher()
    replay = Replay(of(*((8 * n, 1) for n in range(20))), fetcher, source).start()
    fetcher.wait_for(1)
    replay.close()
    replay.close()
    assert all(ticket.cancelled for _, _, ticket in fetcher.asked)
    paused = Replay(of((0, 1)), fetcher, source)
    paused.pause()
    paused.start()
    paused.close()


def test_a_store_that_is_gone_ends_the_replay(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    fetcher = FakeFetcher(answer=False)
    some = of(*((8 * n, 1) for n in range(20)))
    with Replay(some, fetcher, source, window_bytes=BLOCK) as replay:
        assert replay.wait(30)
    assert len(fetcher.asked) == FAILURES
    assert replay.failed
    assert replay.replayed_bytes == 0


def test_a_closed_fetcher_ends_the_replay(tmp_path: Path):
    class Closed(FakeFetcher):
        def prefetch(self, *_: object, **__: object) -> FakeTicket:
            raise StoreUnavailableError("the fetcher is closed")

    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    with Replay(of((0, 1)), Closed(), source) as replay:
        assert replay.wait(30)
    assert "closed" in replay.failed


def test_a_trace_of_another_object_is_refused(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK, key="object")
    for other in (of(key="other"), of(size=SIZE + 1)):
        with pytest.raises(UsageError):
            Replay(other, FakeFetcher(), source)


def test_a_recorded_start_replayed_asks_the_store_for_nothing_more(tmp_path: Path):
    """The whole round with the real fetcher: record, write, read, replay, read again."""
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK)
    touched = [(40 * PAGE + 7, 100), (3 * PAGE, 9 * PAGE), (SIZE - 50, 50), (41 * PAGE, 10)]
    recorder = Recorder(source.key, source.size_bytes, "train")

    def start(fetcher: Fetcher) -> None:
        for offset, length in touched:
            recorder.touch(offset, length)
            fetcher.read_into(source, offset, memoryview(bytearray(length)))

    with Fetcher() as fetcher:
        start(fetcher)
    told = parse(serialise(recorder.trace(full=True)))
    with Fetcher() as fetcher, Replay(told, fetcher, source) as replay:
        assert replay.wait(30)
        assert replay.failed == ""
        start(fetcher)
    total = fetcher.stats.total()  # of requests that have ended, so behind the fetcher's end
    assert total.hot_bytes == total.bytes == BLOCK * 4 + SIZE % BLOCK
    assert total.demand_bytes == 0


def test_a_replay_fills_the_node_cache_for_everybody(tmp_path: Path):
    source = make_source(tmp_path, SIZE, block_bytes=BLOCK)
    some = of((80, 1), (0, 1), (40, 4), key=source.key)
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as cache:
        with Fetcher(cache=cache) as fetcher, Replay(some, fetcher, source) as replay:
            assert replay.wait(30)
        with cache.open(source) as kept:
            assert [n for n in range(50) if kept.present(n)] == [0, 10, 20]
