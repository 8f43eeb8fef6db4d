"""A start that is told to end, in each of its phases, ends whole; the job is not started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands.start import Place, nothing_left, part_process, processes_of_parts
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
# What a job with a trap does: it tells which signal it got, then goes with a code of its own.
TRAP = "trap 'touch got-term; exit 5' TERM; touch began; while :; do sleep 0.02; done\n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.settings()
    yield place
    nothing_left(place)


def ended(place: Place, process: subprocess.Popen, number: int) -> bytes:
    """Send the signal, see that all ends, and return what was said."""
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not (place.path / "job-began").exists()
    assert list(processes_of_parts(place)) == []
    return errors


@pytest.mark.parametrize("number", ENDING)
def test_during_the_install_under_a_part(place: Place, number: int) -> None:
    place.extra("touch began; sleep 600\n")
    process = place.begin()
    until((place.path / "began").exists)
    assert ended(place, process, number) == b""
    assert place.installs == 1


def test_the_install_command_hears_of_it(place: Place) -> None:
    place.extra(TRAP)
    process = place.begin()
    until((place.path / "began").exists)
    ended(place, process, signal.SIGTERM)
    assert (place.path / "got-term").exists()


def test_during_the_plain_install(place: Place) -> None:
    place.settings(more="enabled = false")
    place.extra(TRAP)
    process = place.begin()
    until((place.path / "began").exists)
    ended(place, process, signal.SIGTERM)
    assert (place.path / "got-term").exists()


def test_during_a_part_that_hangs(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        hanging.settimeout(60)
        place.store = f"webhdfs://127.0.0.1:{hanging.getsockname()[1]}/snapshots"
        place.store_timeout_s = 600.0
        place.settings()
        process = place.begin()
        with hanging.accept()[0]:  # it is asked before anything is installed
            ended(place, process, signal.SIGTERM)
    assert place.installs == 0


def test_while_waiting_for_another_node(place: Place) -> None:
    place.settings(more="wait = 'always'")
    place.extra("touch began; while [ ! -e go-on ]; do sleep 0.02; done\n")
    other = place.begin(("true",))
    until((place.path / "began").exists)
    # Another node has a cache of its own; on this one the target's lock would come first.
    place.environ["XDG_CACHE_HOME"] = str(place.path / "other-cache")
    process = place.begin()
    waiting = "deps.install.wait"
    until(lambda: any(waiting in f.read_text() for f in place.events.glob("*.jsonl")))
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    (place.path / "go-on").touch()
    other.communicate(timeout=60)
    assert other.returncode == 0
    assert place.installs == 1


def test_during_the_job_it_is_the_jobs(place: Place) -> None:
    process = place.begin(("sh", "-c", TRAP))
    until((place.path / "began").exists)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 5


def test_a_signal_ignored_before_us_stays_ignored(place: Place) -> None:
    place.extra("touch began; while [ ! -e go-on ]; do sleep 0.02; done\n")
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *place.command, "touch", "job-began"],
        cwd=place.path,
        env=place.full_environ,
        stdout=subprocess.DEVNULL,
    )
    until((place.path / "began").exists)
    os.kill(process.pid, signal.SIGHUP)
    (place.path / "go-on").touch()
    assert process.wait(timeout=60) == 0
    assert (place.path / "job-began").exists()


def test_a_killed_start_takes_its_part_along(place: Place) -> None:
    place.module("zstandard", "import time; open('began', 'w'); time.sleep(600)")
    process = place.begin()
    until((place.path / "began").exists)
    part_process(place)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not list(processes_of_parts(place)))


def test_ignored_child_signals_hide_no_exit_code(place: Place) -> None:
    place.extra("exit 3\n")
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignore += "os.execvp(sys.argv[1], sys.argv[1:])"
    for enabled in ("true", "false"):
        place.settings(more=f"enabled = {enabled}")
        command = [place.command[0], "-c", ignore, *place.command, "true"]
        done = subprocess.run(command, cwd=place.path, env=place.full_environ, check=False)
        assert done.returncode == 3
