"""The report's figures, on starts small enough to know the answers by hand."""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from bootseer.errors import NotFoundError
from bootseer.profiler.render import html, summary_sentences, terminal
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import PhaseStats, Report
from tests.support.examples import examples
from tests.support.samples.event_files import TRACE, EventFile, two_nodes


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def phase(report: Report, name: str) -> PhaseStats:
    return next(p for p in report.phases if p.name == name)


def path_of(report: Report) -> list[tuple[str, str | None, float, float]]:
    return [(s.node, s.phase, round(s.begin_s, 6), round(s.end_s, 6)) for s in report.critical_path]


def test_clocks_that_no_barrier_compares_are_said_to_be_raw(tmp_path: Path) -> None:
    for rank in range(2):
        one = EventFile(f"n{rank}", rank, ahead_s=10.0 * rank).span("imports", 0, 2)
        one.point("first_step", 3).write(tmp_path)
    report = report_of(tmp_path)
    assert report.skew.reference is None
    stream = io.StringIO()
    terminal.render(report, Console(file=stream, width=200))
    assert "no barrier to compare them at" in stream.getvalue()


def waiting_ranks(folder: Path, size: int, missing: int, late: EventFile | None) -> Report:
    for rank in range(size):
        if rank != missing:
            one = EventFile(f"n{rank}", rank, bootseer__world_size=size)
            one.span("image.pull", 0, 20 + rank % 3).span("rendezvous", 25, None, wait=True)
            one.write(folder)
    if late is not None:
        late.write(folder)
    return report_of(folder)


def test_a_rank_that_all_others_wait_for_is_the_finding(tmp_path: Path) -> None:
    late = EventFile("n5", 5, bootseer__world_size=8).span("image.pull", 0, 21)
    report = waiting_ranks(tmp_path, 8, 5, late)
    found = summary_sentences.verdict(report)
    assert "7 ranks are still in rendezvous; for rank 5 on n5 (last in image.pull" in found.headline
    assert found.advice[0].startswith("rank 5 on n5, last in image.pull")
    assert report.what_if == ()
    assert report.problems == ()


def test_a_rank_that_wrote_nothing_is_missed_by_the_world_size(tmp_path: Path) -> None:
    report = waiting_ranks(tmp_path, 8, 5, None)
    assert [(p.kind, p.count) for p in report.problems] == [("missing-rank", 1)]
    found = summary_sentences.verdict(report)
    assert "7 ranks are still in rendezvous; rank 5 of 8 wrote no events" in found.headline
    assert found.advice == ("rank 5 of 8 wrote no events.",)


