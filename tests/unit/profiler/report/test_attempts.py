"""Attempts that no setting counts: each is a start of its own, of a kind that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.events.resource import digest
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Report
from tests.support.samples.event_files import TRACE, EventFile


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def attempts(folder: Path) -> list[tuple[int | None, str, float]]:
    """Each start's attempt, kind and duration, in order of time."""
    starts = report_of(folder).starts[::-1]
    return [(start.attempt, start.kind, round(start.duration_s, 3)) for start in starts]


def run(
    folder: Path,
    at_s: float,
    step_s: float | None = 10,
    *,
    node: str = "a",
    rank: int | None = None,
    ended_s: float | None = None,
    **about: object,
) -> EventFile:
    """One command under `bootseer run`: imports for 5 s, its first step at `step_s`."""
    first = {"bootseer__attempt": 0, "bootseer__start__kind": "first"}
    file = EventFile(node, rank, **{**first, **about})
    file.span("job", at_s, None if ended_s is None else at_s + ended_s)
    file.span("imports", at_s, at_s + 5)
    if step_s is not None:
        file.point("first_step", at_s + step_s)
    file.write(folder)
    return file


def test_a_command_that_is_run_again_is_another_start(tmp_path: Path) -> None:
    run(tmp_path, 0, ended_s=20)
    run(tmp_path, 100, 7)
    assert attempts(tmp_path) == [(0, "first", 10), (1, "restart_in_place", 7)]
    report = report_of(tmp_path)
    assert report.start.trace_id != TRACE
    assert report.starts[1].trace_id == TRACE
    assert report.problems == ()


def test_the_same_events_have_the_same_trace_ids(tmp_path: Path) -> None:
    for number in range(3):
        run(tmp_path, 100 * number, ended_s=20)
    ids = [start.trace_id for start in report_of(tmp_path).starts]
    assert len(set(ids)) == 3
    assert [start.trace_id for start in report_of(tmp_path).starts] == ids
    assert [attempt for attempt, _, _ in attempts(tmp_path)] == [0, 1, 2]


def test_a_command_whose_end_is_not_known_may_still_run(tmp_path: Path) -> None:
    """It does where its job is seen again when the next one has begun."""
    file = EventFile("a").span("job", 0, None).span("imports", 0, 5)
    file.span("model.init", 90, 130).write(tmp_path)
    run(tmp_path, 100, None)
    assert len(attempts(tmp_path)) == 1


@pytest.mark.parametrize("step_s", [None, 10])
def test_a_command_that_was_killed_and_run_again(tmp_path: Path, step_s: float | None) -> None:
    """It had no time to write its end, and nothing is seen of it afterwards."""
    run(tmp_path, 0, step_s)
    run(tmp_path, 100, 7)
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["first", "restart_in_place"]


IMAGE_RUN = ["/usr/bin/python3", "/usr/bin/bootseer", "image", "run", "registry/job:1"]
INSTALLED_RUN = ["/v/bin/python", "-I", "/v/bin/bootseer-python", "image", "run", "registry/job:1"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (IMAGE_RUN, "restart"),
        (INSTALLED_RUN, "restart"),
        (["bootseer", "start", "--", "image", "run"], "restart_in_place"),
    ],
)
def test_starts_whose_end_nothing_tells(tmp_path: Path, words: list[str], kind: str) -> None:
    """The first was killed before its first step, and had a process that outlived it."""
    about = {"process__command_args": words, "bootseer__start__kind": "first"}
    for at_s in (0, 4):
        start = EventFile("a", **about).point("start", at_s)
        start.span("deps.install", at_s, at_s + 2).write(tmp_path)
        job = EventFile("a").span("imports", at_s + 2, at_s + 3, within=f"{start.prefix}ffffff")
        job.write(tmp_path)
        beside = EventFile("a", **about)
        beside.span("deps.publish", at_s + 3, at_s + 6, within=f"{start.prefix}ffffff")
        beside.write(tmp_path)
        late = EventFile("a", **about)
        late.span("image.record", at_s + 7, at_s + 7, within=f"{start.prefix}ffffff")
        late.write(tmp_path)
    assert [found for _, found, _ in attempts(tmp_path)] == ["first", kind]
    # What outlived the first belongs to it, though it was written while the second ran.
    assert [start.processes for start in report_of(tmp_path).starts] == [4, 4]
    assert [start.events for start in report_of(tmp_path).starts] == [9, 9]


