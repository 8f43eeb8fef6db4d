"""Phases that overlap: what each one took, and what the start would gain without it.

The what-ifs are held against a second computation, on whole seconds and from the definitions in
docs/report.md alone.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import events
from bootseer.profiler.history.collect import record_of
from bootseer.profiler.render import summary_sentences
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import PhaseStats, Report
from tests.support.examples import examples
from tests.support.samples.event_files import EventFile


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def phase(report: Report, name: str) -> PhaseStats:
    return next(p for p in report.phases if p.name == name)


def starts_without(report: Report, change: str = "removed") -> dict[str, float]:
    return {w.name: w.start_s for w in report.what_if if (w.kind, w.change) == ("phase", change)}


def path_of(report: Report) -> list[tuple[str | None, float, float]]:
    return [(s.phase, round(s.begin_s, 6), round(s.end_s, 6)) for s in report.critical_path]


def test_two_threads_as_a_program_writes_them(tmp_path: Path) -> None:
    """Nothing is saved by removing what another thread's phase covers."""
    with events.Writer(str(tmp_path), {"bootseer.rank": 0, "host.name": "a"}, "a" * 32) as writer:

        def install() -> None:
            with writer.phase("deps.install"):
                inside.set()
                done.wait()
                time.sleep(0.02)

        inside, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=install)
        thread.start()
        inside.wait()
        with writer.phase("checkpoint.load"):
            time.sleep(0.05)
        done.set()
        thread.join()
        writer.point("first_step")
    report = report_of(tmp_path)
    whole_s = report.start.duration_s
    without = starts_without(report)
    assert without["checkpoint.load"] == pytest.approx(whole_s)
    assert without["deps.install"] < whole_s
    assert {step.phase for step in report.critical_path} <= {"deps.install", None}
    install_s, load_s = phase(report, "deps.install").p50_s, phase(report, "checkpoint.load").p50_s
    assert install_s is not None
    assert load_s is not None
    assert install_s > load_s >= 0.05


def covered(folder: Path) -> Report:
    """As found: deps.install for 2.0 s, and within it on another thread checkpoint.load."""
    file = EventFile("a", 0, bootseer__gpu__count=1).span("deps.install", 0, 2.0)
    file.span("checkpoint.load", 0.3, 1.8).point("first_step", 2.0).write(folder)
    return report_of(folder)


def test_a_phase_that_another_covers_saves_nothing(tmp_path: Path) -> None:
    report = covered(tmp_path)
    assert starts_without(report) == {
        "checkpoint.load": pytest.approx(2.0),
        "deps.install": pytest.approx(1.5),
    }
    assert path_of(report) == [("deps.install", 0, 2.0)]
    assert phase(report, "deps.install").p50_s == pytest.approx(2.0)
    assert phase(report, "checkpoint.load").p50_s == pytest.approx(1.5)
    said = summary_sentences.verdict(report)
    assert said.path == "Critical path: deps.install 2.00s"
    assert [line.split(".")[0] for line in said.advice] == ["deps"]
    assert "1.5 s, 500 ms less" in said.advice[0]


def test_what_runs_at_once_shares_the_gpu_hours(tmp_path: Path) -> None:
    hours = covered(tmp_path).gpu_hours
    assert hours.total * 3600 == pytest.approx(2.0)
    parts = {p.phase: p.own * 3600 for p in hours.phases}
    assert parts == {
        "deps.install": pytest.approx(0.5 + 0.75),
        "checkpoint.load": pytest.approx(0.75),
    }


def test_a_part_of_a_phase_is_no_overlap(tmp_path: Path) -> None:
    """By its parent, by its name, or by a log, which knows neither threads nor parents."""
    log = {"bootseer__source": "log"}
    file = EventFile("a", 0).span("model.init", 0, 10)
    file.span("checkpoint.load", 2, 8, within=file.last)
    file.span("compile", 3, 5, within=file.last)
    file.span("warmup", 10, 20).span("warmup.step", 11, 19)
    file.span("rendezvous", 20, 30, **log).span("network.check", 21, 29, **log)
    file.point("first_step", 30).write(tmp_path)
    report = report_of(tmp_path)
    assert starts_without(report) == {
        "model.init": pytest.approx(26),
        "checkpoint.load": pytest.approx(26),
        "compile": pytest.approx(28),
        "warmup": pytest.approx(20),
        "rendezvous": pytest.approx(28),
        "network.check": pytest.approx(22),
    }
    assert phase(report, "model.init").p50_s == pytest.approx(4)
    assert phase(report, "warmup.step").p50_s == pytest.approx(8)
    assert phase(report, "warmup").p50_s == pytest.approx(10)


