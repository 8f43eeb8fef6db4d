"""A wall clock that was set forward under writers that know no other clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli.report.import_ import k8s_command
from bootseer.profiler.render import summary_sentences
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import wall_clock
from bootseer.profiler.report.load.identity import identity_of
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import Report
from tests.support.samples.event_files import EventFile

STEP_S = 3600.0


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def unconfirmed(report: Report) -> list[str]:
    return [p.detail for p in report.problems if p.kind == "wall-clock-alone"]


def write_without_monotonic(file: EventFile, folder: Path) -> None:
    events = [{**json.loads(line), "mono_nano": None} for line in file.lines]
    file.lines = [json.dumps(event) + "\n" for event in events]
    file.write(folder)


def write_stepped(folder: Path, node: str, rank: int, source: str, *, inside: bool = True) -> None:
    """The clock is set while the model is made, or else between that and the imports."""
    file = EventFile(node, rank)
    about: dict[str, object] = {"bootseer.source": source}
    file.line("begin", 1, "imports", 0, "ok", about)
    file.line("end", 1, "imports", 10, "ok", about)
    file.ahead_s = 0.0 if inside else STEP_S
    file.line("begin", 2, "model.init", 10, "ok", about)
    file.ahead_s = STEP_S
    file.line("end", 2, "model.init", 20, "ok", about)
    file.line("point", 3, "first_step", 30, "ok", about)
    write_without_monotonic(file, folder)


@pytest.mark.parametrize("source", ["phase", "log", "k8s"])
def test_an_hour_that_a_wall_clock_alone_measured_is_said(source: str, tmp_path: Path) -> None:
    write_stepped(tmp_path, "a", 0, source)
    report = report_of(tmp_path)
    (line,) = unconfirmed(report)
    assert line == (
        "3,610 s of rank 0 on a in model.init, from 10.0 s on, were measured by its wall clock "
        "alone, and nothing else was seen of the start meanwhile: if that clock was set forward, "
        "these seconds never passed"
    )
    assert summary_sentences.verdict(report).advice[0] == f"{line}."


def test_one_between_two_phases_is_said_too(tmp_path: Path) -> None:
    write_stepped(tmp_path, "a", 0, "phase", inside=False)
    (line,) = unconfirmed(report_of(tmp_path))
    assert line.startswith("3,600 s of rank 0 on a between two phases, from 10.0 s on")


def test_other_nodes_that_had_long_started_do_not_confirm_it(tmp_path: Path) -> None:
    for rank in range(3):
        file = EventFile(f"n{rank}", rank).span("imports", 0, 10).span("model.init", 10, 20)
        file.point("first_step", 30).write(tmp_path)
    write_stepped(tmp_path, "n3", 3, "log")
    (line,) = unconfirmed(report_of(tmp_path))
    assert line.startswith("3,590 s of rank 3 on n3 in model.init, from 30.0 s on")


def test_an_hour_that_another_clock_counted_is_an_hour(tmp_path: Path) -> None:
    """A process with a monotonic clock was there before and after, or something was seen."""
    write_stepped(tmp_path / "1", "a", 0, "log")
    EventFile("b", 1).span("imports", 0, 3000).point("first_step", 3700).write(tmp_path / "1")
    assert unconfirmed(report_of(tmp_path / "1")) == []
    write_stepped(tmp_path / "2", "a", 0, "log")
    for at_s in range(0, 3600, 600):
        EventFile("b", 1 + at_s).span("imports", at_s, at_s + 1).write(tmp_path / "2")
    assert unconfirmed(report_of(tmp_path / "2")) == []


def test_an_hour_of_waiting_and_one_after_the_first_step_are_nothing(tmp_path: Path) -> None:
    about: dict[str, object] = {"bootseer.source": "k8s", "bootseer.wait": True}
    file = EventFile("a", 0)
    file.line("begin", 1, "queue", 0, "ok", about)
    file.line("end", 1, "queue", 4000, "ok", about)
    file.line("point", 2, "first_step", 4010)
    file.line("point", 3, "checkpoint", 9000)
    write_without_monotonic(file, tmp_path)
    assert unconfirmed(report_of(tmp_path)) == []


def test_an_hour_in_which_one_pod_waited_is_none_that_another_worked(tmp_path: Path) -> None:
    """Of the other pod the cluster's records tell the container's start, and its end far later."""
    about: dict[str, object] = {"bootseer.source": "k8s"}
    placed = EventFile("a", None)
    placed.line("begin", 1, "container.start", 0, "ok", about)
    placed.line("end", 1, "container.start", 1, "ok", about)
    placed.line("point", 2, "container.exit", 9000, "error", about)
    write_without_monotonic(placed, tmp_path)
    queued = EventFile("b", 0)
    queued.line("begin", 1, "queue", 0, "ok", {**about, "bootseer.wait": True})
    queued.line("end", 1, "queue", 4000, "ok", about)
    queued.line("point", 2, "first_step", 4010, "ok")
    write_without_monotonic(queued, tmp_path)
    assert unconfirmed(report_of(tmp_path)) == []


def test_a_pull_that_kubelet_says_the_length_of_is_no_wall_clocks(tmp_path: Path) -> None:
    at = "2026-03-01T10:{}Z"
    pod = {
        "kind": "Pod",
        "metadata": {"name": "p", "uid": "u", "creationTimestamp": at.format("00:00")},
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}]},
        "status": {"containerStatuses": [{"name": "c", "state": {}}]},
    }
    said = {
        ("00:01", "Scheduled"): "placed",
        ("00:02", "Pulling"): 'Pulling image "big"',
        ("45:02", "Pulled"): 'Successfully pulled image "big" in 45m0s (45m0s including waiting)',
        ("45:03", "Started"): "Started container c",
    }
    events = [
        {
            "kind": "Event",
            "metadata": {"name": reason, "creationTimestamp": at.format(when)},
            "involvedObject": {"kind": "Pod", "uid": "u", "fieldPath": "spec.containers{c}"},
            "reason": reason,
            "message": message,
            "firstTimestamp": at.format(when),
        }
        for (when, reason), message in said.items()
    ]
    records, folder = tmp_path / "cluster.json", tmp_path / "events"
    records.write_text(json.dumps({"kind": "List", "items": [pod, *events]}))
    result = CliRunner().invoke(k8s_command, [str(records), "--events", str(folder)])
    assert result.exit_code == 0, result.output
    report = report_of(folder)
    assert report.start.duration_s > 2700
    assert unconfirmed(report) == []


def test_the_phase_is_told_by_whoever_was_in_one(tmp_path: Path) -> None:
    about: dict[str, object] = {"bootseer.source": "k8s"}
    pod = EventFile("a", None)
    pod.line("begin", 1, "container.start", -2, "ok", about)
    pod.line("end", 1, "container.start", -1, "ok", about)
    pod.line("point", 2, "container.exit", 9000, "error", about)
    write_without_monotonic(pod, tmp_path)
    write_stepped(tmp_path, "a", 0, "log")
    (line,) = unconfirmed(report_of(tmp_path))
    assert line.startswith("3,610 s of rank 0 on a in model.init")


HOURS = 5 * wall_clock.LEAST_NS
MOMENTS = st.none() | st.integers(-HOURS, HOURS)


@given(
    st.lists(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=4), max_size=4),
    st.lists(st.integers(-HOURS, HOURS), min_size=4, max_size=4),
    st.integers(-HOURS, HOURS),
)
def test_silences_are_the_gaps_between_moments_in_their_order(
    times: list[list[tuple[int | None, int | None]]], shifts: list[int], end_ns: int
) -> None:
    who = identity_of({}, "a-1-2.jsonl")
    plain = (False, "ok", False, None, None, None)
    sources = tuple(
        Source("a", who, tuple(Span("x", begin, end, *plain) for begin, end in each), 0, 0)
        for each in times
    )
    shifts = shifts[: len(sources)]
    every = sorted(
        moment + shift
        for each, shift in zip(times, shifts, strict=True)
        for pair in each
        for moment in pair
        if moment is not None and moment + shift <= end_ns
    )
    gaps = [(low, high) for low, high in pairwise(every) if high - low >= wall_clock.LEAST_NS]
    assert wall_clock._find_silences(Start("t", sources), shifts, end_ns) == gaps
