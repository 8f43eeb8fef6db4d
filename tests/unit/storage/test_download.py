"""A whole object by parallel ranges; a slow or hanging store is given up where that pays."""

from __future__ import annotations

import collections
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessDeniedError, DeadlineError, StoreUnavailableError
from bootseer.storage.download import Patience, download
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import PreferredReads, Stat

CONTENT = os.urandom(1 << 20)


class Store:
    """Fault injection: an object of which everything from `good_bytes` on is `hung` or `slow`."""

    preferred = PreferredReads(range_bytes=64 << 10, streams=4)

    def __init__(self, good_bytes: int, *, slow_s: float = 0.0) -> None:
        self.good_bytes, self.slow_s = good_bytes, slow_s
        self.struck = threading.Event()
        self.cancelled = 0

    def stat(self, _name: str) -> Stat:
        return Stat("name", len(CONTENT), 0.0, is_folder=False)

    def read_scatter(
        self, _name: str, offset: int, views: list[memoryview], attempt: Attempt
    ) -> None:
        (view,) = views
        if offset >= self.good_bytes:
            self.struck.set()
            broken = threading.Event()
            attempt.on_cancel(broken.set)
            if broken.wait(self.slow_s or 60):
                self.cancelled += 1
                raise StoreUnavailableError("the connection was broken")
        view[:] = CONTENT[offset : offset + len(view)]
        attempt.received_bytes = len(view)


def fetch(store: Any, path: Path, patience: Patience | None = None) -> None:
    download(store, "name", str(path), patience)


def test_what_arrives_is_the_object(tmp_path: Path) -> None:
    for number, patience in enumerate((None, Patience(limit_s=5, worth_s=0))):
        path = tmp_path / str(number)
        fetch(Store(len(CONTENT)), path, patience)
        assert path.read_bytes() == CONTENT


def test_a_hanging_store_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store(700_000)
    with pytest.raises(DeadlineError, match="nothing for the last") as told:
        fetch(store, tmp_path / "a", Patience(limit_s=0.5, worth_s=30))
    assert store.struck.is_set()
    assert "longer than the plain way (30 s)" in str(told.value)
    assert store.cancelled == 4
    assert not (tmp_path / "a").exists()
    assert not [t for t in threading.enumerate() if t.name == "download"]


def test_a_store_that_went_slow_is_given_up(tmp_path: Path) -> None:
    store = Store(100_000, slow_s=0.3)
    with pytest.raises(DeadlineError, match=r"the store gave \d of 1 MB, and .* in the last"):
        fetch(store, tmp_path / "a", Patience(limit_s=0.4, worth_s=0.8))
    assert store.struck.is_set()


def test_a_slow_store_that_is_still_the_faster_way_is_waited_for(tmp_path: Path) -> None:
    store = Store(0, slow_s=0.2)
    fetch(store, tmp_path / "a", Patience(limit_s=0.3, worth_s=60))
    assert store.struck.is_set()
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_the_first_error_ends_the_other_ranges(tmp_path: Path) -> None:
    class Broken(Store):
        def read_scatter(
            self, name: str, offset: int, views: list[memoryview], attempt: Attempt
        ) -> None:
            if not offset:
                assert self.struck.wait(30)
                raise AccessDeniedError("not yours")
            super().read_scatter(name, offset, views, attempt)

    store = Broken(64 << 10)
    with pytest.raises(AccessDeniedError, match="not yours"):
        fetch(store, tmp_path / "a")
    assert store.cancelled
    assert not (tmp_path / "a").exists()


def samples(*pairs: tuple[float, int]) -> collections.deque[tuple[float, int]]:
    return collections.deque(pairs)


def test_what_is_worth_waiting_for() -> None:
    patience = Patience(limit_s=5, worth_s=60)
    assert not patience.judge(100, samples((0.0, 0), (4.9, 0))), "too early to tell"
    assert patience.judge(100, samples((0.0, 0), (5.0, 0)))
    assert not patience.judge(100, samples((0.0, 0), (5.0, 10))), "50 s in all"
    assert patience.judge(100, samples((0.0, 0), (5.0, 8))), "62 s in all"
    assert patience.judge(100, samples((20.0, 90), (25.0, 90))), "it hangs now"
    assert not patience.judge(100, samples((20.0, 90), (25.0, 95)))
    assert patience.judge(100, samples((20.0, 90), (25.0, 80))), "a try that failed brought nothing"
