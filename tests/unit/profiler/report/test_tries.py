"""A node or rank that ran twice within one start: the last try counts, the earlier is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bootseer.profiler.history.collect import record_of
from bootseer.profiler.render import summary_sentences
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Problem, Report
from tests.support.samples.event_files import EventFile


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def earlier(report: Report) -> list[tuple[int, str]]:
    return [(p.count, p.detail) for p in report.problems if p.kind == "earlier-try"]


PHASES = [("image.pull", 10), ("deps.install", 10), ("imports", 10), ("model.init", 10)]


def tried(file: EventFile, begin_s: float, until_s: float | None = None) -> EventFile:
    """All phases and a first step at `begin_s` + 40, or killed at `until_s`."""
    at_s = begin_s
    for name, took_s in PHASES:
        over = until_s is not None and at_s + took_s > until_s
        file.span(name, at_s, None if over else at_s + took_s)
        at_s += took_s
        if over:
            return file
    return file.point("first_step", at_s)


def restarted(folder: Path, **second: object) -> Report:
    """8 nodes of 2 ranks; node n5 is killed in model.init and comes back."""
    for rank in range(16):
        node = f"n{rank // 2}"
        if node != "n5":
            tried(EventFile(node, rank, bootseer__world_size=16), 0).write(folder / "1")
            continue
        tried(EventFile(node, rank, bootseer__world_size=16), 0, 35).write(folder / "1")
        file = EventFile(node, rank, bootseer__world_size=16, **second)
        tried(file, 60).write(folder / "2")
    return report_of(folder)


def test_a_wrapper_that_was_killed_between_two_phases_was_an_earlier_try(tmp_path: Path) -> None:
    """No phase was cut off, but the command was, and what it had done is done again."""
    for rank in range(16):
        file = EventFile(f"n{rank // 2}", rank, bootseer__world_size=16)
        if rank // 2 == 5:
            file.span("job", 0, None).span("image.pull", 0, 10).span("imports", 10, 20)
            file.write(tmp_path)
            file = EventFile("n5", rank, bootseer__world_size=16)
            file.span("job", 40, None)
            tried(file, 40).write(tmp_path)
        else:
            tried(file.span("job", 0, None), 0).write(tmp_path)
    report = report_of(tmp_path)
    assert report.stragglers == ()
    assert [count for count, _ in earlier(report)] == [2]


def test_a_wrapper_that_goes_on_around_another_process_is_no_earlier_try(tmp_path: Path) -> None:
    """Its command has no end yet, and its child imports what it had imported itself."""
    wrapper = EventFile("n", 0).span("job", 0, None).span("imports", 0, 1)
    wrapper.span("deps.install", 1, 20).write(tmp_path)
    child = EventFile("n", 0).span("imports", 21, 30).span("model.init", 30, 40)
    child.point("first_step", 50).write(tmp_path)
    report = report_of(tmp_path)
    assert earlier(report) == []
    assert {p.name: p.max_s for p in report.phases}["imports"] == pytest.approx(10)


@pytest.mark.parametrize("second", [{}, {"bootseer__boot_id": "another"}])
def test_a_restarted_node_is_no_straggler(tmp_path: Path, second: dict[str, object]) -> None:
    """As found: two tries were added up, and gave a straggler in each phase."""
    report = restarted(tmp_path, **second)
    assert report.stragglers == ()
    assert earlier(report) == [
        (
            2,
            "an earlier try of ranks 10, 11 on n5, last in model.init, was left out: "
            "60.0 s were lost until the next one began",
        )
    ]
    assert report.start.complete
    assert report.start.duration_s == pytest.approx(100)
    assert report.killed == ()
    assert all(p.max_s == pytest.approx(10) for p in report.phases if p.p50_s)
    (start,) = load([str(tmp_path)]).starts
    assert [each.own_s for each in record_of(start).node_phases] == [pytest.approx(10)] * 32
    advice = summary_sentences.verdict(report).advice
    assert advice[0].startswith("an earlier try of ranks 10, 11 on n5")


def test_the_advice_names_the_try_of_the_very_node(tmp_path: Path) -> None:
    report = restarted(tmp_path)
    detail = "an earlier try on n50 was left out: 9.0 s were lost until the next one began"
    problems = (Problem("f", "earlier-try", 1, detail), *report.problems)
    advice = summary_sentences.verdict(replace(report, problems=problems)).advice
    assert advice[0].startswith("an earlier try of ranks 10, 11 on n5,")


def test_what_the_node_ran_before_its_ranks_goes_with_them(tmp_path: Path) -> None:
    """The wrapper's install, once a try and without a rank; the first one was not cut short."""
    for at_s, killed_s in ((0.0, 45.0), (60.0, None)):
        EventFile("a").span("deps.install", at_s, at_s + 20).write(tmp_path / str(at_s))
        file = EventFile("a", 0).span("imports", at_s + 20, at_s + 30)
        if killed_s is None:
            file.span("model.init", at_s + 30, at_s + 40).point("first_step", at_s + 40)
        else:
            file.span("model.init", at_s + 30, None)
        file.write(tmp_path / str(at_s))
    EventFile("a").span("image.pull", -5, 0).write(tmp_path)  # once for both
    report = report_of(tmp_path)
    found = {p.name: p.max_s for p in report.phases}
    assert found["deps.install"] == pytest.approx(20)
    assert found["imports"] == pytest.approx(10)
    assert found["image.pull"] == pytest.approx(5)
    ((count, detail),) = earlier(report)
    assert count == 2
    assert "of rank 0 on a, last in model.init" in detail


