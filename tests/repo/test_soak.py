"""`tools.soak` on a small repository: what it runs, keeps, refuses and calls stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import soak

pytestmark = pytest.mark.slow

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true")
"""
GOOD = """
import pytest
from tests.helper import NUMBER

@pytest.mark.soak
@pytest.mark.parametrize("n", ["one", "two words"])
def test_good(n):
    assert NUMBER == 1
"""
BAD = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("in its end")

@pytest.mark.soak
def test_bad():
    assert 1 == 2

@pytest.mark.soak
def test_bad_end(broken):
    pass
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two modules of long counts, one of which fails, and the tool itself, committed."""
    for folder in ("tests", "tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    shutil.copy(soak.__file__, tmp_path / "tools/soak.py")
    texts = {"conftest": CONFTEST, "helper": "NUMBER = 1\n", "test_good": GOOD, "test_bad": BAD}
    for name, text in texts.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  soak\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(where: Path, *words: str) -> str:
    about = ["-c", "user.name=n", "-c", "user.email=e", "-c", "core.excludesFile="]
    done = subprocess.run(
        ["git", *about, *words], cwd=where, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(where: Path) -> str:
    git(where, "add", "-A")
    git(where, "commit", "-qm", "m")
    return git(where, "rev-parse", "--short", "HEAD")


def run(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.soak", "--workers=0", *words],
        cwd=where,
        # Only what it needs: plugins of large packages take seconds each time.
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
        },
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kept(where: Path) -> dict[str, soak.Result]:
    return soak.Results.read(where / "tests/soak-result.txt").by_module


def test_every_module_is_kept_with_its_revision_and_outcomes(repository: Path) -> None:
    revision = git(repository, "rev-parse", "--short", "HEAD")
    done = run(repository)
    assert done.returncode == 1, done.stdout
    assert "test_bad::test_bad: failed" in done.stdout
    results = kept(repository)
    assert {result.revision for result in results.values()} == {revision}
    assert [outcome.test for outcome in results["test_good"].outcomes] == [
        "test_good[one]",
        "test_good[two words]",
    ]
    assert results["test_good"].passed
    failed = {o.test: o.passed for o in results["test_bad"].outcomes}
    assert failed == {"test_bad": False, "test_bad_end": False}
    first = (repository / "tests/soak-result.txt").read_text().splitlines()[0]
    assert first.startswith("make soak: 2 FAILED, 4 tests in 2 modules")
    assert first.endswith(f"of revision {revision}")


def test_it_goes_on_where_it_stopped(repository: Path) -> None:
    assert "test_good: 2 tests" in run(repository, "test_good").stdout
    text = (repository / "tests/soak-result.txt").read_text()
    assert text.startswith("make soak: IN PART, 2 tests not taken yet; passed, 2 tests in 1 mod")
    assert "test_bad: not taken yet\n  not taken yet  test_bad\n" in text
    said = run(repository).stdout
    assert "test_good: 2 tests" not in said  # of this revision already
    assert "test_bad: 2 tests" in said
    assert "test_bad: 2 tests" in run(repository).stdout  # it failed, so again


def test_a_changed_tree_is_refused(repository: Path) -> None:
    for name in ("tests/helper.py", "new.py"):
        (repository / name).write_text("NUMBER = 1  # as before\n")
        done = run(repository, "test_good")
        assert done.returncode == 2
        assert "commit first" in done.stdout
        assert name in done.stdout
        assert not (repository / "tests/soak-result.txt").exists()
        git(repository, "stash", "-qu")


def test_a_result_ages_with_what_its_tests_reach(repository: Path) -> None:
    run(repository, "test_good")
    (repository / "README.md").write_text("a document\n")
    commit(repository)
    assert soak.revision_here(repository) == kept(repository)["test_good"].revision
    (repository / "tests/test_bad.py").write_text(BAD + "\n# more\n")
    commit(repository)
    assert "STALE" not in run(repository, "--list").stdout
    (repository / "tests/helper.py").write_text("NUMBER = 1  # reached by an import\n")
    revision = commit(repository)
    assert "STALE" in run(repository, "--list").stdout
    assert "test_good: 2 tests" in run(repository, "--stale").stdout
    assert kept(repository)["test_good"].revision == revision


def test_the_committed_result_lists_the_soak_tests_that_exist() -> None:
    """A test that it does not list was never thought of: `python -m tools.soak --note` lists it."""
    assert soak.problems(soak.Results.read(), soak.collect_tests()) == []


def test_new_tests_are_noted_and_gone_ones_are_dropped() -> None:
    outcomes = (soak.Outcome("test_a", True, 1.0), soak.Outcome("test_gone", True, 1.0))
    result = soak.Result("test_m", "abc", "now", "Python 3, kernel 6", 2.0, "0", outcomes)
    exist = {"test_m": ["test_a", "test_b"], "test_n": ["test_c"]}
    known = soak.Results({"test_m": result, "test_old": result}).known(exist)
    assert soak.problems(known, exist) == []
    assert known.untaken == {"test_m": ["test_b"], "test_n": ["test_c"]}
    assert [outcome.test for outcome in known.by_module["test_m"].outcomes] == ["test_a"]


def test_what_is_missing_or_gone_is_named() -> None:
    outcomes = (soak.Outcome("test_a", True, 1.0), soak.Outcome("test_gone", False, 1.0))
    result = soak.Result("test_m", "abc", "now", "Python 3, kernel 6", 2.0, "0", outcomes)
    exist = {"test_m": ["test_a", "test_b"], "test_n": ["test_c"]}
    assert soak.problems(soak.Results({"test_m": result}), exist) == [
        "test_m::test_b: not in the result",
        "test_m::test_gone: no such test",
        "test_m::test_gone: failed",
        "test_n::test_c: not in the result",
    ]


def test_a_text_that_is_no_result_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("make soak\n\n....  [100%]\n")
    with pytest.raises(ValueError, match="not a result of"):
        soak.Results.read(tmp_path / "r")


def test_programs_named_by_a_text_are_reached() -> None:
    tests = soak.ROOT / "tests"
    reached = set(soak._reached(tests / "faults/blocks/test_cache_crash.py", soak.ROOT))
    assert tests / "support/programs/cache_worker.py" in reached
    assert soak.ROOT / "bootseer/blocks/cache/node_cache.py" in reached
    started = set(soak._reached(tests / "faults/fuse/test_handover.py", soak.ROOT))
    assert tests / "support/programs/fuse_supervised.py" in started
