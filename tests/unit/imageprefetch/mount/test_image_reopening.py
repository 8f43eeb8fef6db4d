"""An image that a server takes over: how often its registry is asked."""

from __future__ import annotations

import statistics
import threading
from typing import Any

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.imageprefetch.mount import image_reopening


class Down:
    """Fault injected: a resolver whose registry is down, and a front whose readers wait."""

    def __init__(self, error: Exception) -> None:
        self.look, self._error = self, error

    def restart(self) -> None: ...

    def give_up(self, deadline_s: float, error: Exception) -> None: ...

    def open(self, *_: str) -> None:
        raise self._error

    def open_kept(self, *_: str) -> None:
        raise self._error


class Ended(threading.Event):
    """Notes waits instead of waiting, and is set after `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.waits_s = most, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits_s.append(timeout)
        if len(self.waits_s) == self.most:
            self.set()
        return self.is_set()


def waits_of(error: Exception, tries: int) -> list[float]:
    down: Any = Down(error)
    ended = Ended(tries)
    what = {"file": down, "deadline_s": 60.0, "ended": ended, "say": lambda *_: None}
    assert image_reopening.reopen_image(down, "digest", "image", **what) is None
    return ended.waits_s


def test_mounts_do_not_ask_all_at_the_same_moments() -> None:
    error = StoreUnavailableError("down")
    many = [waits_of(error, 9) for _ in range(60)]
    for at, waits_s in enumerate(zip(*many, strict=True)):
        most_s = min(image_reopening.MOST_DELAY_S, image_reopening.FIRST_DELAY_S * 2**at)
        assert max(waits_s) <= most_s
        assert max(waits_s) - min(waits_s) > most_s / 2
        assert statistics.mean(waits_s) == pytest.approx(most_s / 2, rel=0.5)


def test_a_registry_is_asked_no_sooner_than_it_said() -> None:
    assert min(waits_of(StoreUnavailableError("busy", retry_after_s=45.0), 4)) == 45.0
