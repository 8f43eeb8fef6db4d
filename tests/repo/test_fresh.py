"""What `make fresh` reads and writes: configuration, pytest's summaries, its result file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.fresh import __main__ as fresh
from tools.fresh import configuration, result
from tools.fresh.result import Counts, Line
from tools.fresh.root import BareRoot

SUMMARY = "==== 2 failed, 4902 passed, 3 deselected, 1 error, 4 rerun in 1140.12s (0:19:00) ====="
DEBOOTSTRAP = Line("debootstrap", "root", "passed", 60)
TESTS = Line("make test", "stranger", "passed", 700, Counts(4902, 0, 3))


def test_errors_of_fixtures_count_as_failures() -> None:
    assert result.read_counts(f"....\n{SUMMARY}\n") == Counts(4902, 3, 4)
    assert result.read_counts("=== 7 passed in 0.12s ===") == Counts(7, 0, 0)


def test_the_last_summary_counts() -> None:
    """A failing test may print another run's."""
    assert result.read_counts(f"=== 1 passed in 1.00s ===\n{SUMMARY}") == Counts(4902, 3, 4)


@pytest.mark.parametrize("output", ["", "setup: failed", "==== FAILURES ====", "9 passed"])
def test_output_without_a_summary_has_no_counts(output: str) -> None:
    assert result.read_counts(output) is None


@pytest.mark.parametrize(
    ("code", "counts", "tests", "outcome"),
    [
        (0, None, False, "passed"),
        (1, None, False, "FAILED"),
        (0, Counts(5, 0, 2), True, "passed"),
        (0, Counts(5, 1, 0), True, "FAILED"),
        (1, Counts(5, 0, 0), True, "FAILED"),
        (0, Counts(0, 0, 0), True, "FAILED"),
        (0, None, True, "FAILED"),
    ],
)
def test_a_step_of_tests_passes_only_when_tests_did(
    code: int, counts: Counts | None, tests: bool, outcome: str
) -> None:
    assert result.judge(code, counts, tests=tests) == outcome


def test_a_result_reads_as_it_was_written() -> None:
    text = result.to_text("0a1b2c", [DEBOOTSTRAP, TESTS], wanted=2)
    assert text.splitlines() == [
        "0a1b2c",
        "debootstrap | root | passed | 60 s",
        "make test | stranger | passed | 700 s | 4902 passed, 0 failed, 3 second tries",
        "passed",
    ]
    assert result.from_text(text) == ("0a1b2c", [DEBOOTSTRAP, TESTS], "passed")


def test_a_missing_or_failed_step_fails_the_whole() -> None:
    failed = Line("make demo", "root", "FAILED", 3)
    assert result.to_text("0a", [DEBOOTSTRAP], wanted=2).endswith("\nFAILED\n")
    assert result.to_text("0a", [DEBOOTSTRAP, failed], wanted=2).endswith("\nFAILED\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0a1b2c",
        "0a\nmake demo | root | passed | 3 s",
        "0a\nmake demo | root | fine | 3 s\npassed",
        "0a\nmake demo | root | passed | soon\npassed",
        "0a\nmake test | root | passed | 3 s | all of them\npassed",
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"result begins|not a step|not counts|values to unpack"):
        result.from_text(text)


def test_all_of_the_commands_run_as_both_users() -> None:
    assert {(step.command.split()[1], step.user) for step in fresh.STEPS} == {
        ("demo", "root"),
        ("test", "root"),
        ("k8s-test", "root"),
        ("demo", "stranger"),
        ("test", "stranger"),
    }
    everything = Path(fresh.TREE, ".ci/run").read_text(encoding="utf-8")
    assert fresh.ALL_TESTS in everything


def test_what_pip_names_is_found() -> None:
    listed = "global.find-links='/a/wheels https://x.example/w'\nglobal.cert='/a/ca.crt'\n"
    listed += ":env:.extra-index-url='file:///b%20c/simple/ https://x.example/simple'\n"
    values = configuration.pip_values(listed)
    paths = [path for name, value in values for path in configuration.named_paths(name, value)]
    assert paths == ["/a/wheels", "/a/ca.crt", "/b c"]
    environ = {"PIP_FIND_LINKS": "/a", "PIP_CACHE_DIR": "/mine", "HOME": "/root"}
    assert configuration.pip_variables(environ, values) == {
        "PIP_FIND_LINKS": "/a",
        "PIP_CERT": "/a/ca.crt",
    }


def test_what_this_machine_configures_is_there() -> None:
    found = configuration.read_configuration()
    assert all(os.path.exists(path) for path in (*found.paths, *found.in_home.values()))
    below = [(a, b) for a in found.paths for b in found.paths if b.startswith(f"{a}/")]
    assert below == []


def test_a_folder_of_somebody_elses_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    root = BareRoot(tmp_path, configuration.read_configuration(), keep=False)
    with (
        (tmp_path / "log").open("wb") as log,
        root,
        pytest.raises(RuntimeError, match="neither empty"),
    ):
        root.make(log)
    assert (tmp_path / "mine").read_text() == "keep me"


def test_the_committed_result_is_of_all_steps_and_passed() -> None:
    revision, lines, last = result.from_text(fresh.RESULT.read_text(encoding="utf-8"))
    assert len(revision) == 40
    steps = [(fresh.GROUND, "root"), *((step.command, step.user) for step in fresh.STEPS)]
    assert [(line.command, line.user) for line in lines] == steps
    assert {line.outcome for line in lines} == {result.PASSED}
    assert [line.counts is not None for line in lines[1:]] == [step.tests for step in fresh.STEPS]
    assert all(line.counts.second_tries == 0 for line in lines if line.counts is not None)
    assert last == result.PASSED
