"""`bootseer warm --image`: a node made ready for containers before they start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.blocks.link_turns import HOT, LinkTurns
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from tests.support.labs.containers import SUM, ContainerLab, checkpoint, deps, times
from tests.support.mounts.images import begun_with
from tests.support.mounts.tmpfs import tmpfs
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]


def words(lab: ContainerLab, ref: str, *more: str) -> list[str]:
    ours = [sys.executable, "-m", "bootseer", "warm", "--config", str(lab.settings), "--json"]
    return [*ours, "--image", ref, *more, "--", "--volume", f"{lab.log}:/log"]


def warm(lab: ContainerLab, ref: str, *more: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        words(lab, ref, *more),
        env=lab.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    parts = {part["part"]: part for part in json.loads(done.stdout)["parts"]}
    assert json.loads(done.stdout)["ready"] is all(part["ready"] for part in parts.values())
    return parts


def configure(lab: ContainerLab) -> None:
    lab.configure(checkpoint(lab, f'cache = "{lab.cache}/checkpoints"\n') + deps(lab))


def kinds(lab: ContainerLab, uid: str) -> set[str]:
    """The kinds of start that the processes of a job have written."""
    about = [e["attributes"] for e in lab.written() if e["event"] == "resource"]
    mine = [a for a in about if a.get("bootseer.job_uid") == uid]
    return {a["bootseer.start.kind"] for a in mine}


def reported(lab: ContainerLab, uid: str) -> list[str]:
    """The kinds of a job's starts as the report has them."""
    starts = analysis.analyse(load([str(lab.events)])).starts
    return [start.kind for start in starts if start.job_uid == uid]


def present_bytes(lab: ContainerLab) -> int:
    """Bytes of blocks in the node's cache."""
    files = lab.cache.glob("blocks/*/data")
    return sum(path.stat().st_blocks * 512 for path in files)


def test_a_start_on_a_warm_node_needs_no_registry(lab: ContainerLab) -> None:
    ref = lab.publish()
    configure(lab)
    before = warm(lab, ref, "--status", code=1)
    assert [part["ready"] for part in before.values()] == [False, False, False]
    done = warm(lab, ref)
    assert [part["ready"] for part in done.values()] == [True, True, True]
    assert all(part["present_bytes"] == part["total_bytes"] for part in done.values())
    assert times(lab) == 1
    assert warm(lab, ref, "--status") == done
    assert lab.left() == []
    with stopped_registry(lab):
        lab.environment["BOOTSEER_JOB_UID"] = "job-1"
        out, error = lab.run(ref, "sh", "-c", "cat /opt/new /opt/old/y; sha256sum /ckpt/model.pt")
        lab.environment["BOOTSEER_JOB_UID"] = "job-2"
    assert out == f"new\ny\n{SUM}"
    assert "mounted from this node's cache" in error
    assert times(lab) == 1
    (install,) = lab.ends("deps.install")
    assert (install["status"], install["attributes"]["bootseer.form"]) == ("ok", "layer")
    (ahead,) = lab.ends("checkpoint.prefetch")
    assert ahead["status"] == "ok"
    # The report tells it from a start that found some of this by chance.
    assert kinds(lab, "job-1") == {"standby"}
    assert reported(lab, "job-1") == ["standby"]
    lab.run(ref, "echo", "another job", options=("--env", "X=1"))
    assert kinds(lab, "job-2") == {"first"}
    assert reported(lab, "job-2") == ["first"]


def test_warming_again_does_nothing_again(lab: ContainerLab) -> None:
    ref = lab.publish()
    configure(lab)
    first = warm(lab, ref)
    files = {path: path.stat().st_mtime_ns for path in lab.cache.glob("blocks/*/data")}
    assert files
    assert warm(lab, ref) == first
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert times(lab) == 1


