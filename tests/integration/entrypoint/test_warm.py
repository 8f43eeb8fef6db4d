"""`bootseer warm` without an image: a node made ready for `bootseer start`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.system import file_lock
from tests.support.commands.start import JOB_EXIT, Place
from tests.support.mounts.checkpoints import content, put_bytes, store_of
from tests.support.mounts.images import begun_with
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL = content(3_000_000)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.environ["BOOTSEER_RUNTIME"] = str(tmp_path / "run")
    put_bytes(store_of(tmp_path / "checkpoints"), "model.pt", MODEL, tmp_path)
    yield made
    made.end()
    until(lambda: not begun_with(f"BOOTSEER_EVENTS={made.events}"), "all has ended")


def configure(place: Place, more: str = "", deps: str = "") -> None:
    """Dependencies and a checkpoint that is copied, which needs no privilege, and kept."""
    url, kept = f"file://{place.path}/checkpoints/model.pt", place.path / "kept"
    lines = f'url = "{url}"\nto = "{place.path}/to"\ncache = "{kept}"\n{more}'
    place.settings(more=f"{deps}\n[checkpoint]\n{lines}")


def words(*more: str) -> list[str]:
    return [sys.executable, "-m", "bootseer", "warm", "--json", *more]


def warm(place: Place, *more: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        words(*more),
        cwd=place.path,
        env=place.full_environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    # Standard output has the result alone, whatever the install prints.
    return {part["part"]: part for part in json.loads(done.stdout)["parts"]}


def is_ready(parts: dict[str, Any]) -> dict[str, bool]:
    return {name: part["ready"] for name, part in parts.items()}


def kinds(place: Place) -> list[str]:
    starts = analysis.analyse(load([str(place.events)])).starts
    return [start.kind for start in starts[::-1]]


def test_a_start_on_a_warm_node_installs_and_fetches_nothing(place: Place) -> None:
    configure(place)
    assert is_ready(warm(place, "--status", code=1)) == {"deps": False, "checkpoint": False}
    assert place.installs == 0
    parts = warm(place)
    assert is_ready(parts) == {"deps": True, "checkpoint": True}
    assert parts["checkpoint"]["present_bytes"] == len(MODEL)
    assert is_ready(warm(place, "--status")) == {"deps": True, "checkpoint": True}
    place.forget_events()
    done = place.start()
    assert (done.returncode, done.stdout) == (JOB_EXIT, b"")
    assert (place.installs, place.fallbacks()) == (1, {})
    assert kinds(place) == ["standby"]


def test_the_snapshot_of_another_node_is_restored(place: Place) -> None:
    configure(place)
    warm(place)
    place.remove_installed()
    assert is_ready(warm(place, "--status", code=1)) == {"deps": False, "checkpoint": True}
    warm(place)
    assert (place.path / "site/module").read_bytes() == (place.path / "payload").read_bytes()
    assert place.installs == 1


def test_nothing_of_it_outlives_it(place: Place) -> None:
    """What went on would keep its lowest priority, and the node is ready already."""
    place.publish = "background"
    configure(place)
    warm(place)
    assert begun_with(f"BOOTSEER_EVENTS={place.events}") == []
    assert list(place.path.glob("store/deps/*/record-*.json"))


def test_an_install_that_fails_keeps_no_checkpoint_from_being_brought(place: Place) -> None:
    configure(place)
    place.extra("exit 9")
    parts = warm(place, code=9)
    assert is_ready(parts) == {"deps": False, "checkpoint": True}
    assert "exit code 9" in parts["deps"]["reason"]


def test_neither_does_a_fault_of_ours(place: Place) -> None:
    """The directory that the install is to run in is removed, so that nobody can name it."""
    configure(place)
    gone, settings = place.path / "gone", place.path / "bootseer.toml"
    gone.mkdir()
    done = subprocess.run(
        [
            "sh",
            "-c",
            'rmdir "$PWD" && exec "$@"',
            "sh",
            *words("-c", str(settings)),
        ],
        cwd=gone,
        env=place.full_environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    parts = {part["part"]: part for part in json.loads(done.stdout)["parts"]}
    assert is_ready(parts) == {"deps": False, "checkpoint": True}
    assert "No such file" in parts["deps"]["reason"]
    assert place.installs == 0


def test_a_checkpoint_that_is_not_there_keeps_no_install_from_running(place: Place) -> None:
    configure(place)
    shutil.rmtree(place.path / "checkpoints")
    parts = warm(place, code=3)
    assert is_ready(parts) == {"deps": True, "checkpoint": False}
    # The node is not ready, and what starts on it not from stand-by.
    place.forget_events()
    place.start()
    assert kinds(place) == ["first"]


def test_two_at_once_bring_all_once(place: Place) -> None:
    configure(place)
    place.extra("sleep 1")
    both = [
        subprocess.Popen(
            words(),
            cwd=place.path,
            env=place.full_environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = ""
    for process in both:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert json.loads(out)["ready"]
        said += error
    assert place.installs == 1
    assert said.count("another `bootseer warm` runs on this node") == 1


def test_parts_that_are_switched_off_are_left_out(place: Place) -> None:
    configure(place, deps="enabled = false")
    assert is_ready(warm(place)) == {"checkpoint": True}
    configure(place, more="enabled = false", deps="enabled = false")
    done = subprocess.run(
        words(), cwd=place.path, env=place.full_environ, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"nothing to warm" in done.stderr


def test_a_runtime_directory_may_be_named(place: Place) -> None:
    configure(place)
    named = place.path / "another"
    named.mkdir()
    with file_lock.acquire(str(named / "warm.lock")) as lock:
        command = subprocess.Popen(
            words("--runtime", str(named)),
            cwd=place.path,
            env=place.full_environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stderr is not None
        assert "waiting for it" in command.stderr.readline()
        assert place.installs == 0
        lock.release()
        assert command.wait(120) == 0
        command.communicate()
    assert sorted(os.listdir(named)) == ["link", "standby", "warm.lock"]
    assert not (place.path / "run").exists()
    place.forget_events()
    place.environ["BOOTSEER_RUNTIME"] = str(named)
    place.start()
    assert kinds(place) == ["standby"]


@pytest.mark.parametrize("last", ["exec sleep 60", "trap 'exit 0' TERM; sleep 60 & wait $!"])
def test_a_signal_ends_it_in_the_middle_of_an_install(place: Place, last: str) -> None:
    """Whether the install dies of it, or ends as if all were well."""
    configure(place)
    place.extra(f"touch begun; {last}")
    with subprocess.Popen(
        words(), cwd=place.path, env=place.full_environ, stdout=subprocess.PIPE
    ) as child:
        until((place.path / "begun").exists, "the install has begun")
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not (place.path / "kept").exists()  # nothing was begun after it
    for process in begun_with(f"BOOTSEER_EVENTS={place.events}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # a sleep
    place.extra("")
    assert is_ready(warm(place)) == {"deps": True, "checkpoint": True}
