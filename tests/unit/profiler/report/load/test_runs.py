"""Jobs that were made again under their name, which is all that their pods know of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer import events
from bootseer.cli.report.import_ import k8s_command
from bootseer.profiler.collect.log_rules import lines
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Report
from tests.support.samples.event_files import EventFile

HOUR_S = 3600.0


def write_pod(
    folder: Path, name: str, uid: str, rank: int, at_s: float, *, until_s: float = 20
) -> None:
    about = {"k8s__pod__name": name, "k8s__pod__uid": uid, "k8s__namespace__name": "team"}
    file = EventFile(f"n{rank}", rank, bootseer__job_uid="team/train", **about)
    file.span("imports", at_s, at_s + 10)
    if until_s > 10:
        file.span("model.init", at_s + 10, at_s + until_s).point("first_step", at_s + until_s)
    file.write(folder)


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def kinds_of(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_two_runs_of_one_name_are_two_starts(tmp_path: Path) -> None:
    for run in range(3):
        for rank in range(4):
            uid = f"uid-{run}-{rank}"
            write_pod(tmp_path, f"train-worker-{rank}", uid, rank, HOUR_S * run + rank)
    report = report_of(tmp_path)
    assert [start.ranks for start in report.starts] == [4, 4, 4]
    assert len({start.trace_id for start in report.starts}) == 3
    assert [start.duration_s for start in report.starts] == [pytest.approx(23)] * 3
    assert all(start.complete for start in report.starts)
    assert kinds_of(report) == ["run-of-same-name"] * 2
    assert report.stragglers == ()


def test_a_run_that_was_deleted_half_way_is_not_left_out_of_the_next(tmp_path: Path) -> None:
    """As found: it was an earlier try of the run that followed, whose start lasted an hour."""
    for rank in range(2):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0, until_s=10)
        write_pod(tmp_path, f"train-{rank}", f"b{rank}", rank, HOUR_S)
    report = report_of(tmp_path)
    assert [start.complete for start in report.starts] == [True, False]
    assert [start.duration_s for start in report.starts] == [pytest.approx(20), pytest.approx(10)]


def test_one_pod_of_many_that_was_made_again_is_no_run(tmp_path: Path) -> None:
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0, until_s=10 if rank == 3 else 99)
    write_pod(tmp_path, "train-3", "b3", 3, 40)
    report = report_of(tmp_path)
    assert len(report.starts) == 1
    assert kinds_of(report) == ["earlier-try"]


def test_pods_that_were_replaced_one_after_the_other_are_no_run(tmp_path: Path) -> None:
    """As on spot nodes: the ranks of all others start again with each pod that is replaced.

    Each time is another attempt of the same run.
    """
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, rank)
        for number in range(3):
            uid = f"{'a' if number < rank else 'b'}{rank}"
            write_pod(tmp_path, f"train-{rank}", uid, rank, 1000 * (number + 1) + (number != rank))
    report = report_of(tmp_path)
    assert [(start.attempt, start.ranks) for start in report.starts] == [
        (3, 4),
        (2, 4),
        (1, 4),
        (None, 4),
    ]
    assert "run-of-same-name" not in kinds_of(report)


def add_rank(
    folder: Path, name: str, uid: str, rank: int | None, at_s: float, *, step_s: float | None = None
) -> None:
    """One more process of a pod, which waits for others; its first step is `step_s` later."""
    about = {"k8s__pod__name": name, "k8s__pod__uid": uid, "k8s__namespace__name": "team"}
    file = EventFile(f"n{rank}", rank, bootseer__job_uid="team/train", **about)
    file.span("imports", at_s, at_s + 1)
    file.span("rendezvous", at_s + 1, None if step_s is None else at_s + step_s, wait=True)
    if step_s is not None:
        file.point("first_step", at_s + step_s)
    file.write(folder)


def durations_of(report: Report) -> list[float]:
    return [round(start.duration_s, 3) for start in reversed(report.starts)]


def test_pods_that_are_added_later_are_a_start_of_their_own(tmp_path: Path) -> None:
    """A set scaled up a day later was one start that lasted a day."""
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"uid-{rank}", rank, rank // 2 * 24 * HOUR_S + rank)
    report = report_of(tmp_path)
    assert durations_of(report) == [21, 21]
    assert [start.ranks for start in report.starts] == [2, 2]
    assert all(start.complete for start in report.starts)
    assert kinds_of(report) == ["run-of-same-name"]


@pytest.mark.parametrize("apart_s", [200, HOUR_S])
def test_pods_that_a_rolling_restart_replaces_are_starts(tmp_path: Path, apart_s: float) -> None:
    """The whole restart was one start, and lasted as long as all of it."""
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0)
        at_s = 24 * HOUR_S + (3 - rank) * apart_s
        write_pod(tmp_path, f"train-{rank}", f"b{rank}", rank, at_s)
    report = report_of(tmp_path)
    assert durations_of(report) == [20] * 5
    assert kinds_of(report) == ["run-of-same-name"] * 4


def test_one_pod_that_is_replaced_while_others_work_is_a_start(tmp_path: Path) -> None:
    """It was the others' start, which lasted a day then, and the first pod an earlier try."""
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0)
    write_pod(tmp_path, "train-2", "b2", 2, 24 * HOUR_S)
    report = report_of(tmp_path)
    assert durations_of(report) == [20, 20]
    assert kinds_of(report) == ["run-of-same-name"]