def test_many_lanes_at_once_then_a_barrier(tmp_path: Path) -> None:
    """Image, dependencies and checkpoint at once: each rank waits for its own longest."""
    for rank, (image_s, deps_s, load_s) in enumerate([(10, 20, 15), (10, 12, 30), (11, 13, 14)]):
        file = EventFile(f"n{rank}", rank).span("image.replay", 0, image_s)
        file.span("deps.install", 0, deps_s).span("checkpoint.load", 0, load_s)
        arrived_s = max(image_s, deps_s, load_s)
        file.span("rendezvous", arrived_s, 30, wait=True)
        file.span("compile", 30, 35).point("first_step", 35).write(tmp_path)
    report = report_of(tmp_path)
    assert path_of(report) == [("checkpoint.load", 0, 30), ("compile", 30, 35)]
    without = starts_without(report)
    assert without["checkpoint.load"] == pytest.approx(25)  # rank 0's install holds it then
    assert without["deps.install"] == pytest.approx(35)
    assert without["image.replay"] == pytest.approx(35)
    # Rank 1's checkpoint at the median of 15 s: rank 0's install of 20 s is next.
    assert starts_without(report, "median")["checkpoint.load"] == pytest.approx(25)
    (barrier,) = report.barriers
    assert (barrier.last_rank, barrier.held_by_phase) == (1, "checkpoint.load")


def test_a_slow_node_is_named_by_how_long_its_phase_took(tmp_path: Path) -> None:
    """Whatever else ran at once: another thread neither hides it nor makes it slow."""
    for rank in range(8):
        file = EventFile(f"n{rank}", rank).span("checkpoint.load", 0, 30 if rank == 3 else 10)
        file.span("imports", 5, 6 + 3 * rank).point("first_step", 31).write(tmp_path / "a")
        late_s = 9 * (rank % 2)  # half of them start to load when the install is nearly done
        file = EventFile(f"n{rank}", rank).span("deps.install", 0, 10)
        file.span("checkpoint.load", late_s, late_s + 10).point("first_step", 20)
        file.write(tmp_path / "b")
    slow = report_of(tmp_path / "a").stragglers
    assert [(s.node, s.phase, s.own_s) for s in slow] == [
        ("n3", "checkpoint.load", pytest.approx(30))
    ]
    report = report_of(tmp_path / "b")
    assert report.stragglers == ()
    assert phase(report, "deps.install").max_over_median == pytest.approx(1)


def test_what_outlasts_the_first_step_held_nothing(tmp_path: Path) -> None:
    file = EventFile("a", 0).span("image.fill", 0, 90).span("imports", 0, 10)
    file.span("model.init", 10, 20).point("first_step", 20).write(tmp_path)
    report = report_of(tmp_path)
    assert path_of(report) == [("imports", 0, 10), ("model.init", 10, 20)]
    assert starts_without(report)["image.fill"] == pytest.approx(20)


def test_work_beside_a_wait_is_own_work(tmp_path: Path) -> None:
    """A thread loads while another waits: the node did not only wait, and it arrived."""
    for rank, load_s in enumerate((25, 5)):
        file = EventFile(f"n{rank}", rank).span("checkpoint.load", 0, load_s)
        file.span("rendezvous", 10 + 10 * rank, 20, wait=True)
        file.span("compile", 20, 30).point("first_step", 30).write(tmp_path)
    report = report_of(tmp_path)
    (first, second) = report.nodes
    assert (first.own_s, first.wait_s, first.gap_s) == (pytest.approx(30), 0, 0)
    assert (second.own_s, second.gap_s) == (pytest.approx(15), pytest.approx(15))
    (barrier,) = report.barriers
    assert barrier.last_node == "n1"
    assert phase(report, "rendezvous").wait_max_s == pytest.approx(10)


def test_the_history_keeps_what_a_phase_took(tmp_path: Path) -> None:
    covered(tmp_path)
    (start,) = load([str(tmp_path)]).starts
    kept = {each.phase: each.own_s for each in record_of(start).node_phases}
    assert kept == {"deps.install": pytest.approx(2.0), "checkpoint.load": pytest.approx(1.5)}


