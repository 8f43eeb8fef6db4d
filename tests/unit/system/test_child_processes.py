"""Children that go on in Python, and what they let go of."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.system.child_processes import (
    close_descriptors,
    end_with_parent,
    fork,
    name_thread,
    silence_descriptors,
    silence_streams,
)


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed; the pipe ends when its child, which holds the other end, has ended."""
    read, write = os.pipe()
    ready, tell = os.pipe()
    parent = fork()
    if parent == 0:
        if fork() == 0:
            end_with_parent(signal.SIGTERM)
            os.write(tell, b".")
        signal.pause()
        os._exit(0)
    os.close(write)
    assert os.read(ready, 1) == b"."
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(read, 1) == b""
    for fd in (read, ready, tell):
        os.close(fd)


def test_a_process_gets_the_name_that_ps_shows() -> None:
    ready, tell = os.pipe()
    child = fork()
    if child == 0:
        name_thread(b"a-name-of-some-length")
        os.write(tell, b".")
        signal.pause()
    assert os.read(ready, 1) == b"."
    name = Path(f"/proc/{child}/comm").read_text(encoding="ascii").strip()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert name == "a-name-of-some-"


@pytest.mark.parametrize("collects", [True, False])
def test_a_child_collects_nothing_that_was_there(collects: bool) -> None:
    """Whether its parent collects or not, both go on as they did."""
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if collects else gc.disable)()
    try:
        child = fork()
        if child == 0:
            os._exit(gc.isenabled() * 2 + (gc.get_freeze_count() > frozen))
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() == frozen
    finally:
        (gc.enable if before else gc.disable)()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == collects * 2 + 1


def test_who_reads_a_childs_streams_need_not_wait_for_its_end() -> None:
    out, stream = os.pipe()
    other, kept = os.pipe()
    child = fork()
    if child == 0:
        for number in range(3):
            os.dup2(stream, number)
        os.close(stream)
        silence_streams()
        os.write(kept, b"%d" % all(os.stat(n).st_rdev == os.makedev(1, 3) for n in range(3)))
        signal.pause()
    os.close(stream)
    assert os.read(out, 1) == b""
    assert os.read(other, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in (out, other, kept):
        os.close(fd)


def test_all_descriptors_but_some_are_given_up_and_keep_their_numbers() -> None:
    out, let_go = os.pipe()
    other, kept = os.pipe()
    child = fork()
    if child == 0:
        silence_descriptors({kept})
        os.write(kept, b"%d" % (os.fstat(let_go).st_rdev == os.makedev(1, 3)))
        os.close(let_go)
        signal.pause()
    os.close(let_go)
    os.close(kept)
    assert os.read(out, 1) == b""
    assert os.read(other, 2) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in (out, other):
        os.close(fd)


def test_descriptors_are_closed_whatever_their_numbers() -> None:
    """Those beyond 4,096 once stayed open in what was left behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    out, let_go = os.pipe()
    other, kept = os.pipe()
    high = fcntl.fcntl(let_go, fcntl.F_DUPFD_CLOEXEC, min(9_000, hard - 10))
    child = fork()
    if child == 0:
        close_descriptors(kept, 0)
        os.write(kept, b"%d" % len(os.listdir("/proc/self/fd")))
        signal.pause()
    for fd in (let_go, high, kept):
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.read(out, 1) == b""
    assert os.read(other, 1) == b"3"  # the two, and that of the listing
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in (out, other):
        os.close(fd)


def test_what_a_publisher_prints_goes_into_no_file_of_its_own(tmp_path: Path) -> None:
    """Its standard output was closed behind its back, and the next file got the number."""
    code = """
import os, sys
from bootseer.depsnap.store import detached_publish
told, tell = os.pipe()
if os.fork() == 0:
    detached_publish._leave_job(tell)
    with open(sys.argv[1], "wb"):
        print("something that a library says " * 1000, flush=True)
    os.write(tell, b"done")
    os._exit(0)
os.close(tell)
print(os.read(told, 10).decode())
"""
    words = [sys.executable, "-c", code, str(tmp_path / "archive")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "done\n"
    assert (tmp_path / "archive").read_bytes() == b""