def test_two_nodes_and_a_barrier(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    report = report_of(tmp_path)
    assert report.start.duration_s == pytest.approx(50)
    assert (report.start.nodes, report.start.ranks, report.start.gpus) == (2, 2, 2)
    assert report.start.complete
    assert path_of(report) == [
        ("b", "imports", 0, 30),
        ("a", "model.init", 30, 35),
        ("a", "compile", 35, 50),
    ]
    assert [s.barrier for s in report.critical_path] == ["rendezvous", None, None]
    (barrier,) = report.barriers
    assert (barrier.last_node, barrier.held_by_phase) == ("b", "imports")
    assert barrier.exit_s == pytest.approx(30)
    assert barrier.held_s == pytest.approx(10)  # last arrival 30, median of 10 and 30 is 20
    assert barrier.waited_s == pytest.approx(20)
    imports = phase(report, "imports")
    assert (imports.p50_s, imports.max_s) == (pytest.approx(20), pytest.approx(30))
    assert imports.max_over_median == pytest.approx(1.5)
    assert imports.p90_s == pytest.approx(28)
    waited = phase(report, "rendezvous")
    assert waited.p50_s is None
    assert waited.wait_max_s == pytest.approx(20)


def test_gpu_hours(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    hours = report_of(tmp_path).gpu_hours
    # a: own 10 + 5 + 15, waiting 20; b: own 30 + 10, unobserved 40..42
    assert hours.own * 3600 == pytest.approx(30 + 40)
    assert hours.waiting * 3600 == pytest.approx(20)
    assert hours.unobserved * 3600 == pytest.approx(2)
    assert hours.total == pytest.approx(hours.own + hours.waiting + hours.unobserved)
    assert not hours.gpus_assumed
    parts = {p.phase: (p.own * 3600, p.waiting * 3600) for p in hours.phases}
    assert parts["imports"] == (pytest.approx(40), 0)
    assert parts[None] == (pytest.approx(2), 0)


def test_gpu_count_is_the_nodes_or_the_ranks(tmp_path: Path) -> None:
    """All ranks of a node see its 4 GPUs; on the other each rank sees its own one."""
    for rank in range(4):
        EventFile("a", rank, bootseer__gpu__count=4).span("imports", 0, 3600).write(tmp_path)
        EventFile("b", 4 + rank, bootseer__gpu__count=1).span("imports", 0, 3600).write(tmp_path)
    hours = report_of(tmp_path).gpu_hours
    assert hours.gpus == 8
    assert hours.own == pytest.approx(8)


def test_queueing_holds_no_gpus(tmp_path: Path) -> None:
    EventFile("a", 0).span("queue", 0, 1000).span("imports", 1000, 1036).write(tmp_path)
    hours = report_of(tmp_path).gpu_hours
    assert hours.total * 3600 == pytest.approx(36)
    assert hours.gpus_assumed


def test_what_if_goes_through_the_barrier(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    found = {(w.kind, w.name, w.change): w.start_s for w in report_of(tmp_path).what_if}
    # Without imports both arrive at 0, a needs 20 more.
    assert found["phase", "imports", "removed"] == pytest.approx(20)
    # At the median of 20 for b (a has 10): the barrier opens at 20.
    assert found["phase", "imports", "median"] == pytest.approx(40)
    assert found["phase", "compile", "removed"] == pytest.approx(42)  # now b is last
    assert found["node", "b", "removed"] == pytest.approx(30)
    # Median of model.init is 7.5: b, at 10, was not on the path behind the barrier.
    assert found["phase", "model.init", "median"] == pytest.approx(50)
    assert found["node", "b", "median"] == pytest.approx(40)


@pytest.mark.parametrize("ahead_s", [-7.0, 0.0, 3.5])
def test_skew_is_found_and_corrected(tmp_path: Path, ahead_s: float) -> None:
    two_nodes(tmp_path, ahead_s=ahead_s)
    report = report_of(tmp_path)
    skew = {n.name: n.skew_s for n in report.nodes}
    assert skew["a"] is not None
    assert skew["b"] is not None
    assert skew["b"] - skew["a"] == pytest.approx(ahead_s, abs=1e-6)
    assert report.skew.barriers == 1
    assert report.start.duration_s == pytest.approx(50)
    assert report.critical_path[0].node == "b"


def test_skew_is_unknown_without_barriers(tmp_path: Path) -> None:
    EventFile("a", 0).span("imports", 0, 1).write(tmp_path)
    EventFile("b", 1).span("imports", 0, 1).write(tmp_path)
    skew = report_of(tmp_path).skew
    assert (skew.reference, skew.unknown_nodes) == (None, 2)


def test_waiting_for_a_lease_is_no_barrier(tmp_path: Path) -> None:
    """Nodes that wait for one holder leave when each sees it: that tells nothing of clocks."""
    for rank, end_s in enumerate((10, 11, 12)):
        file = EventFile(f"n{rank}", rank)
        file.span("deps.install", 0, end_s, wait=True).point("first_step", 20).write(tmp_path)
    report = report_of(tmp_path)
    assert report.skew.reference is None
    assert report.barriers == ()
    assert phase(report, "deps.install").wait_max_s == pytest.approx(12)


def test_one_name_with_separate_groups_makes_separate_barriers(tmp_path: Path) -> None:
    for rank, end_s in enumerate((10, 10, 30, 30)):
        file = EventFile("n", rank).span("imports", 0, 5 if rank % 2 else end_s)
        file.span("group", 5 if rank % 2 else end_s, end_s, wait=True)
        file.point("first_step", end_s + 1).write(tmp_path)
    report = report_of(tmp_path)
    assert [(b.exit_s, b.processes) for b in report.barriers] == [
        (pytest.approx(10), 2),
        (pytest.approx(30), 2),
    ]


def test_single_process_start(tmp_path: Path) -> None:
    """The wrapper's `job` span around everything, sub-phases, a gap; nothing counted twice."""
    wrapper = EventFile("laptop").span("deps.install", 0, 10)
    wrapper.span("deps.install.download", 1, 4).span("job", 11, 100).write(tmp_path)
    job = EventFile("laptop").span("imports", 13, 17).span("imports.torch", 14, 16)
    job.span("model.init", 18, 22)
    job.span("checkpoint.load", 19, 21, within=job.last)
    job.point("first_step", 25).write(tmp_path)
    report = report_of(tmp_path)
    assert report.start.duration_s == pytest.approx(25)
    assert path_of(report) == [
        ("laptop", "deps.install", 0, 10),
        ("laptop", None, 10, 11),
        ("laptop", "job", 11, 13),
        ("laptop", "imports", 13, 17),
        ("laptop", "job", 17, 18),
        ("laptop", "model.init", 18, 19),
        ("laptop", "checkpoint.load", 19, 21),
        ("laptop", "model.init", 21, 22),
        ("laptop", "job", 22, 25),
    ]
    hours = report.gpu_hours
    assert sum(p.own + p.waiting for p in hours.phases) == pytest.approx(hours.total)
    assert phase(report, "deps.install.download").parent == "deps.install"
    assert phase(report, "deps.install.download").p50_s == pytest.approx(3)
    assert phase(report, "deps.install").p50_s == pytest.approx(10)
    assert phase(report, "imports.torch").parent == "imports"
    assert phase(report, "model.init").p50_s == pytest.approx(2)
    assert "image.pull" in report.not_observed
    assert "imports" not in report.not_observed
    assert "deps.install.download" not in report.heat_map.phases
    assert report.killed == ()
    found = {(w.name, w.change): w.start_s for w in report.what_if if w.kind == "phase"}
    assert found["deps.install", "removed"] == pytest.approx(15)


def test_a_phase_that_took_no_time_leaves_one_gap(tmp_path: Path) -> None:
    """Cluster events are in whole seconds, so some phases begin and end in the same one."""
    job = EventFile("a").span("imports", 0, 4).span("container.start", 7, 7)
    job.span("model.init", 10, 19).point("first_step", 20).write(tmp_path)
    report = report_of(tmp_path)
    assert [node.gap_s for node in report.nodes] == [pytest.approx(7)]
    steps = [("a", "imports", 0, 4), ("a", None, 4, 10), ("a", "model.init", 10, 19)]
    assert path_of(report)[:3] == steps


def test_only_sub_phases_were_seen(tmp_path: Path) -> None:
    EventFile("a").span("imports.torch", 0, 2).span("imports.numpy", 2, 3).write(tmp_path)
    report = report_of(tmp_path)
    assert phase(report, "imports").p50_s == pytest.approx(3)
    assert "imports" not in report.not_observed


def test_what_a_node_does_once_belongs_to_all_its_ranks(tmp_path: Path) -> None:
    """The install ran once on the node (no rank); the two ranks followed it."""
    EventFile("a").span("deps.install", 0, 20).write(tmp_path)
    for rank in (0, 1):
        file = EventFile("a", rank, bootseer__gpu__count=2)
        file.span("imports", 20, 30).point("first_step", 30).write(tmp_path)
    report = report_of(tmp_path)
    assert phase(report, "deps.install").processes == 1
    assert phase(report, "imports").processes == 2
    assert report.gpu_hours.own * 3600 == pytest.approx(60)
    assert report.gpu_hours.unobserved == pytest.approx(0)
    assert path_of(report) == [("a", "deps.install", 0, 20), ("a", "imports", 20, 30)]


def test_cluster_records_belong_to_the_ranks_of_their_pod(tmp_path: Path) -> None:
    """Two pods of a node: each rank follows its own pod's pull, and the node's own file."""
    EventFile("n").span("image.verify", 0, 1).write(tmp_path)
    for rank, pull_s in enumerate((10.0, 30.0)):
        pod = {"k8s__node__name": "n", "k8s__pod__name": f"pod-{rank}"}
        EventFile("api", **pod).span("image.pull", 1, pull_s).write(tmp_path)
        file = EventFile("n", rank, **pod).span("imports", pull_s, pull_s + 5)
        file.point("first_step", pull_s + 5).write(tmp_path)
    report = report_of(tmp_path)
    assert phase(report, "image.pull").processes == 2
    assert path_of(report) == [
        ("n", "image.verify", 0, 1),
        ("n", "image.pull", 1, 30),
        ("n", "imports", 30, 35),
    ]
    assert report.gpu_hours.unobserved == pytest.approx(0)


def test_ranks_that_do_not_know_their_pod(tmp_path: Path) -> None:
    known = {"k8s__node__name": "n", "k8s__pod__name": "pod-1"}
    EventFile("api", **known).span("image.pull", 0, 10).write(tmp_path)
    file = EventFile("n", 0).span("imports", 10, 15).point("first_step", 15)
    file.write(tmp_path)
    assert path_of(report_of(tmp_path)) == [("n", "image.pull", 0, 10), ("n", "imports", 10, 15)]


def test_pod_rank_is_not_a_training_rank(tmp_path: Path) -> None:
    """Operators set RANK for the pod's wrapper; its workers have local ranks of their own."""
    EventFile("a", 1).span("deps.install", 0, 20).write(tmp_path)
    for rank in (2, 3):
        file = EventFile("a", rank, bootseer__local_rank=rank - 2)
        file.span("imports", 20, 30).point("first_step", 30).write(tmp_path)
    report = report_of(tmp_path)
    assert report.start.ranks == 2
    assert report.gpu_hours.unobserved == pytest.approx(0)


def test_work_after_the_first_step_does_not_count(tmp_path: Path) -> None:
    file = EventFile("a", 0).span("imports", 0, 10).point("first_step", 10)
    file.span("checkpoint.load", 10.5, 500).point("first_step", 600).write(tmp_path)
    report = report_of(tmp_path)
    assert report.start.duration_s == pytest.approx(10)
    assert "checkpoint.load" in report.not_observed


def test_killed_node_is_named_and_others_go_on(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    EventFile("c", 2).span("imports", 0, 12).span("model.init", 12, None).write(tmp_path)
    report = report_of(tmp_path)
    assert [(k.node, k.rank, k.phase) for k in report.killed] == [("c", 2, "model.init")]
    assert report.killed[0].began_s == pytest.approx(12)
    assert report.start.duration_s == pytest.approx(50)
    assert phase(report, "model.init").killed == 1
    node = next(n for n in report.nodes if n.name == "c")
    assert (node.killed, node.first_step_s) == (1, None)


def test_a_rank_that_hung_before_its_first_step_is_named(tmp_path: Path) -> None:
    for rank in range(16):
        file = EventFile(f"n{rank // 8}", rank).span("imports", 0, 10)
        if rank == 13:
            file.span("rendezvous", 10, None, wait=True)
        elif rank == 14:
            file.span("model.init", 10, 12)
        else:
            file.span("rendezvous", 10, 12, wait=True).point("first_step", 20)
        file.write(tmp_path)
    report = report_of(tmp_path)
    assert (report.start.complete, report.start.unreached) == (False, 2)
    assert [(u.node, u.rank, u.phase, u.inside) for u in report.unreached] == [
        ("n1", 13, "rendezvous", True),
        ("n1", 14, "model.init", False),
    ]
    assert [u.since_s for u in report.unreached] == [pytest.approx(10), pytest.approx(12)]
    assert report.what_if == ()  # it never ended
    said = summary_sentences.verdict(report)
    assert "Rank 13 on n1 and 1 other rank did not reach the first step" in said.headline
    assert said.advice == ("rank 13 on n1, in rendezvous since 10.0s.",)
    console = Console(width=120, record=True, file=io.StringIO())
    terminal.render(report, console)
    assert "rank 14 on n1: last in model.init, which ended at 12.0s" in console.export_text()
    page = html.render(report)
    assert "Ranks without a first step" in page


def test_a_first_step_that_one_rank_alone_tells_of_is_every_ranks(tmp_path: Path) -> None:
    """As where a log's line comes from rank 0 only."""
    for rank in range(4):
        file = EventFile("a", rank).span("imports", 0, 10)
        if rank == 0:
            file.point("first_step", 20)
        file.write(tmp_path)
    report = report_of(tmp_path)
    assert (report.start.complete, report.unreached) == (True, ())


def test_a_rank_that_went_on_on_another_node_is_not_missing(tmp_path: Path) -> None:
    for rank in range(4):
        EventFile("a", rank).span("imports", 0, 10).point("first_step", 20).write(tmp_path)
    EventFile("b", 3).span("imports", 0, 5).span("model.init", 5, None).write(tmp_path)
    report = report_of(tmp_path)
    assert (report.start.complete, report.unreached) == (True, ())


def test_two_processes_of_a_node_that_wait_do_not_pass_a_barrier_twice(tmp_path: Path) -> None:
    """As two shells do, each with `bootseer event begin rendezvous --wait`."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    EventFile("a", None).span("rendezvous", 0, 10, wait=True).write(tmp_path / "1")
    EventFile("a", None).span("rendezvous", 9.9, 10.1, wait=True).write(tmp_path / "2")
    EventFile("b", None).span("imports", 0, 9).span("rendezvous", 9, 10, wait=True).write(tmp_path)
    path = report_of(tmp_path).critical_path
    assert ("b", "imports") in [(step.node, step.phase) for step in path]


_MOMENTS = st.integers(0, 12)
_SPANS = st.lists(
    st.tuples(
        st.sampled_from(["rendezvous", "imports", "checkpoint.load", "barrier"]),
        _MOMENTS,
        st.one_of(st.none(), _MOMENTS),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)
_PROCESSES = st.lists(
    st.tuples(st.sampled_from("ab"), st.one_of(st.none(), st.integers(0, 2)), _SPANS),
    min_size=1,
    max_size=5,
)


@given(processes=_PROCESSES, stepped=st.sets(st.integers(0, 4)))
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_small_start_has_a_report(
    processes: list[tuple[str, int | None, list[tuple[str, int, int | None, bool]]]],
    stepped: set[int],
) -> None:
    """The critical path has neither holes nor a way back, whatever the events are."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (node, rank, spans) in enumerate(processes):
            file = EventFile(node, rank)
            for name, begin_s, end_s, wait in spans:
                file.span(name, begin_s, None if end_s is None else begin_s + end_s, wait=wait)
            if number in stepped:
                file.point("first_step", 30)
            place = Path(folder) / str(number)
            place.mkdir()
            file.write(place)
        report = report_of(Path(folder))
    path = report.critical_path
    assert all(step.end_s >= step.begin_s for step in path)
    assert all(a.end_s == pytest.approx(b.begin_s) for a, b in itertools.pairwise(path))


def test_no_first_step_anywhere(tmp_path: Path) -> None:
    EventFile("a", 0).span("imports", 0, 10).span("compile", 10, 14, status="error").write(tmp_path)
    report = report_of(tmp_path)
    assert not report.start.complete
    assert report.start.duration_s == pytest.approx(14)
    assert [s.phase for s in report.critical_path] == ["imports", "compile"]


def test_incidents_are_joined_by_reason(tmp_path: Path) -> None:
    for rank in range(3):
        file = EventFile(f"n{rank}", rank)
        file.span("deps.install", 0, 5, status="fallback", bootseer__reason="store is gone")
        fault = {"error__type": "StoreUnavailableError", "error__message": "the cache is full"}
        file.span("image.fault", 5, 5, status="fallback", **fault)
        file.span("imports", 5, 6, status="error", error__type="ImportError")
        file.span("compile", 6, 7, status="error", process__exit__code=137).write(tmp_path)
    report = report_of(tmp_path)
    assert [(i.status, i.phase, i.reason, i.count) for i in report.incidents] == [
        ("fallback", "deps.install", "store is gone", 3),
        ("fallback", "image.fault", "the cache is full", 3),
        ("error", "imports", "ImportError", 3),
        ("error", "compile", "exit code 137", 3),
    ]
    assert report.incidents[0].nodes == ("n0", "n1", "n2")
    assert phase(report, "deps.install").fallbacks == 3


def test_bytes_add_up(tmp_path: Path) -> None:
    for rank in range(2):
        file = EventFile("a", rank).span("checkpoint.load", 0, 5, bootseer__bytes=1000)
        file.write(tmp_path)
    assert phase(report_of(tmp_path), "checkpoint.load").bytes == 2000


def test_several_starts(tmp_path: Path) -> None:
    two_nodes(tmp_path / "1")
    later = EventFile("a", 0, trace="b" * 32, bootseer__start__kind="restart", mono_zero_s=1.0)
    later.ahead_s = 1000.0
    later.span("imports", 0, 5).point("first_step", 6).write(tmp_path / "2")
    loaded = load([str(tmp_path)])
    report = analysis.analyse(loaded)
    assert [(s.trace_id[0], s.kind) for s in report.starts] == [("b", "restart"), ("a", "unknown")]
    assert report.start.trace_id == "b" * 32
    assert analysis.analyse(loaded, trace_id="aaa").start.trace_id == TRACE
    with pytest.raises(NotFoundError, match="no start has trace id c"):
        analysis.analyse(loaded, trace_id="c")


def test_a_start_of_points_only(tmp_path: Path) -> None:
    EventFile("a").point("hello", 1).write(tmp_path)
    report = report_of(tmp_path)
    assert report.start.duration_s == 0
    assert report.critical_path == ()
    json.dumps(report.to_json(), allow_nan=False)


def test_a_job_that_names_no_phase_is_not_advised_away(tmp_path: Path) -> None:
    EventFile("a", 0).span("job", 0, 60).point("first_step", 60).write(tmp_path)
    report = report_of(tmp_path)
    assert not [w for w in report.what_if if w.name == "job" and w.change == "removed"]
    (advice,) = summary_sentences.verdict(report).advice
    assert advice.startswith("what 60.0 s of it went into is not known. Name the job's phases")


def test_a_phase_of_which_only_the_moment_is_known_was_observed(tmp_path: Path) -> None:
    file = EventFile("a", 0).span("job", 0, 60).point("rendezvous", 20).point("first_step", 60)
    file.write(tmp_path)
    report = report_of(tmp_path)
    assert "rendezvous" not in report.not_observed
    assert "model.init" in report.not_observed
    # What has no figure has no row.
    assert [p.name for p in report.phases if p.has_figures] == ["job"]


def test_a_slow_node_goes_before_the_phase_that_it_is_slow_in(tmp_path: Path) -> None:
    for rank in range(16):
        pull_s = 80 if rank == 3 else 50
        file = EventFile(f"node{rank}", rank).span("image.pull", 0, pull_s)
        file.span("rendezvous", pull_s, 81, bootseer__wait=True)
        file.span("imports", 81, 85).point("first_step", 85).write(tmp_path)
    advice = summary_sentences.verdict(report_of(tmp_path)).advice
    assert advice[0].startswith("node3. Its image.pull took 80.0 s")
    assert advice[1].startswith("image.pull. Without it")
