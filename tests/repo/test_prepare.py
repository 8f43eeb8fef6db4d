"""Set-up makes in advance what tests need, goes on after a failure, and says so in the end."""

from __future__ import annotations

import threading

import pytest

from bootseer.errors import NotSupportedError
from tools import prepare
from tools.prepare import Part, make_all


def test_a_failure_is_told_and_does_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    made = []

    def fail() -> None:
        raise NotSupportedError("no mirror")

    parts = [Part("jars", fail), Part("images", lambda: made.append("images"))]
    assert make_all([parts]) == ["jars: no mirror"]
    assert made == ["images"]


def test_downloads_and_builds_run_side_by_side() -> None:
    both = threading.Barrier(2)
    rows = [[Part(name, lambda: both.wait(60))] for name in ("download", "build")]
    assert make_all(rows) == []


def test_the_image_that_a_test_asks_for_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """debootstrap takes a minute: more than a test has on a slow day, and the network besides."""
    made: list[str] = []
    monkeypatch.setattr(prepare.real, "image", made.append)
    for part in prepare.DOWNLOADS:
        if "real image" in part.name:
            part.make()
    assert made == ["debian"]