def test_a_part_that_fails_keeps_no_other_from_being_brought(lab: ContainerLab) -> None:
    ref = lab.publish()
    configure(lab)
    shutil.move(lab.folder / "store", lab.folder / "away")
    parts = warm(lab, ref, code=3)
    assert [part["ready"] for part in parts.values()] == [True, True, False]
    assert parts["checkpoint"]["exit_code"] == 3
    assert "model.pt" in parts["checkpoint"]["reason"]
    lab.configure(deps(lab, "exit 9"))
    parts = warm(lab, ref, code=9)
    assert parts["image"]["ready"]
    assert "exit code 9" in parts["deps"]["reason"]


def test_what_is_not_kept_is_said(lab: ContainerLab) -> None:
    """Without a cache, a checkpoint's bytes would not be there for the start."""
    ref = lab.publish()
    lab.configure(checkpoint(lab))
    parts = warm(lab, ref, code=2)
    assert "[checkpoint] cache" in parts["checkpoint"]["reason"]
    assert parts["image"]["ready"]


def test_without_a_registry_one_line_says_so(lab: ContainerLab) -> None:
    ref = lab.publish()
    configure(lab)
    with stopped_registry(lab):
        parts = warm(lab, ref, code=10)
    assert [part["part"] for part in parts.values()] == ["image", "checkpoint"]
    assert not parts["image"]["ready"]
    assert parts["checkpoint"]["ready"]


def test_on_a_full_cache_it_says_what_does_not_fit(lab: ContainerLab) -> None:
    ref = lab.publish()
    with tmpfs(lab.cache, "4m"):
        configure(lab)
        parts = warm(lab, ref, code=8)
        assert [part["ready"] for part in parts.values()] == [True, False, False]
        assert "make room there" in parts["deps"]["reason"]
        assert "the checkpoint does not fit" in parts["checkpoint"]["reason"]
        # What fits is kept, and a start goes its plain way with the rest.
        there = warm(lab, ref, "--status", code=1)
        assert there["image"] == parts["image"]
        assert not there["deps"]["ready"]
        assert "the install has to run" in there["deps"]["reason"]
        assert not there["checkpoint"]["ready"]
        lab.environment["BOOTSEER_JOB_UID"] = "job-1"
        out, _ = lab.run(ref, "sh", "-c", "cat /opt/new /opt/old/y; sha256sum /ckpt/model.pt")
        assert out == f"new\ny\n{SUM}"
        assert reported(lab, "job-1") == ["first"]
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "its servers have ended")


def test_it_gives_way_to_a_start_that_runs(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure("")
    with contextlib.ExitStack() as stack:
        turns = stack.enter_context(LinkTurns.of(str(lab.runtime)))
        with turns.holding(HOT):
            command = subprocess.Popen(words(lab, ref), env=lab.environment, stdout=subprocess.PIPE)
            child = stack.enter_context(command)
            until(lambda: any(lab.cache.glob("blocks/*/present")), "it begins to fill")
            before_bytes = present_bytes(lab)
            time.sleep(2)
            assert child.poll() is None
            assert present_bytes(lab) == before_bytes
        assert child.wait(60) == 0
    assert present_bytes(lab) > before_bytes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_was_ended_goes_on_where_it_was(lab: ContainerLab, number: int) -> None:
    ref = lab.publish()
    lab.configure(
        deps(
            lab,
            "echo begun >> /log/times; while ! test -e /log/go; do sleep 0.1; done"
            "; echo new > /opt/new",
        )
    )
    with subprocess.Popen(words(lab, ref), env=lab.environment, stdout=subprocess.PIPE) as child:
        until((lab.log / "times").exists, "the install has begun")
        child.send_signal(number)
        (lab.log / "go").touch()
    assert child.returncode in (-number, 128 + number)
    parts = warm(lab, ref)
    assert [part["ready"] for part in parts.values()] == [True, True]
    out, _ = lab.run(ref, "cat", "/opt/new")
    assert out == "new\n"
    assert times(lab) == 2
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


@contextlib.contextmanager
def stopped_registry(lab: ContainerLab) -> Iterator[None]:
    os.kill(lab.registry.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(lab.registry.pid, signal.SIGCONT)
