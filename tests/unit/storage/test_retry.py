"""Waiting for a store that is away: who waits is told."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.storage import retry


@pytest.fixture(autouse=True)
def told_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_reported_s", -math.inf)


def away(tries: int) -> Callable[[], str]:
    """A call that finds its store only after so many tries."""
    left = [tries]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise StoreUnavailableError("cannot list it: nobody answers")
        return "found"

    return call


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == retry.__name__]


@pytest.mark.parametrize(
    ("failures", "most_s"), [(1, 0.1), (2, 0.2), (6, 3.2), (7, 5.0), (10**6, 5.0)]
)
def test_waits_double_up_to_a_limit_with_full_jitter(failures: int, most_s: float) -> None:
    assert retry.backoff_s(failures, chance=1.0) == pytest.approx(most_s)
    assert retry.backoff_s(failures, chance=0.25) == pytest.approx(most_s / 4)
    waits_s = [retry.backoff_s(failures) for _ in range(200)]
    assert min(waits_s) < most_s / 4
    assert most_s * 3 / 4 < max(waits_s) <= most_s


def test_a_server_is_asked_no_sooner_than_it_said() -> None:
    busy = StoreUnavailableError("wait", retry_after_s=7.0)
    assert retry.backoff_s(1, error=busy) == 7.0
    assert retry.backoff_s(9, first_s=1.0, most_s=60.0, error=busy, chance=1.0) == 60.0
    assert retry.backoff_s(1, error=ValueError("no word of that"), chance=0.0) == 0.0


def test_a_long_wait_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "REPORT_AFTER_S", 0.0)
    for _ in range(2):
        assert retry.retry_call(away(3), retry_s=20.5) == "found"
    (told,) = said(caplog)
    said_s = told.removeprefix("bootseer: cannot list it: nobody answers; asking again for up to ")
    assert said_s in ("20 s (try 2)", "21 s (try 2)")
    assert caplog.records[0].levelno == logging.WARNING


def test_it_is_told_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(retry, "REPORT_AGAIN_S", 0.0)
    assert retry.retry_call(away(3), retry_s=20) == "found"
    assert [line.partition("(")[2] for line in said(caplog)] == ["try 2)", "try 3)", "try 4)"]


def test_who_listens_hears_of_each_try_that_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, int, float]] = []
    monkeypatch.setattr(retry, "wait_listener", lambda *told: heard.append(told))
    assert retry.retry_call(away(2), retry_s=20) == "found"
    assert [told[:2] for told in heard] == [("cannot list it: nobody answers", n) for n in (1, 2)]
    assert all(15 < left_s <= 20 for _, _, left_s in heard)
    with pytest.raises(StoreUnavailableError):
        retry.retry_call(away(1), retry_s=0.0)
    assert len(heard) == 2  # its caller hears of the last one


def test_a_short_wait_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert retry.retry_call(away(2), retry_s=20) == "found"
    assert said(caplog) == []


def test_a_wait_that_ends_in_an_error_says_only_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "REPORT_AFTER_S", 0.0)
    with pytest.raises(StoreUnavailableError):
        retry.retry_call(away(99), retry_s=0.0)
    assert said(caplog) == []
