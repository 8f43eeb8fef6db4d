"""Leases: one holder, whoever dies, stops or races."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.storage import lease as lease_module
from bootseer.storage.lease import Watch, surely_dead, this_owner, try_acquire
from bootseer.storage.open import open_store
from bootseer.storage.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


HOLD = """
import sys, time
from bootseer.storage.open import open_store
from bootseer.storage.lease import try_acquire
held = try_acquire(open_store(sys.argv[1]), "l", beat_s=0.05, ttl_s=0.5)
print("held" if held else "busy", flush=True)
time.sleep(60)
"""


def holder(store: Store) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, store.url], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let us seem to be another host, so that only the beat can be judged."""
    there = this_owner()
    monkeypatch.setattr(
        lease_module, "this_owner", lambda: type(there)("other", "other", "x", 1, 1)
    )


def take(store: Store, watch: Watch) -> lease_module.Lease:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = try_acquire(store, "l", watch, beat_s=0.05, ttl_s=0.5)
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("the lease never became free")


def test_one_holder_at_a_time_and_release(store: Store) -> None:
    with try_acquire(store, "l") as first:  # type: ignore[union-attr]
        assert try_acquire(store, "l") is None
        assert first.generation == 1
    with try_acquire(store, "l") as second:  # type: ignore[union-attr]
        assert second.generation == 2
    second.close()


def test_watchers_read_the_note_and_the_time_held(store: Store) -> None:
    with try_acquire(store, "l", info={"a": 1}) as held:  # type: ignore[union-attr]
        held.note(b=2)
        held.renew()
        seen, free = Watch(store, "l").look()
        assert not free
        assert seen is not None
        assert seen.info == {"a": 1, "b": 2}
        assert seen.held_s > 0


def test_killed_holder_on_this_machine_is_dead_at_once(store: Store) -> None:
    child = holder(store)
    try:
        assert try_acquire(store, "l") is None
    finally:
        end(child)
    with try_acquire(store, "l") as mine:  # type: ignore[union-attr]
        assert mine.generation == 2