def test_starts_of_one_node_that_go_on_side_by_side(tmp_path: Path) -> None:
    """Each is a command of its own without a rank, and its job is seen after the last began."""
    for at_s in (0, 2, 4):
        start = EventFile("a").point("start", at_s)
        start.write(tmp_path)
        job = EventFile("a").span("imports", at_s + 1, at_s + 9, within=f"{start.prefix}ffffff")
        job.write(tmp_path)
    assert len(attempts(tmp_path)) == 1


def test_starts_that_begin_at_once_and_tell_nothing_else(tmp_path: Path) -> None:
    for number in range(4):
        EventFile("a").point("start", number / 10).write(tmp_path)
    assert len(attempts(tmp_path)) == 1


def test_ranks_of_a_node_that_start_one_after_the_other(tmp_path: Path) -> None:
    for rank in range(8):
        EventFile("a", rank).point("start", 3 * rank).write(tmp_path)
    assert len(attempts(tmp_path)) == 1
    for rank in range(8):  # and the first attempt of each was killed
        EventFile("a", rank).point("start", 100 + 3 * rank).write(tmp_path)
    assert [start.processes for start in report_of(tmp_path).starts] == [8, 8]


def test_a_command_that_was_lost_with_its_node(tmp_path: Path) -> None:
    """A wall clock that is set back at the boot says nothing of what still ran."""
    for number in range(2):
        file = EventFile("a", bootseer__boot_id=f"boot-{number}").point("start", 10 * number)
        file.span("imports", 10 * number, 10 * number + 12).write(tmp_path)
    assert len(attempts(tmp_path)) == 2


@pytest.mark.parametrize("entry", ["job", "start"])
def test_two_processes_of_one_number_were_two_containers(tmp_path: Path, entry: str) -> None:
    """A container's first process is number 1, and was killed before it could say anything."""
    for at_s in (0, 30):
        file = EventFile("c", process__pid=1)
        file.span("job", at_s, None) if entry == "job" else file.point("start", at_s)
        file.span("imports", at_s, at_s + 5).write(tmp_path)
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["unknown", "restart"]


def test_a_container_that_is_restarted_in_its_pod(tmp_path: Path) -> None:
    pod = {"k8s__pod__name": "train-0", "k8s__pod__uid": "u"}
    for number in range(2):
        run(tmp_path, 60 * number, process__pid=1, container__id=f"{number}" * 64, **pod)
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["first", "restart"]


def test_a_command_that_is_run_again_in_its_container(tmp_path: Path) -> None:
    pod = {"k8s__pod__name": "train-0", "k8s__pod__uid": "u", "container__id": "c" * 64}
    for number in range(2):
        run(tmp_path, 60 * number, ended_s=20, **pod)
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["first", "restart_in_place"]


@pytest.mark.parametrize("around", ["", "d" * 64])
@pytest.mark.parametrize(
    ("containers", "kind"), [("cc", "restart_in_place"), ("ce", "restart"), ("cd", "restart")]
)
def test_a_job_that_runs_again_in_the_container_that_was_made_for_it(
    tmp_path: Path, around: str, containers: str, kind: str
) -> None:
    """The command that made it is itself outside, or in another one."""
    start = EventFile("a", container__id=around, process__command_args=INSTALLED_RUN)
    start.point("start", 0).write(tmp_path)
    for number, container in enumerate(containers):
        job = EventFile("a", 0, container__id=container * 64, process__pid=6 - 5 * number)
        job.span("imports", 20 * number + 1, 20 * number + 5, within=f"{start.prefix}ffffff")
        job.point("first_step", 20 * number + 6).write(tmp_path)
    assert [found for _, found, _ in attempts(tmp_path)][1:] == [kind]


