"""What a test run says about the tests that it leaves out, that `.ci/run` allows none, and that
no test has a second try."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import conftest
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

CONFTEST = ROOT / "tests" / "conftest.py"
TESTS = """
import pytest
def test_one(): pass
@pytest.mark.root
def test_mounts(): pass
@pytest.mark.debian("chromium")
def test_page(): pass
@pytest.mark.soak
def test_long(): pass
@pytest.mark.slow
def test_slow(): pass
"""
FAILS_ONCE = """
import pathlib
import pytest
@pytest.mark.root
@pytest.mark.slow
def test_fails_once():
    tries = pathlib.Path(__file__).with_name("tries")
    with tries.open("a") as file:
        file.write("x")
    assert len(tries.read_text()) > 1
"""
INI = """
[pytest]
addopts = -p no:cacheprovider
markers =
  root
  debian
  soak
  slow
"""
# In every worker, after conftest.py: the one thing that stands for another user.
AS_USER = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "has_mount_privilege"):
            plugin.has_mount_privilege = lambda: {privileged}
"""
DISK = """
import shutil, types
shutil.disk_usage = lambda path: types.SimpleNamespace(total=100 << 30, free={free_bytes})
"""


def run(tmp_path: Path, *options: str, user: int, tests: str = TESTS) -> tuple[int, list[str]]:
    """Run the small tests above under our conftest as if by this user; return the lines printed."""
    (tmp_path / CONFTEST.name).write_text(CONFTEST.read_text(encoding="utf-8"))
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "as_user.py").write_text(AS_USER.format(privileged=user == 0))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist.plugin", *options],
        cwd=tmp_path,
        env={
            **environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
            "PYTEST_PLUGINS": "as_user",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those of large packages take seconds
        },
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_plain_user_is_told_what_was_left_out(tmp_path: Path, workers: str) -> None:
    code, said = run(tmp_path, "-n", workers, user=1000)
    assert code == 0
    names = ["test_some.py::test_mounts", "test_some.py::test_page"]
    assert [line for line in said if line.startswith("test_some.py::")] == names
    assert said[-2] == "2 tests left out for want of privilege"
    assert "2 passed" in said[-1]


def test_a_deselected_test_fails_where_none_is_allowed(tmp_path: Path) -> None:
    """Whether for want of privilege or by -k."""
    chosen = ("-n", "2", "--forbid-deselect", "-k", "not one")
    code, said = run(tmp_path, *chosen, user=1000)
    assert code == 1
    names = ["test_some.py::test_mounts", "test_some.py::test_one", "test_some.py::test_page"]
    assert sorted(line for line in said if line.startswith("test_some.py::")) == names
    assert said[-2] == "3 tests deselected"
    assert "1 passed" in said[-1]


def test_either_kind_alone_is_enough(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--forbid-deselect", user=1000)
    assert (code, said[-2]) == (1, "2 tests deselected")
    code, said = run(tmp_path, "--forbid-deselect", "-k", "not one", user=0)
    assert (code, said[-2]) == (1, "1 tests deselected")


def test_with_every_privilege_all_but_the_long_counts_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-n", "2", "--forbid-deselect", user=0)
    assert code == 0
    assert "4 passed" in said[-1]
    assert "deselected" not in said[-1]


def test_fast_and_soak_choose_their_own(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, "--fast", user=0)[1][-1]
    assert "1 passed" in run(tmp_path, "--soak", user=0)[1][-1]


def test_unit_tests_need_nothing_that_fast_leaves_out() -> None:
    words = ["--collect-only", "-q", "--fast", "--forbid-deselect", "tests/unit"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_no_test_has_a_second_try(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-n", "2", user=0, tests=FAILS_ONCE)
    assert code == 1
    assert "1 failed" in said[-1]
    assert (tmp_path / "tries").read_text() == "x"


def test_nothing_asks_for_second_tries() -> None:
    files = ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"]
    for file in (*(ROOT / name for name in files), *CONFTEST.parent.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for word in ("--re" + "runs", "rerun" + "failures", "mark." + "flaky"):
            assert word not in text, f"{file} asks for second tries: {word}"


@dataclass
class Item:
    """What `spread` looks at of a test."""

    nodeid: str
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> bool:
        return name == "slow" and "slow" in self.nodeid


def test_only_one_worker_starts_a_kubernetes_or_an_hdfs() -> None:
    wanted = {"k8s": ("k8s", "namespace"), "own": ("own_hdfs",), "files": ("hdfs", "hdfs_folder")}
    names = ["a", "own", "b_slow", "files", "c", "k8s", "d_slow", "e"]
    items = [Item(f"{n}::{k}", wanted.get(n, ())) for n in names for k in range(7)]
    for workers in (2, 3, 4):
        given = conftest.spread(items, workers)  # type: ignore[arg-type]
        assert sorted(item.nodeid for item in given) == sorted(item.nodeid for item in items)
        left, firsts = list(given), []
        for number in range(workers):
            size = len(left) // (workers - number)
            part, left = left[:size], left[size:]
            firsts.append({item.nodeid.partition("::")[0] for item in part})
        assert "k8s" in firsts[0]
        assert {"own", "files"} <= firsts[1]
        assert sum(not found.isdisjoint(wanted) for found in firsts) == 2
        assert "_slow" not in given[-1].nodeid


def test_a_disk_that_is_nearly_full_is_told_before_any_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Injected: what the system says of the disk."""
    for free_bytes, options, expected in (
        (23 << 30, (), pytest.ExitCode.OK),
        ((23 << 30) - 1, (), pytest.ExitCode.USAGE_ERROR),
        ((23 << 30) - 1, ("-n", "2"), pytest.ExitCode.USAGE_ERROR),
        (0, ("--fast",), pytest.ExitCode.OK),
    ):
        (tmp_path / "disk.py").write_text(DISK.format(free_bytes=free_bytes))
        code, said = run(tmp_path, "-p", "disk", *options, user=0)
        assert code == expected
        error = capfd.readouterr().err
        assert error.count("has 23551 MiB free, tests need 23552: image caches leave 15%") == (
            expected == pytest.ExitCode.USAGE_ERROR
        )
        assert any("passed" in line for line in said) == (expected == pytest.ExitCode.OK)
