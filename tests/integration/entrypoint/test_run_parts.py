"""What `run` sees inside a command: pip's own phases, and import times."""

from __future__ import annotations

import sys
import zipfile

import pytest

from tests.support.commands.run import clean_env, lines, named, run, wrapped

pytestmark = pytest.mark.slow

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "tinything-1.0-py3-none-any.whl"
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tinything.py", "import time\ntime.sleep(0.2)\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", f"tinything.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return path


def install(wheel, *more: str) -> tuple[str, ...]:
    source = ("--no-index", "--find-links", str(wheel.parent), "tinything")
    return (*PIP, "install", "--target", str(wheel.parent / "out"), *more, *source)


def test_pips_phases_lie_below_the_run(tmp_path, wheel):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = clean_env(TMPDIR=str(temporary))
    done = run(
        wrapped(*install(wheel), options=("--phase", "deps.install")), tmp_path / "events", env=env
    )
    assert done.returncode == 0, done.stderr
    outer = named(tmp_path / "events", "deps.install", "begin")[0]
    parts = [e for e in lines(tmp_path / "events") if e["name"].startswith("deps.install.")]
    names = {e["name"] for e in parts}
    assert {"deps.install.resolve", "deps.install.install"} <= names
    assert {e["parent_span_id"] for e in parts} == {outer["span_id"]}
    end = named(tmp_path / "events", "deps.install", "end")[0]
    for event in parts:
        # pip's clock has milliseconds.
        assert outer["time_unix_nano"] - 2e6 <= event["time_unix_nano"]
        assert event["time_unix_nano"] <= end["time_unix_nano"] + 2e6
    assert not list(temporary.iterdir()), "the private log is gone"


def test_a_users_own_log_stays_theirs(tmp_path, wheel):
    log = tmp_path / "mine.log"
    done = run(wrapped(*install(wheel)), tmp_path / "events", env=clean_env(PIP_LOG=str(log)))
    assert done.returncode == 0
    assert "tinything" in log.read_text()


def test_a_log_that_the_command_removed_leaves_no_phase_open(tmp_path):
    command = tmp_path / "pip"
    command.write_text('#!/bin/sh\nrm "$PIP_LOG" && echo removed\n')
    command.chmod(0o755)
    done = run(wrapped(str(command)), tmp_path / "events")
    assert (done.returncode, done.stdout) == (0, b"removed\n")
    assert len(named(tmp_path / "events", "job", "end")) == 1


def test_a_failing_pip_keeps_its_code_and_words(tmp_path, wheel):
    command = (*PIP, "install", "--no-index", "no-such-thing-here")
    plain, ours = run(list(command)), run(wrapped(*command), tmp_path / "events")
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, plain.stdout, plain.stderr)


def test_import_times_are_recorded_when_asked_for(tmp_path, wheel):
    (tmp_path / "slowthing.py").write_text("import time\ntime.sleep(0.2)\n")
    env = clean_env(PYTHONPATH=str(tmp_path))
    command = (sys.executable, "-c", "import slowthing; print('done')")
    done = run(wrapped(*command), tmp_path / "without", env=env)
    assert not [e for e in lines(tmp_path / "without") if e["name"].startswith("imports")]
    done = run(wrapped(*command, options=("--import-times",)), tmp_path / "events", env=env)
    assert (done.stdout, done.stderr) == (b"done\n", b"")
    names = {e["name"] for e in lines(tmp_path / "events")}
    assert "imports.slowthing" in names
