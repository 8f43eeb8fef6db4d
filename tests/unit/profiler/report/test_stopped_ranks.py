"""Ranks that were killed between two phases which the Python API alone recorded: no end is
missing, and no command around them is left open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.profiler.render import summary_sentences
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Report
from tests.support.samples.event_files import EventFile

JOB = """
import sys, bootseer
rank, stop, gate = int(sys.argv[1]), sys.argv[2] == "stop", sys.argv[3]
with bootseer.phase("imports"):
    pass
with bootseer.phase("model.init"):
    pass
if stop:
    open(gate, "w").close()
    sys.stdin.read()
with bootseer.phase("rendezvous", **{"bootseer.wait": True}):
    pass
with bootseer.phase("checkpoint.load"):
    pass
if rank == 0:
    bootseer.event("first_step")
"""


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def halted(report: Report) -> list[tuple[int, str]]:
    return [(p.count, p.detail) for p in report.problems if p.kind == "halted-rank"]


def write_ranks(folder: Path, number: int, killed: set[int], *, barrier: bool, told: int) -> None:
    for rank in range(number):
        file = EventFile("a", rank).span("imports", 0, 10)
        if rank not in killed:
            file.span("rendezvous" if barrier else "model.init", 10, 12, wait=barrier)
            file.span("compile", 12, 20)
            if rank < told:
                file.point("first_step", 20)
        file.write(folder)


@pytest.mark.parametrize(("number", "killed"), [(3, {1}), (8, {6}), (8, {5, 6, 7})])
def test_a_rank_that_never_came_to_a_barrier_did_not_start(
    number: int, killed: set[int], tmp_path: Path
) -> None:
    """Rank 0 alone tells of the first step, so that a missing one says nothing."""
    write_ranks(tmp_path, number, killed, barrier=True, told=1)
    report = report_of(tmp_path)
    assert not report.start.complete
    assert [(u.rank, u.phase, u.inside) for u in report.unreached] == [
        (rank, "imports", False) for rank in sorted(killed)
    ]
    assert "did not reach the first step (last in imports, which ended at 10.0s)" in (
        summary_sentences.verdict(report).headline
    )


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_that_went_no_further_is_named_where_no_barrier_tells(
    told: int, tmp_path: Path
) -> None:
    write_ranks(tmp_path, 8, {6}, barrier=False, told=told)
    report = report_of(tmp_path)
    line = (
        "rank 6 on a was last seen at the end of imports (10.0 s), while others went on to "
        "model.init: killed in between, unless it is not to do that"
    )
    assert halted(report) == [(1, line)]
    assert summary_sentences.verdict(report).advice[0] == f"{line}."


def test_ranks_that_do_less_than_one_other_are_not_named(tmp_path: Path) -> None:
    """Rank 0 of each node loads, and says so; and a phase may take no time at all."""
    for rank in range(4):
        file = EventFile(f"n{rank // 2}", rank).span("imports", 0, 10)
        if rank % 2 == 0:
            file.span("checkpoint.load", 10, 15)
        file.span("model.init", 15, 15 if rank == 1 else 20)
        file.write(tmp_path)
    EventFile("n0", 0).point("first_step", 30).write(tmp_path)
    report = report_of(tmp_path)
    assert (halted(report), report.unreached, report.start.complete) == ([], (), True)


def test_half_of_the_ranks_may_be_of_another_kind(tmp_path: Path) -> None:
    """As where half of them generate what the others train on: a hint, and the start is whole."""
    write_ranks(tmp_path, 8, {4, 5, 6, 7}, barrier=True, told=1)
    report = report_of(tmp_path)
    assert (report.unreached, report.start.complete) == ((), True)
    assert [count for count, _ in halted(report)] == [4]


@pytest.mark.parametrize("barrier", [True, False])
def test_of_two_ranks_the_first_may_tell_what_both_do(barrier: bool, tmp_path: Path) -> None:
    """As Lightning does, whose rank 0 alone prints that all have registered."""
    write_ranks(tmp_path, 2, {1}, barrier=barrier, told=1)
    report = report_of(tmp_path)
    assert (halted(report), report.unreached, report.start.complete) == ([], (), True)


def test_a_rank_that_got_on_elsewhere_did_not_halt(tmp_path: Path) -> None:
    write_ranks(tmp_path, 8, {6}, barrier=True, told=1)
    again = EventFile("b", 6).span("imports", 2, 9).span("rendezvous", 9, 12, wait=True)
    again.span("compile", 12, 20).write(tmp_path)
    report = report_of(tmp_path)
    assert (halted(report), report.unreached, report.start.complete) == ([], (), True)


def test_a_real_rank_that_was_killed_between_two_phases(tmp_path: Path) -> None:
    """Four processes of the Python API, no wrapper; one is killed where it stands still."""
    job, folder, gate = tmp_path / "job.py", tmp_path / "events", tmp_path / "gate"
    job.write_text(JOB)
    os.mkfifo(gate)
    for rank in range(4):
        environment = {
            **os.environ,
            "BOOTSEER_EVENTS": str(folder),
            "BOOTSEER_JOB_UID": "killed",
            "RANK": str(rank),
            "WORLD_SIZE": "4",
        }
        stop = rank == 2
        words = [sys.executable, str(job), str(rank), "stop" if stop else "go", str(gate)]
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as process:
            if stop:
                with open(gate):
                    process.send_signal(signal.SIGKILL)
            process.communicate()
        assert process.returncode == (-signal.SIGKILL if stop else 0)
    report = report_of(folder)
    assert [(u.rank, u.phase, u.inside) for u in report.unreached] == [(2, "model.init", False)]
    assert not report.start.complete