def test_a_late_pod_that_the_others_wait_for_is_of_their_start(tmp_path: Path) -> None:
    for rank in range(3):
        add_rank(tmp_path, f"train-{rank}", f"uid-{rank}", rank, 0, step_s=HOUR_S + 20)
    write_pod(tmp_path, "train-3", "uid-3", 3, HOUR_S)
    report = report_of(tmp_path)
    assert (durations_of(report), kinds_of(report)) == ([HOUR_S + 20], [])


def test_a_pod_that_is_made_again_before_its_step_is_of_the_start(tmp_path: Path) -> None:
    """Evicted: the others were at work, but the start was not over."""
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0, until_s=10 if rank == 3 else 20)
    write_pod(tmp_path, "train-3", "b3", 3, HOUR_S)
    report = report_of(tmp_path)
    assert (durations_of(report), kinds_of(report)) == ([HOUR_S + 20], ["earlier-try"])


@pytest.mark.parametrize("when_s", [-60, 60])
@pytest.mark.parametrize("step_s", [None, 400])
def test_ranks_that_start_again_for_a_new_pod_keep_it(
    tmp_path: Path, when_s: float, step_s: float | None
) -> None:
    """As elastic jobs do, as soon as a pod is gone, or when its successor comes."""
    at_s = 24 * HOUR_S
    for rank in range(4):
        write_pod(tmp_path, f"train-{rank}", f"a{rank}", rank, 0)
        if rank < 3:
            add_rank(tmp_path, f"train-{rank}", f"a{rank}", rank, at_s + when_s, step_s=step_s)
    write_pod(tmp_path, "train-3", "b3", 3, at_s)
    report = report_of(tmp_path)
    assert [(start.attempt, start.ranks) for start in report.starts] == [(1, 4), (None, 4)]
    # Rank 3, which comes to no barrier, does not decide when an attempt with barriers began.
    began_s = at_s + (when_s if step_s else min(when_s, 0))
    assert report.start.began_unix_s - report.starts[1].began_unix_s == began_s
    assert "run-of-same-name" not in kinds_of(report)


def test_a_pod_with_a_rank_that_waits_is_not_at_work(tmp_path: Path) -> None:
    for rank in range(2):
        write_pod(tmp_path, "train-0", "a0", rank, 0)
    add_rank(tmp_path, "train-0", "a0", 2, 0)
    write_pod(tmp_path, "train-1", "a1", 3, HOUR_S)
    assert len(report_of(tmp_path).starts) == 1


def test_pods_that_tell_moments_alone_are_not_at_work(tmp_path: Path) -> None:
    """As `bootseer start` without parts: nobody knows when these begin to work."""
    for number in range(3):
        about = {"k8s__pod__name": f"train-{number}", "k8s__pod__uid": f"u{number}"}
        about["k8s__namespace__name"] = "team"
        file = EventFile(f"n{number}", None, bootseer__job_uid="team/train", **about)
        file.point("start", 200.0 * number).write(tmp_path)
    assert len(report_of(tmp_path).starts) == 1


def test_clocks_that_are_a_minute_apart_make_no_start(tmp_path: Path) -> None:
    """Nodes' clocks are raw where runs are told apart: one looks done before the other began."""
    for rank in range(2):
        write_pod(tmp_path, f"train-{rank}", f"uid-{rank}", rank, 60 * rank)
    assert len(report_of(tmp_path).starts) == 1


def test_a_pod_that_does_not_know_its_uid_joins_its_import(tmp_path: Path) -> None:
    """A container's id, by which its events know the place then, is no other pod."""
    for rank in range(2):
        about = {"k8s__pod__name": f"train-{rank}", "k8s__namespace__name": "team"}
        about["bootseer__job_uid"] = "team/train"
        EventFile(f"n{rank}", None, **about, k8s__pod__uid=f"uid-{rank}").span(
            "schedule", 0, 2
        ).write(tmp_path)
        for at_s, name in ((5, "deps.install"), (10, "imports")):  # two containers of the pod
            place = f"{at_s + rank:064x}"
            EventFile(f"n{rank}", rank, **about, container__id=place).span(
                name, at_s, at_s + 4
            ).write(tmp_path)
    report = report_of(tmp_path)
    assert len(report.starts) == 1
    assert kinds_of(report) == []