def test_killed_holder_elsewhere_expires(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    end(holder(store))
    elsewhere(monkeypatch)
    watch = Watch(store, "l", ttl_s=0.5)
    assert try_acquire(store, "l", watch) is None
    take(store, watch).close()


def test_stopped_holder_is_broken_and_learns_it(store: Store) -> None:
    child = holder(store)
    try:
        child.send_signal(signal.SIGSTOP)
        mine = take(store, Watch(store, "l", ttl_s=0.5))
        child.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # several beats of the woken one
        assert not mine.lost
        mine.renew()
        assert not mine.lost
        assert try_acquire(store, "l") is None
        mine.close()
    finally:
        end(child)


def test_living_holder_is_never_broken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held = try_acquire(store, "l", beat_s=0.05, ttl_s=0.5)
    assert held is not None
    elsewhere(monkeypatch)
    watch = Watch(store, "l", ttl_s=0.5)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert try_acquire(store, "l", watch) is None
        time.sleep(0.02)
    held.close()


def test_broken_lease_becomes_lost(store: Store) -> None:
    held = try_acquire(store, "l", beat_s=60)
    assert held is not None
    held.pause()
    other = take(store, Watch(store, "l", ttl_s=0.0))
    held.renew()
    assert held.lost
    held.close()
    seen, _ = Watch(store, "l").look()
    assert seen is not None
    assert (seen.generation, seen.released) == (2, False)
    other.close()


def test_no_clock_of_another_host_matters(store: Store) -> None:
    """Only a change of the beat counts, at our own pace, whatever the file's time says."""
    held = try_acquire(store, "l", beat_s=60)
    assert held is not None
    now = [0.0]
    watch = Watch(store, "l", ttl_s=10, clock=lambda: now[0])
    path = store.local_path("l/00000001.json")
    assert path is not None
    os.utime(path, (1, 1))
    assert not watch.look()[1]
    now[0] = 9.9
    assert not watch.look()[1]
    held.renew()
    now[0] = 15.0
    assert not watch.look()[1]
    now[0] = 25.0
    assert watch.look()[1]
    held.close()


def test_of_racing_breakers_one_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    end(holder(store))
    for generation in range(2, 12):
        won = []
        start = threading.Barrier(6)

        def race(go: threading.Barrier = start, out: list[object] = won) -> None:
            watch = Watch(store, "l", ttl_s=0.0)
            go.wait()
            found = try_acquire(store, "l", watch, beat_s=60)
            if found is not None:
                out.append(found)

        # Every racer believes the present holder dead, the newest one too: a race of breakers
        # that saw it before it changed hands may still leave one holder a generation.
        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        generations = sorted(held.generation for held in won)  # type: ignore[attr-defined]
        assert len(set(generations)) == len(generations)
        assert lease_module.highest(store, "l") >= generation
        for held in won:
            held.pause()  # type: ignore[attr-defined]


def test_slow_breaker_cannot_break_a_newer_lease(store: Store) -> None:
    """It saw generation 1 dead; meanwhile 2 came and went, and 3 is held."""
    end(holder(store))
    slow = Watch(store, "l")
    assert slow.look()[1]
    with try_acquire(store, "l"):  # type: ignore[union-attr]
        pass
    third = try_acquire(store, "l")
    assert third is not None
    assert third.generation == 3
    assert try_acquire(store, "l", slow) is None
    third.close()


def test_a_generation_that_came_and_went_is_not_taken_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A breaker slept before it created generation 2; meanwhile 2 was broken and removed."""
    end(holder(store))
    real = store.create

    def create(name: str, data: bytes, **more: bool) -> bool:
        monkeypatch.setattr(store, "create", real)
        for _ in range(2, 5):
            with try_acquire(store, "l"):  # type: ignore[union-attr]
                pass
        assert sorted(found.name for found in store.list("l"))[0] > name
        return real(name, data, **more)

    monkeypatch.setattr(store, "create", create)
    assert try_acquire(store, "l") is None
    names = sorted(found.name for found in store.list("l"))
    assert names == ["l/00000003.json", "l/00000004.json"]


@pytest.mark.parametrize("fails", ["list", "delete"])
def test_a_lease_whose_taking_fails_half_way_is_free_at_once(
    fails: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake fault: the store fails at the look, or the clearing, that follows the creation."""
    for _ in range(3):  # so that there is something to clear
        with try_acquire(store, "l"):  # type: ignore[union-attr]
            pass
    real, struck = store.create, []

    def fail(*_: object) -> None:
        struck.append(fails)
        raise StoreUnavailableError("injected")

    def create(name: str, data: bytes, **more: bool) -> bool:
        done = real(name, data, **more)
        monkeypatch.setattr(store, fails, fail)
        return done

    monkeypatch.setattr(store, "create", create)
    with pytest.raises(StoreUnavailableError):
        try_acquire(store, "l", ttl_s=3600)
    assert struck == [fails]
    monkeypatch.undo()
    held, free = Watch(store, "l", ttl_s=3600).look()
    assert held is not None
    assert (held.generation, free) == (4, True)
    with try_acquire(store, "l", ttl_s=3600) as lease:  # type: ignore[union-attr]
        assert lease.generation == 5


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe", b"[" * 50_000, b"x" * 100_000],
)
def test_damaged_lease_expires_by_the_clock(store: Store, content: bytes) -> None:
    store.create("l/00000001.json", content)
    now = [0.0]
    watch = Watch(store, "l", ttl_s=5, clock=lambda: now[0])
    assert watch.look() == (None, False)
    now[0] = 5.0
    assert watch.look() == (None, True)


def test_wrong_types_in_a_lease(store: Store) -> None:
    owner = {"host": 1, "boot_id": [], "pid_namespace": None, "pid": "x", "started_ticks": {}}
    body = {"token": 5, "beat": "1", "released": 0, "held_s": "x", "owner": owner, "info": []}
    store.create("l/00000001.json", json.dumps(body).encode())
    assert Watch(store, "l").look() == (None, False)


def test_owner_without_proc_is_never_called_dead() -> None:
    me = this_owner()
    assert not surely_dead(me)
    assert surely_dead(type(me)(me.host, me.boot_id, me.pid_namespace, me.pid, 1))
    assert not surely_dead(type(me)(me.host, "", me.pid_namespace, me.pid, 1))
    assert not surely_dead(type(me)(me.host, "other", me.pid_namespace, me.pid, 1))


def test_store_that_vanishes_makes_the_lease_lost(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    held = try_acquire(store, "l", beat_s=60, ttl_s=0.0)
    assert held is not None
    (tmp_path / "s").rename(tmp_path / "gone")
    (tmp_path / "s").write_text("no folder")
    held.renew()
    assert held.lost
    held.close()


def test_nothing_of_a_lease_waits_for_a_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "fsync", asked.append)
    held = try_acquire(store, "l")
    assert held is not None
    held.renew()
    held.close()
    assert asked == []
    store.create("lasting", b"x")
    store.replace("lasting", b"y")
    assert len(asked) == 4  # each file, and each name