def test_a_logs_rank_that_is_no_number_ends_no_report(tmp_path: Path) -> None:
    """As found: one such attribute ended the whole report, "unhashable type: 'list'"."""
    file, about = EventFile("a"), {"bootseer.source": "log", "bootseer.rank": [1]}
    for kind, span, at_s in (("begin", 1, 0), ("begin", 2, 5), ("end", 1, 10), ("end", 2, 15)):
        file.line(kind, span, "ab"[span - 1], at_s, attributes=dict(about))
    file.write(tmp_path)
    assert phase(report_of(tmp_path), "a").p50_s == pytest.approx(10)


def test_parents_that_form_a_circle_end(tmp_path: Path) -> None:
    file = EventFile("a", 0)
    ids = [f"{file.prefix}{number:06x}" for number in (1, 2)]
    file.span("imports", 0, 5, within=ids[1]).span("compile", 1, 4, within=ids[0])
    file.point("first_step", 5).write(tmp_path)
    assert report_of(tmp_path).start.duration_s == pytest.approx(5)


@dataclass(frozen=True)
class Work:
    """A span of a small start, in whole seconds; `above` is the place of its parent."""

    name: str
    begin_s: int
    length_s: int
    above: int | None


@dataclass(frozen=True)
class Process:
    """A rank that arrives at the barrier, goes on when it opens, and ends `after_s` later."""

    works: tuple[Work, ...]
    arrives_s: int
    after_s: int


NAMES = ["deps.install", "checkpoint.load", "model.init", "model.init.weights", "image", "job"]
WORK = st.builds(
    Work,
    st.sampled_from(NAMES),
    st.integers(0, 20),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(0, 3)),
)
PROCESS = st.builds(
    Process, st.lists(WORK, max_size=5).map(tuple), st.integers(0, 8), st.integers(1, 10)
)


def innermost(works: tuple[Work, ...], second: int) -> set[str]:
    """The phases that run in this second, by the definition: those with nothing within them."""
    running = [n for n, w in enumerate(works) if w.begin_s <= second < w.begin_s + w.length_s]
    running = [n for n in running if works[n].name != "job"] or running

    def above(place: int) -> set[int]:
        out: set[int] = set()
        at = works[place].above
        while at is not None and at < place and at not in out:
            out.add(at)
            at, place = works[at].above, at
        return out

    outer = {up for place in running for up in above(place)}
    names = {works[place].name for place in running if place not in outer}
    names = {n for n in names if not any(other.startswith(n + ".") for other in names)}
    return {"model.init" if n.startswith("model.init") else n for n in names}


def end_without(processes: list[Process], latency_s: int, phase_name: str | None) -> int:
    """When the last first step is, had the seconds in which only that phase ran not been."""

    def stays(process: Process, second: int) -> bool:
        return phase_name is None or innermost(process.works, second) != {phase_name}

    opens_s = max(p.arrives_s for p in processes) + latency_s
    arrived = [sum(stays(p, t) for t in range(p.arrives_s)) for p in processes]
    opened = max(arrived) + latency_s
    return max(
        opened + sum(stays(p, t) for t in range(opens_s, opens_s + p.after_s)) for p in processes
    )


@given(processes=st.lists(PROCESS, min_size=2, max_size=3), latency_s=st.integers(0, 2))
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_ifs_are_the_end_without_what_a_phase_did_alone(
    processes: list[Process], latency_s: int
) -> None:
    opens_s = max(p.arrives_s for p in processes) + latency_s
    with tempfile.TemporaryDirectory() as folder:
        for rank, process in enumerate(processes):
            file = EventFile(f"n{rank}", rank).point("hello", 0)
            ids = [f"{file.prefix}{2 + number:06x}" for number in range(len(process.works))]
            for number, work in enumerate(process.works):
                up = work.above
                within = ids[up] if up is not None and up < number else None
                end_s = work.begin_s + work.length_s
                file.span(work.name, work.begin_s, end_s, within=within)
            file.span("rendezvous", process.arrives_s, opens_s, wait=True)
            file.point("first_step", opens_s + process.after_s).write(Path(folder))
        report = report_of(Path(folder))
    assert report.start.duration_s == pytest.approx(end_without(processes, latency_s, None))
    for name, start_s in starts_without(report).items():
        assert start_s == pytest.approx(end_without(processes, latency_s, name)), name
    told = {w.name for w in report.what_if if w.kind == "phase"}
    for name in {"deps.install", "checkpoint.load", "model.init", "image"} - told:
        assert end_without(processes, latency_s, name) == pytest.approx(report.start.duration_s)
    path = report.critical_path
    assert all(a.end_s == pytest.approx(b.begin_s) for a, b in itertools.pairwise(path))
    hours = report.gpu_hours
    assert hours.total == pytest.approx(hours.own + hours.waiting + hours.unobserved)