@pytest.mark.parametrize("name", ["container__id", "bootseer__container"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("containers", "kind"), [("cc", "restart_in_place"), ("ce", "restart")])
def test_what_prepares_a_container_before_it_knows_its_rank(
    tmp_path: Path, name: str, outside: bool, containers: str, kind: str
) -> None:
    """It begins before the rank, by which the attempts are told where nothing else tells them."""
    for number, container in enumerate(containers):
        at_s = 20.0 * number
        within = {}
        if outside:  # a plain command that makes a container
            start = EventFile("a", process__pid=40 + number).point("start", at_s)
            start.write(tmp_path)
            within = {"within": f"{start.prefix}ffffff"}
        about = {name: container * 64}
        install = EventFile("a", **about).span("deps.install", at_s + 1, at_s + 4, **within)
        install.write(tmp_path)
        job = EventFile("a", 0, **about).span("imports", at_s + 5, at_s + 8, **within)
        job.point("first_step", at_s + 9).write(tmp_path)
    assert [found for _, found, _ in attempts(tmp_path)][1:] == [kind]


@pytest.mark.parametrize(("containers", "kind"), [("cc", "restart_in_place"), ("ce", "restart")])
def test_a_command_that_tells_when_its_container_was_made(
    tmp_path: Path, containers: str, kind: str
) -> None:
    """That was before the command, which begins the attempt; the first came to no first step."""
    for number, container in enumerate(containers):
        at_s, about = 60.0 * number, {"container__id": container * 64}
        start = EventFile("a", 0, process__pid=7 + number, **about)
        start.span("container.start", at_s - 1, at_s).point("start", at_s).write(tmp_path)
        job = EventFile("a", 0, **about).span(
            "imports", at_s + 1, at_s + 3, within=f"{start.prefix}ffffff"
        )
        if number:
            job.point("first_step", at_s + 4)
        job.write(tmp_path)
    assert [found for _, found, _ in attempts(tmp_path)][1:] == [kind]
    assert [start.processes for start in report_of(tmp_path).starts] == [2, 2]


def test_a_node_that_was_booted_in_between_is_no_restart_in_place(tmp_path: Path) -> None:
    run(tmp_path, 0, ended_s=20)
    run(tmp_path, 100, bootseer__boot_id="another")
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["first", "restart"]


def test_a_pod_that_is_made_again_on_another_node(tmp_path: Path) -> None:
    for number, node in enumerate("ab"):
        about = {"k8s__pod__name": "train-0", "k8s__pod__uid": f"u{number}"}
        run(tmp_path, 60 * number, node=node, ended_s=20, k8s__node__name=node, **about)
    assert [kind for _, kind, _ in attempts(tmp_path)] == ["first", "restart"]


def test_all_nodes_of_a_job_run_again(tmp_path: Path) -> None:
    """They do not begin at one moment, and each attempt's figures are of its own ranks."""
    for number in range(2):
        for rank in range(4):
            at_s = 1000 * number + rank
            run(tmp_path, at_s, 20 - rank, node=f"n{rank}", rank=rank, ended_s=500)
    assert attempts(tmp_path) == [(0, "first", 20), (1, "restart_in_place", 20)]
    assert [start.ranks for start in report_of(tmp_path).starts] == [4, 4]


def test_ranks_of_a_node_that_run_again_are_one_attempt(tmp_path: Path) -> None:
    for number in range(3):
        for rank in range(8):
            run(tmp_path, 100 * number + rank / 10, rank=rank, ended_s=20)
    assert [attempt for attempt, _, _ in attempts(tmp_path)] == [0, 1, 2]


def test_ranks_below_a_wrapper_go_with_it(tmp_path: Path) -> None:
    """As with `bootseer start -- torchrun`: one entry for the node, ranks without one."""
    for number in range(2):
        at_s = 100.0 * number
        EventFile("a").point("start", at_s).span("deps.install", at_s, at_s + 3).write(tmp_path)
        EventFile("a", process__pid=7).span("job", at_s + 3, at_s + 50).write(tmp_path)
        for rank in range(2):
            ranked = EventFile("a", rank).span("imports", at_s + 4, at_s + 9)
            ranked.point("first_step", at_s + 10).write(tmp_path)
    assert [(start.ranks, start.duration_s) for start in report_of(tmp_path).starts] == [
        (2, pytest.approx(10)),
        (2, pytest.approx(10)),
    ]


def test_one_node_that_is_restarted_while_others_wait_is_a_try(tmp_path: Path) -> None:
    """Its command ended, the others' go on to the first step: one start."""
    for rank in range(4):
        if rank == 2:
            run(tmp_path, 0, None, node="n2", rank=2, ended_s=8)
            run(tmp_path, 30, 10, node="n2", rank=2)
        else:
            run(tmp_path, 0, 41, node=f"n{rank}", rank=rank)
    assert attempts(tmp_path) == [(0, "first", 41)]


def test_a_try_is_no_attempt_though_all_are_restarted_later(tmp_path: Path) -> None:
    for rank in range(4):
        if rank == 2:
            run(tmp_path, 0, None, node="n2", rank=2, ended_s=8)
            run(tmp_path, 30, 10, node="n2", rank=2, ended_s=100)
        else:
            run(tmp_path, 0, 41, node=f"n{rank}", rank=rank, ended_s=130)
        run(tmp_path, 3600, 20, node=f"n{rank}", rank=rank)
    assert attempts(tmp_path) == [(0, "first", 41), (1, "restart_in_place", 20)]
    assert report_of(tmp_path).start.ranks == 4


def test_a_start_of_which_all_nodes_failed_before_the_first_step(tmp_path: Path) -> None:
    for number in range(2):
        for rank in range(4):
            step_s = 10 if number else None
            run(tmp_path, 60 * number + rank, step_s, node=f"n{rank}", rank=rank, ended_s=30)
    assert [attempt for attempt, _, _ in attempts(tmp_path)] == [0, 1]


def test_ranks_that_come_to_a_first_step_again_without_any_wrapper(tmp_path: Path) -> None:
    """A helper of the second process that runs ahead of it belongs to its attempt."""
    for number in range(2):
        at_s = 3600.0 * number
        for rank in range(2):
            EventFile("a", rank).span("deps.cache", at_s, at_s + 1).write(tmp_path)
            file = EventFile("a", rank).span("imports", at_s + 2, at_s + 5)
            file.point("first_step", at_s + 10).write(tmp_path)
    assert [duration for _, _, duration in attempts(tmp_path)] == [10, 10]


def test_what_a_command_wraps_is_not_run_again(tmp_path: Path) -> None:
    """One `run` within another is not outermost; nor do two commands side by side end."""
    outer = EventFile("a").span("job", 0, 50)
    outer.write(tmp_path)
    for at_s in (1, 20):
        inner = EventFile("a")
        inner.span("job", at_s, at_s + 10, within=outer.last).span("imports", at_s, at_s + 2)
        inner.write(tmp_path)
    assert len(attempts(tmp_path)) == 1


def test_an_attempt_that_is_counted_goes_on_from_its_number(tmp_path: Path) -> None:
    run(tmp_path, 0, ended_s=20, bootseer__attempt=3, bootseer__start__kind="restart")
    run(tmp_path, 100, bootseer__attempt=3, bootseer__start__kind="restart")
    assert attempts(tmp_path) == [(3, "restart", 10), (4, "restart_in_place", 10)]


def test_a_launcher_that_is_made_again_under_its_name(tmp_path: Path) -> None:
    """As an MPIJob's, of which only a name is known; a pod that is added later joins the last."""
    for number, node in enumerate("ab"):
        about = {"k8s__pod__name": "pi-launcher", "k8s__node__name": node}
        at_s = 3600.0 * number
        EventFile(node, **about).span("job", at_s, at_s + 20).write(tmp_path)
    assert len(attempts(tmp_path)) == 2
    EventFile("c", k8s__pod__name="pi-worker-0").span("job", 7200, 7220).write(tmp_path)
    assert len(attempts(tmp_path)) == 2


def test_what_runs_side_by_side_is_not_run_again(tmp_path: Path) -> None:
    EventFile("a").span("job", 0, 20).write(tmp_path)
    EventFile("a").span("job", 19, 30).write(tmp_path)
    EventFile("b").span("job", 40, 50).write(tmp_path)  # another node
    for rank in (0, 1):
        EventFile("a", rank).span("job", 60 + 10 * rank, 65 + 10 * rank).write(tmp_path)
    assert len(attempts(tmp_path)) == 1


def test_what_the_cluster_counted_joins_what_the_job_did_not(tmp_path: Path) -> None:
    """A container that was restarted in its pod: its own events say attempt 0 both times."""
    trace = [digest(f"uid-1:{attempt}") for attempt in range(2)]
    about = {"bootseer__job_uid": "uid-1", "k8s__pod__name": "p", "k8s__pod__uid": "u"}
    for number in range(2):
        container = {"container__id": f"{number}" * 64, "process__pid": 1}
        run(tmp_path, 100 * number, node="n", trace=trace[0], **about, **container)
    first = EventFile("n", trace=trace[0], bootseer__attempt=0, **about)
    first.span("image.pull", -20, -1).write(tmp_path)
    later = {"bootseer__attempt": 1, "bootseer__start__kind": "restart"}
    record = EventFile("n", trace=trace[1], **later, **about)
    record.span("container.backoff", 80, 99, wait=True).write(tmp_path)
    starts = report_of(tmp_path).starts
    assert [(s.trace_id, s.attempt, s.kind) for s in starts] == [
        (trace[1], 1, "restart"),
        (trace[0], 0, "first"),
    ]
    assert [s.duration_s for s in starts] == [pytest.approx(30), pytest.approx(30)]