def test_three_tries(tmp_path: Path) -> None:
    tried(EventFile("a", 0), 0, 15).write(tmp_path / "1")
    tried(EventFile("a", 0), 20, 55).write(tmp_path / "2")
    tried(EventFile("a", 0), 60).write(tmp_path / "3")
    report = report_of(tmp_path)
    assert report.start.duration_s == pytest.approx(40)
    assert [count for count, _ in earlier(report)] == [2]


def test_a_try_that_failed_is_one_too(tmp_path: Path) -> None:
    file = EventFile("a", 0).span("imports", 0, 5).span("model.init", 5, 9, status="error")
    file.write(tmp_path / "1")
    file = EventFile("a", 0).span("imports", 20, 25).span("model.init", 25, 29)
    file.point("first_step", 30).write(tmp_path / "2")
    report = report_of(tmp_path)
    assert report.start.duration_s == pytest.approx(10)
    assert len(earlier(report)) == 1


def test_one_process_after_the_other_is_no_second_try(tmp_path: Path) -> None:
    """A script that prepares, the training, and a worker of it that imports again."""
    EventFile("a", 0).span("imports", 0, 5).span("deps.cache", 5, 6).write(tmp_path / "1")
    main = EventFile("a", 0).span("imports", 10, 15).span("model.init", 15, 20)
    main.span("compile", 20, None).write(tmp_path / "2")
    EventFile("a", 0).span("imports", 22, 24).write(tmp_path / "3")
    report = report_of(tmp_path)
    assert earlier(report) == []
    assert [k.phase for k in report.killed] == ["compile"]
    (imports,) = [p for p in report.phases if p.name == "imports"]
    assert imports.max_s == pytest.approx(12)


def test_pods_of_a_node_are_not_each_others_tries(tmp_path: Path) -> None:
    for number in range(2):
        about = {"k8s__pod__name": f"pod-{number}", "k8s__pod__uid": f"uid-{number}"}
        file = EventFile("n", **about).span("deps.install", 30 * number, 30 * number + 20)
        file.span("imports", 30 * number + 20, 30 * number + 25).write(tmp_path)
    assert earlier(report_of(tmp_path)) == []


def test_a_pod_that_was_made_again_under_its_name(tmp_path: Path) -> None:
    for number in range(2):
        about = {"k8s__pod__name": "train-0", "k8s__pod__uid": f"uid-{number}"}
        file = EventFile("n", 0, **about).span("imports", 30 * number, 30 * number + 20)
        file.write(tmp_path)
    ((_, detail),) = earlier(report_of(tmp_path))
    assert detail.startswith("an earlier try of rank 0 on n was left out: 30.0 s were lost")


def test_a_rank_killed_while_the_others_stepped_has_its_line(tmp_path: Path) -> None:
    for rank in range(8):
        tried(EventFile("a", rank), 0, 25 if rank == 6 else None).write(tmp_path)
    said = summary_sentences.verdict(report_of(tmp_path))
    assert "Rank 6 on a did not reach the first step (in imports since 20.0s)" in said.headline
