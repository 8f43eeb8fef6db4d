"""Whatever a store does wrong: the right bytes or an error, never wrong bytes, never for ever."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, Priority
from bootseer.blocks.fetch.retry_policy import backoff_s, next_try_s
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
)
from tests.support.faulty_store import Fault, FaultyStore, Request
from tests.support.samples.fetch_sources import Arrival, Source, fetch_threads, noise

KIB = 1 << 10
PLACES = ("a", "b", "c")
EAGER = FetchSettings(
    connections=4,
    memory_bytes=1 << 20,
    least_range_bytes=8 * KIB,
    backoff_s=0.001,
    backoff_limit_s=0.01,
    hedge_s=0.03,
    hedge_limit_s=0.05,
)


def gone() -> StoreUnavailableError:
    return StoreUnavailableError("the store is gone (injected)")


def whole(fetcher: Fetcher, source: Source) -> bytearray:
    buffer = bytearray(source.size_bytes)
    assert fetcher.read_into(source, 0, buffer) == source.size_bytes
    return buffer


# --- anything at all -------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.1, 0.4, 0.8]))
def test_the_right_bytes_or_an_error(
    packed: bool, seed: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    source = Source(
        tmp_path_factory.mktemp("s"),
        noise(120_000),
        block_bytes=8 * KIB,
        parts=2,
        packed=packed,
        places=PLACES,
    )
    faults = [
        Fault(error=gone()),
        Fault(after=1, error=gone()),
        Fault(after=1),  # claims to have brought all of it
        Fault(flip=True),
        Fault(after=2, flip=True, error=gone()),
        Fault(hang=True),
        Fault(after=1, hang=True),
        Fault(error=OSError("foreign")),
    ]

    def decide(request: Request) -> Fault | None:
        return chance.choice(faults) if chance.random() < share else None

    source.store = FaultyStore(source.store, decide, replicas=PLACES)
    wrong: list[object] = []

    def read(fetcher: Fetcher, chance: random.Random) -> None:
        for _ in range(3):
            offset, length = chance.randrange(120_000), chance.randrange(1, 120_000)
            buffer = bytearray(length)
            try:
                count = fetcher.read_into(source, offset, buffer, deadline_s=0.3)
            except BootseerError:
                continue
            if buffer[:count] != source.data[offset : offset + length]:
                wrong.append((offset, length))

    with Fetcher(EAGER) as fetcher:
        readers = [
            threading.Thread(target=read, args=(fetcher, random.Random(seed + n))) for n in range(3)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert fetch_threads() == []


# --- one after the other ---------------------------------------------------------------------


def test_what_may_heal_is_tried_again_from_where_it_broke(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB)
    source.store = store = FaultyStore(
        source.store,
        lambda request: Fault(after=3, error=gone()) if request.number == 0 else None,
    )
    one = FetchSettings(connections=1, backoff_s=0.001)
    with Fetcher(one) as fetcher:
        assert whole(fetcher, source) == source.data
    assert fetcher.stats.total().retries == 5
    assert fetcher.stats.total().failures == 1
    assert [(r.offset, r.length) for r in store.requests] == [
        (0, 64 * KIB),
        (24 * KIB, 40 * KIB),
    ]


def test_a_corrupt_replica_is_healed_by_another(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB, places=PLACES)

    def decide(request: Request) -> Fault | None:
        return Fault(flip=True) if request.attempt.replica in ("a", "b") else None

    source.store = store = FaultyStore(source.store, decide, replicas=PLACES)
    with Fetcher(EAGER) as fetcher:
        assert whole(fetcher, source) == source.data
    assert fetcher.stats.total().corrupt > 0
    for request in store.requests:
        assert request.attempt.replica not in request.attempt.avoid


@pytest.mark.parametrize("places", [(), PLACES])
def test_corrupt_everywhere_is_an_error(tmp_path: Path, places: tuple[str, ...]) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB, places=places)
    source.store = store = FaultyStore(
        source.store, lambda request: Fault(flip=True), replicas=places
    )
    there = Arrival()
    with Fetcher(EAGER) as fetcher:
        with pytest.raises(CorruptDataError, match="block 0"):
            whole(fetcher, source)
        assert len(store.requests) == 3
        assert fetcher.hold(source, 0, 10, there.set) is None
        assert there.wait(10)
        with pytest.raises(CorruptDataError):
            there.held()
        assert not fetcher.prefetch(source, 0, 10).wait(10)
    if places:
        assert {request.attempt.replica for request in store.requests} == set(places)


def test_one_bad_block_spoils_only_itself(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB)
    path = tmp_path / "part-0"
    stored = bytearray(path.read_bytes())
    stored[20 * KIB] ^= 1
    path.write_bytes(stored)
    with Fetcher(EAGER) as fetcher:
        with pytest.raises(CorruptDataError, match="block 2"):
            whole(fetcher, source)
        for offset, length in [(0, 16 * KIB), (24 * KIB, 40 * KIB)]:
            buffer = bytearray(length)
            fetcher.read_into(source, offset, buffer)
            assert buffer == source.data[offset : offset + length]


@pytest.mark.parametrize(
    ("error", "requests"), [(NotFoundError("no such part"), 1), (gone(), 12), (OSError("x"), 12)]
)
def test_errors_are_final_at_once_or_after_all_tries(
    tmp_path: Path, error: Exception, requests: int
) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    source.store = store = FaultyStore(source.store, lambda request: Fault(error=error))
    expected = StoreUnavailableError if isinstance(error, OSError) else type(error)
    with Fetcher(EAGER) as fetcher, pytest.raises(expected):
        whole(fetcher, source)
    assert len(store.requests) == requests


def test_each_reader_gets_an_error_object_of_its_own(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    first = NotFoundError("no such part")
    source.store = FaultyStore(source.store, lambda request: Fault(error=first))
    with Fetcher(EAGER) as fetcher, pytest.raises(NotFoundError) as caught:
        whole(fetcher, source)
    assert caught.value is not first
    assert caught.value.__cause__ is first


def test_a_source_that_cannot_say_where_a_block_is_fails_its_readers(tmp_path: Path) -> None:
    class Lost(Source):
        def locate(self, index: int) -> object:  # type: ignore[override]
            raise CorruptDataError("the table ends early")

    source = Lost(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    with Fetcher(EAGER) as fetcher, pytest.raises(CorruptDataError):
        whole(fetcher, source)


def test_a_callback_that_raises_ends_no_thread(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=KIB)
    called = threading.Event()

    def bad(arrived: object) -> None:
        called.set()
        raise RuntimeError("a reader's fault")

    with Fetcher(EAGER) as fetcher:
        assert fetcher.hold(source, 0, 10, bad) is None
        assert called.wait(10)
        assert whole(fetcher, source) == source.data


# --- deadlines -------------------------------------------------------------------------------


def test_a_reader_leaves_at_its_deadline_and_nobody_writes_to_its_memory(tmp_path: Path) -> None:
    """The store hangs after one block, and scribbles over the rest when it is cancelled."""
    source = Source(tmp_path, noise(32 * KIB), block_bytes=8 * KIB)
    source.store = FaultyStore(source.store, lambda request: Fault(after=1, hang=True))
    buffer = bytearray(32 * KIB)
    with Fetcher(FetchSettings(connections=2, hedge_s=0)) as fetcher:
        with pytest.raises(DeadlineError):
            fetcher.read_into(source, 0, buffer, deadline_s=0.1)
        kept = bytes(buffer)
        time.sleep(0.2)
        assert buffer == kept
    assert fetch_threads() == []


def test_a_deadline_of_one_reader_leaves_the_others_alone(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    go_on = threading.Event()

    def late(request: Request) -> Fault | None:
        go_on.wait()
        return None

    source.store = FaultyStore(source.store, late)
    there = Arrival()
    with Fetcher(FetchSettings(hedge_s=0)) as fetcher:
        assert fetcher.hold(source, 0, 8 * KIB, there.set) is None
        with pytest.raises(DeadlineError):
            fetcher.read_into(source, 0, bytearray(100), deadline_s=0.05)
        go_on.set()
        assert there.wait(10)
        held = there.held()
        assert b"".join(held.views) == source.data
        held.release()


def test_held_bytes_are_refused_at_the_deadline(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    source.store = FaultyStore(source.store, lambda request: Fault(hang=True))
    there = Arrival()
    with Fetcher(FetchSettings(demand_deadline_s=0.1, hedge_s=0)) as fetcher:
        assert fetcher.hold(source, 0, 10, there.set) is None
        assert there.wait(10)
        with pytest.raises(DeadlineError):
            there.held()


def test_an_outage_is_waited_for_once_and_says_its_cause(tmp_path: Path) -> None:
    """One deadline an outage: who reads on after it, in vain, is not held up as long each time."""
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB)
    away = threading.Event()
    away.set()
    working = source.store

    def refused(request: Request) -> Fault | None:
        return Fault(error=gone()) if away.is_set() else None

    source.store = store = FaultyStore(working, refused)

    def read(fetcher: Fetcher, block: int) -> bytes:
        there = Arrival()
        held = fetcher.hold(source, block * 8 * KIB, 8 * KIB, there.set)
        if held is None:
            assert there.wait(30)
            held = there.held()
        try:
            return b"".join(held.views)
        finally:
            held.release()

    patient = FetchSettings(demand_deadline_s=3600, outage_deadline_s=0.2, backoff_s=0.1, tries=6)
    with Fetcher(patient) as fetcher:
        scheduler = fetcher._workers.scheduler
        found = scheduler.memory.record_of(source)
        assert scheduler.waiters.patience_s(found, time.monotonic()) == 3600
        with pytest.raises(StoreUnavailableError, match="gone"):
            read(fetcher, 0)
        asked = len(store.requests)
        assert asked >= 2
        assert scheduler.waiters.patience_s(found, time.monotonic()) == 0.2
        assert (
            scheduler.waiters.patience_s(found, time.monotonic() + 3601) == 3600
        )  # for whom it is new
        away.clear()
        assert read(fetcher, 1) == source.data[8 * KIB : 16 * KIB]
        assert scheduler.waiters.patience_s(found, time.monotonic()) == 3600
    away.set()
    short = FetchSettings(demand_deadline_s=0.5, outage_deadline_s=0.1, backoff_s=0.05, tries=99)
    with Fetcher(short) as fetcher:
        with pytest.raises(DeadlineError, match=r"in time: the store is gone \(injected\)"):
            read(fetcher, 2)
        health = fetcher._workers.scheduler.memory.record_of(source).queue.health
        first = health.outage_s
        assert first
        with pytest.raises(DeadlineError, match="gone"):
            read(fetcher, 3)
        assert health.outage_s > first, "it is the same outage as long as reads go on to fail"


def test_reads_are_given_up_only_while_nothing_at_all_comes(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=8 * KIB)
    asked, ended = threading.Event(), threading.Event()

    def hangs(request: Request) -> Fault | None:
        asked.set()
        request.attempt.on_cancel(ended.set)
        ended.wait(60)
        request.attempt.on_cancel(None)
        return Fault(error=gone())

    source.store = FaultyStore(source.store, hangs)
    patient = FetchSettings(demand_deadline_s=3600, outage_deadline_s=0.2, hedge_s=0)
    with Fetcher(patient) as fetcher:
        there = Arrival()
        assert fetcher.hold(source, 0, 8 * KIB, there.set) is None
        assert asked.wait(30)
        scheduler = fetcher._workers.scheduler
        fetcher.give_up(100.0)
        assert not there.is_set(), "it has not waited for long"
        (waiter,) = scheduler.waiters.watched
        waiter.deadline_s -= 200.0  # as if it had begun so long ago
        health = scheduler.memory.record_of(source).queue.health
        health.arrived_s = time.monotonic() - 50.0
        fetcher.give_up(100.0)
        assert not there.is_set(), "the store is slow, but something came"
        health.arrived_s = 0.0
        fetcher.give_up(100.0)
        assert there.wait(30)
        with pytest.raises(DeadlineError, match="nothing came for 100 s"):
            there.held()
        record = scheduler.memory.record_of(source)
        assert scheduler.waiters.patience_s(record, time.monotonic()) == 0.2


def test_a_store_that_is_back_is_noticed_however_slow_it_is(tmp_path: Path) -> None:
    """Its first byte takes three times as long as reads wait in an outage."""
    source = Source(tmp_path, noise(800 * KIB), block_bytes=8 * KIB)
    away = threading.Event()
    away.set()

    def slow(request: Request) -> Fault | None:
        if away.is_set():
            return Fault(error=gone())
        given_up = threading.Event()
        request.attempt.on_cancel(given_up.set)
        cut = given_up.wait(0.6)
        request.attempt.on_cancel(None)
        return Fault(error=gone()) if cut else None

    source.store = FaultyStore(source.store, slow)
    settings_ = FetchSettings(
        demand_deadline_s=3600, outage_deadline_s=0.2, backoff_s=0.1, tries=6, hedge_s=0
    )
    with Fetcher(settings_) as fetcher:

        def read(block: int) -> bytes:
            there = Arrival()
            held = fetcher.hold(source, block * 8 * KIB, 8 * KIB, there.set)
            if held is None:
                assert there.wait(30)
                held = there.held()
            data = b"".join(held.views)
            held.release()
            return data

        with pytest.raises(StoreUnavailableError, match="gone"):
            read(0)
        away.clear()
        with pytest.raises(DeadlineError):
            read(1)
        for block in range(2, 100):
            try:
                data = read(block)
            except DeadlineError:
                continue
            break
        assert data == source.data[block * 8 * KIB : (block + 1) * 8 * KIB]
        scheduler = fetcher._workers.scheduler
        record = scheduler.memory.record_of(source)
        assert scheduler.waiters.patience_s(record, time.monotonic()) == 3600
        assert read(1) == source.data[8 * KIB : 16 * KIB]


@pytest.mark.parametrize("others", [0, 1])
def test_a_block_that_is_kept_asking_for_is_asked_at_once_for_who_reads_it(
    others: int, tmp_path: Path
) -> None:
    """The try that goes on behind a read that failed, or for another reader, may be hours away."""
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    away = threading.Event()
    away.set()
    source.store = FaultyStore(
        source.store, lambda request: Fault(error=gone()) if away.is_set() else None
    )
    settings_ = FetchSettings(
        demand_deadline_s=2, outage_deadline_s=2, backoff_s=36_000, backoff_limit_s=36_000
    )
    with Fetcher(settings_) as fetcher:

        def begin() -> Arrival:
            there = Arrival()
            assert fetcher.hold(source, 0, 8 * KIB, there.set) is None
            return there

        def end(there: Arrival) -> bytes:
            assert there.wait(30)
            held = there.held()
            data = b"".join(held.views)
            held.release()
            return data

        first = begin()

        if others:
            assert not first.wait(1)
            begin()
        with pytest.raises(DeadlineError, match="gone"):
            end(first)
        away.clear()
        assert end(begin()) == source.data


def test_what_its_receiver_did_not_take_is_let_go(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=16 * KIB)
    there = threading.Event()

    def refuse(arrived: object) -> None:
        there.set()
        raise RuntimeError("a reader's fault")

    with Fetcher(FetchSettings(memory_bytes=16 * KIB)) as fetcher:
        assert fetcher.hold(source, 0, 10, refuse) is None
        assert there.wait(10)
        block = fetcher._workers.scheduler.memory.objects[id(source)].blocks[0]
        while block.pins:
            time.sleep(0.01)
        fetcher.read_into(source, 20 * KIB, bytearray(10))
        assert fetcher.memory_bytes == 16 * KIB


# --- decisions -------------------------------------------------------------------------------


@given(st.integers(1, 100), st.floats(0, 1))
def test_waits_have_full_jitter_and_a_limit(failures: int, chance: float) -> None:
    settings_ = FetchSettings(backoff_s=0.2, backoff_limit_s=8.0)
    wait_s = backoff_s(failures, settings_, chance)
    assert 0 <= wait_s <= min(8.0, 0.2 * 2 ** (failures - 1))
    assert wait_s == pytest.approx(chance * backoff_s(failures, settings_, 1.0))


def test_another_replica_is_asked_at_once_and_the_same_one_after_a_wait() -> None:
    def after(tries: int, avoid: str, error: Exception | None = None) -> float | None:
        return next_try_s(
            error or gone(),
            tries=tries,
            replicas=("a", "b"),
            avoid=frozenset(avoid),
            bad=frozenset(avoid),
            settings=FetchSettings(),
            chance=1.0,
        )

    assert after(1, "a") == 0
    assert after(2, "ab") == pytest.approx(0.4)
    assert after(12, "ab") is None
    assert after(1, "a", CorruptDataError("x")) == 0
    assert after(2, "ab", CorruptDataError("x")) is None
    assert after(1, "a", NotFoundError("x")) is None
    limited = StoreUnavailableError("x", retry_after_s=7.0)
    assert after(1, "a", limited) == 0  # another one was not asked to wait
    assert after(2, "ab", limited) == 7.0


def test_priorities_are_ordered() -> None:
    assert Priority.DEMAND < Priority.HOT < Priority.BACKGROUND