def test_a_launcher_with_a_random_name_goes_with_the_workers_it_came_with(tmp_path: Path) -> None:
    for run in range(2):
        at_s = HOUR_S * run
        write_pod(tmp_path, f"pi-launcher-x{run}", f"launcher-{run}", 2, at_s)
        for rank in range(2):
            write_pod(tmp_path, f"pi-worker-{rank}", f"{run}{rank}", rank, at_s + 1 + rank)
    report = report_of(tmp_path)
    assert [start.ranks for start in report.starts] == [3, 3]
    assert [start.duration_s for start in report.starts] == [pytest.approx(22)] * 2


def test_a_run_has_one_trace_id_whatever_is_read_after_it(tmp_path: Path) -> None:
    for run in range(2):
        for rank in range(2):
            write_pod(tmp_path, f"t-{rank}", f"uid-{run}-{rank}", rank, HOUR_S * run)
    two = {start.trace_id for start in load([str(tmp_path)]).starts}
    for rank in range(2):
        write_pod(tmp_path, f"t-{rank}", f"uid-2-{rank}", rank, HOUR_S * 2)
    assert two < {start.trace_id for start in load([str(tmp_path)]).starts}


def made_by(kind: str, run: int, name: str) -> list[dict[str, Any]]:
    """What kubectl shows of a run's pod: owner, times, and the variables that `inject` writes."""
    at = f"2026-03-01T{10 + run}:00:00Z"
    label = "ray.io/cluster" if kind == "RayCluster" else "training.kubeflow.org/job-name"
    field = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    space = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    pod = {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"pod-{run}-{name}",
            "creationTimestamp": at,
            "labels": {label: "train"},
            "ownerReferences": [
                {"kind": kind, "name": "train", "uid": f"{kind}-{run}", "controller": True}
            ],
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {
                    "name": "c",
                    "env": [
                        {"name": "BOOTSEER_JOB_NAMESPACE", "valueFrom": space},
                        {"name": "BOOTSEER_JOB_NAME", "valueFrom": field},
                        {
                            "name": "BOOTSEER_JOB_UID",
                            "value": "$(BOOTSEER_JOB_NAMESPACE)/$(BOOTSEER_JOB_NAME)",
                        },
                    ],
                }
            ],
        },
        "status": {},
    }
    event = {
        "kind": "Event",
        "metadata": {"name": f"e{run}{name}", "creationTimestamp": at},
        "involvedObject": {"kind": "Pod", "uid": f"pod-{run}-{name}"},
        "reason": "Scheduled",
        "message": "placed",
        "firstTimestamp": f"2026-03-01T{10 + run}:00:05Z",
    }
    return [pod, event]


@pytest.mark.parametrize("kind", ["PyTorchJob", "RayCluster"])
def test_imported_runs_are_told_apart_by_what_made_their_pods(kind: str, tmp_path: Path) -> None:
    """Pods of a RayCluster have random names, so that no name comes again; and what a pod wrote
    itself joins the run that its import was of."""
    items = [
        item
        for run in range(2)
        for name in ("head", "worker")
        for item in made_by(kind, run, f"train-{name}-x{run}" if kind == "RayCluster" else name)
    ]
    (tmp_path / "cluster.json").write_text(json.dumps({"kind": "List", "items": items}))
    folder = tmp_path / "events"
    arguments = [str(tmp_path / "cluster.json"), "--events", str(folder)]
    result = CliRunner().invoke(k8s_command, arguments)
    assert result.exit_code == 0, result.output
    report = report_of(folder)
    assert [start.processes for start in report.starts] == [2, 2]
    pods = [item for item in items if item["kind"] == "Pod"]
    for number, pod in enumerate(pods):
        file = EventFile(
            "n1",
            number % 2,
            trace=events.trace_from_environment({"BOOTSEER_JOB_UID": "team/train"})[0] or "",
            k8s__pod__name=pod["metadata"]["name"],
            k8s__pod__uid=pod["metadata"]["uid"],
            k8s__namespace__name="team",
            bootseer__job_uid="team/train",
        )
        hour = "2026-03-01T10:00:10Z" if number < 2 else "2026-03-01T11:00:10Z"
        begin_s = (events_ns(hour) - 1_700_000_000 * 10**9) / 1e9
        file.span("imports", begin_s, begin_s + 5).write(folder)
    report = report_of(folder)
    assert [start.processes for start in report.starts] == [4, 4]
    assert all(start.duration_s < 60 for start in report.starts)


def events_ns(stamp: str) -> int:
    return lines.parse_time_ns(stamp, "iso", 0, 0) or 0


def test_the_same_object_that_makes_its_pods_again_is_one_run(tmp_path: Path) -> None:
    """All pods of a job were replaced by its operator: its owner's uid says that it is one run."""
    for number in range(2):
        about = {
            "k8s__pod__name": "train-0",
            "k8s__pod__uid": f"uid-{number}",
            "k8s__namespace__name": "team",
            "bootseer__job_uid": "team/train",
            "bootseer__run_uid": "job-1",
        }
        EventFile("n", 0, **about).span("imports", 30.0 * number, 30.0 * number + 20).write(
            tmp_path
        )
    report = report_of(tmp_path)
    assert len(report.starts) == 1
    assert kinds_of(report) == ["earlier-try"]
