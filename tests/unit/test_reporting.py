"""Faults are reported once a kind, as a log line and as an event."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bootseer import events, reporting
from bootseer.reporting import Once, Reporter
from tests.support.commands.run import named


def test_each_kind_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    with events.open_writer(str(tmp_path), {}) as writer:
        reporter = Reporter(
            "x.fault", said.append, writer=writer, attributes={"bootseer.about": "y"}
        )
        for number in range(3):
            reporter.report("read", f"try {number}")
            reporter.report_failure("sending", OSError("no"))
        reporter.report("write", "another kind", same="read")
        reporter.report("read", "another outage", same="read 2")
    assert said == ["try 0", "sending failed: OSError: no", "another outage"]
    found = named(tmp_path, "x.fault")
    assert [e["status"] for e in found] == ["fallback"] * 3
    assert found[0]["attributes"] == {
        "error.type": "read",
        "error.message": "try 0",
        "bootseer.about": "y",
    }
    assert found[1]["attributes"]["error.type"] == "sending OSError"
    assert found[2]["attributes"]["error.type"] == "read"


@pytest.mark.parametrize("log_first", [False, True])
def test_the_log_line_comes_after_the_event_or_before_it(tmp_path: Path, log_first: bool) -> None:
    written: list[int] = []
    with events.open_writer(str(tmp_path), {}) as writer:
        reporter = Reporter(
            "x.fault",
            lambda _: written.append(len(named(tmp_path, "x.fault"))),
            log_first=log_first,
            writer=writer,
        )
        reporter.report("read", "text")
    assert written == [0 if log_first else 1]
    assert len(named(tmp_path, "x.fault")) == 1


@pytest.mark.parametrize("endless", [False, True])
def test_kinds_without_end_fill_no_memory_and_no_log_but_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, endless: bool
) -> None:
    monkeypatch.setattr(reporting, "MOST_KINDS", 3)
    said: list[str] = []
    reporter = Reporter("x.fault", said.append, endless=endless, writer=events.NullWriter())
    for number in range(9):
        for _ in range(2):
            reporter.report(f"kind {number}", str(number))
    assert said == [str(number) for number in range(9 if endless else 3)]
    assert len(reporter._reported._met_s) == 3


def test_what_was_not_met_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "MOST_KINDS", 3)
    once = Once()
    assert [kind for kind in "abcadab" if once.is_new(kind)] == ["a", "b", "c", "d", "b"]


def test_what_was_not_met_for_long_is_new_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now_s[0])
    once = Once(10.0)
    heard = []
    for now_s[0] in (100.0, 109.0, 118.0, 129.0):
        heard.append(once.is_new(("pull", 1)))
    assert heard == [True, False, False, True]


def test_of_many_threads_one_is_first() -> None:
    once, first = Once(), []
    ready = threading.Barrier(8)

    def meet() -> None:
        ready.wait()
        first.append(once.is_new("kind"))

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(first) == [False] * 7 + [True]
