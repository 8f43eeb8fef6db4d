"""Requests that hang are doubled, by another replica, and the late loser spoils nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, Priority
from bootseer.blocks.fetch.replica_choice import choose_replica
from bootseer.blocks.fetch.retry_policy import hedge_after_s
from tests.support.faulty_store import Fault, FaultyStore, Request
from tests.support.samples.fetch_sources import Arrival, Source, fetch_threads, noise

KIB = 1 << 10
NONE: frozenset[str] = frozenset()
QUICK = FetchSettings(connections=4, hedge_s=0.05, hedge_limit_s=0.2, least_range_bytes=4 * KIB)


def hanging(source: Source, bad: str = "bad", after: int = 0) -> FaultyStore:
    """Requests to the replica `bad` hang after so many blocks; cancelled ones still write."""

    def decide(request: Request) -> Fault | None:
        return Fault(after=after, hang=True) if request.attempt.replica == bad else None

    source.store = store = FaultyStore(source.store, decide, replicas=("bad", "good", "fine"))
    return store


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_hung_replica_stalls_nobody_for_ever(tmp_path: Path, packed: bool, after: int) -> None:
    """The first request's loser scribbles over its memory when it is cancelled."""
    places = ("bad", "good", "fine")
    source = Source(tmp_path, noise(200_000), block_bytes=8 * KIB, packed=packed, places=places)
    hanging(source, after=after)
    with Fetcher(QUICK) as fetcher:
        for offset, length in [(0, 200_000), (100, 50_000), (77_777, 3)]:
            buffer = bytearray(length)
            assert fetcher.read_into(source, offset, buffer) == length
            assert buffer == source.data[offset : offset + length]
    assert fetcher.stats.total().hedge_wins > 0
    assert fetch_threads() == []


def test_who_has_asked_nobody_yet_is_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its double could ask the very server that it will ask itself, and hang with it."""
    places = ("bad", "good", "fine")
    source = Source(tmp_path, noise(64 * KIB), block_bytes=64 * KIB, places=places)
    hanging(source, bad="nobody")
    told, asked = threading.Event(), []
    real = source.replicas

    def replicas(part: str, offset: int) -> tuple[str, ...]:
        asked.append(offset)  # by each request, before its server is chosen
        assert told.wait(30)
        return real(part, offset)

    monkeypatch.setattr(source, "replicas", replicas)
    with Fetcher(QUICK) as fetcher:
        there = Arrival()
        assert fetcher.hold(source, 0, KIB, there.set) is None
        assert not there.wait(20 * QUICK.hedge_s)
        assert asked == [0]
        told.set()
        assert there.wait(30)


def test_held_bytes_survive_the_loser(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(64 * KIB), block_bytes=16 * KIB, places=("bad", "good"))
    hanging(source)
    with Fetcher(QUICK) as fetcher:
        for number in range(4):
            there = Arrival()
            held = fetcher.hold(source, number * 16 * KIB, 16 * KIB, there.set)
            if held is None:
                assert there.wait(10)
                held = there.held()
            assert b"".join(held.views) == source.data[number * 16 * KIB :][: 16 * KIB]
            held.release()


def test_a_suspect_is_passed_over_afterwards(tmp_path: Path) -> None:
    places = ("bad", "good", "fine")
    source = Source(tmp_path, noise(64 * KIB), block_bytes=KIB, places=places)
    store = hanging(source)
    with Fetcher(QUICK) as fetcher:
        while not any(r.attempt.replica == "bad" for r in store.requests):
            fetcher.read_into(source, 0, bytearray(KIB))
            fetcher.forget(source)
        before = len(store.requests)
        for number in range(1, 30):
            fetcher.read_into(source, number * KIB, bytearray(KIB))
    later = [request.attempt.replica for request in store.requests[before + 1 :]]
    assert "bad" not in later
    assert {"good", "fine"} <= set(later)


def test_a_reader_who_joins_a_hung_prefetch_gets_it_hedged(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB, places=("bad", "good"))
    store = FaultyStore(
        source.store,
        lambda request: Fault(hang=True) if request.number == 0 else None,
        replicas=("bad", "good"),
    )
    source.store = store
    with Fetcher(QUICK) as fetcher:
        ticket = fetcher.prefetch(source, 0, 8 * KIB, Priority.HOT)
        assert not ticket.wait(0.3)  # nobody waits for it: it is not doubled
        assert len(store.requests) == 1
        buffer = bytearray(8 * KIB)
        fetcher.read_into(source, 0, buffer)
        assert buffer == source.data
        assert ticket.wait(10)
    replicas = [request.attempt.replica for request in store.requests]
    assert len(set(replicas)) == 2


def test_hedging_can_be_switched_off(tmp_path: Path) -> None:
    source = Source(tmp_path, noise(8 * KIB), block_bytes=8 * KIB)
    released = threading.Event()

    def late(request: Request) -> Fault | None:
        released.wait()
        return None

    source.store = store = FaultyStore(source.store, late)
    with Fetcher(FetchSettings(hedge_s=0)) as fetcher:
        reader = threading.Thread(target=fetcher.read_into, args=(source, 0, bytearray(8 * KIB)))
        reader.start()
        reader.join(0.4)
        assert len(store.requests) == 1
        released.set()
        reader.join()


# --- decisions -------------------------------------------------------------------------------


def test_the_least_busy_replica_is_chosen_in_turn() -> None:
    names = ("a", "b", "c")

    def choose(turn: int = 0, avoid: str = "", suspects: str = "", **load: int) -> str:
        return choose_replica(
            names, avoid=frozenset(avoid), suspects=frozenset(suspects), load=load, turn=turn
        )

    assert [choose(turn) for turn in range(4)] == ["a", "b", "c", "a"]
    assert choose(a=2, b=1, c=2) == "b"
    assert choose(avoid="b", a=2, b=0, c=3) == "a"
    assert choose(suspects="a", a=0, b=5, c=4) == "c"
    assert choose(avoid="ab", suspects="c") == "c"  # a suspect rather than one that failed
    assert choose(avoid="abc") in names
    assert choose_replica((), avoid=NONE, suspects=NONE, load={}, turn=5) == ""


def test_the_time_to_a_hedge_follows_what_is_usual() -> None:
    settings = FetchSettings(hedge_s=1.0, hedge_limit_s=2.5)
    assert hedge_after_s([], settings) == 1.0
    assert hedge_after_s([0.01] * 9, settings) == 1.0
    assert hedge_after_s([0.5] * 9 + [9.0], settings) == 1.5
    assert hedge_after_s([2.0] * 9, settings) == 2.5
