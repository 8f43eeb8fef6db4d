"""What the kernel tells of processes, and looks that it may keep waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bootseer.fuse.mount.mount_point import can_mount
from bootseer.storage.lease import surely_dead, this_owner
from bootseer.stripedfs.read import partial_download
from bootseer.stripedfs.read.partial_download import ArrivedRange, PartialDownload
from bootseer.system import processes
from bootseer.system.child_processes import fork, has_threads, name_thread
from bootseer.system.processes import (
    call_within,
    has_capability,
    has_unanswered_calls,
    own_status,
    read_proc,
    start_ticks,
    stat_fields,
)
from tests.support.waiting import until


def test_a_file_under_proc_is_read_whole() -> None:
    assert read_proc(f"/proc/{os.getppid()}/stat").startswith(f"{os.getppid()} (".encode())


def test_a_process_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(FileNotFoundError):
        read_proc("/proc/0/stat")


def test_a_look_that_the_kernel_keeps_waiting_ends() -> None:
    """An event stands for the kernel's lock."""
    let_go, ended = threading.Event(), threading.Event()
    held_back: list[set[int]] = []

    def look() -> None:
        held_back.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        let_go.wait()
        ended.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(TimeoutError, match="did not answer"):
        call_within(0.05, look)
    assert not ended.is_set()
    assert has_unanswered_calls()
    assert has_threads()  # what is forked now may inherit its locks
    # A signal for the job that waits behind us must find no thread that takes it.
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= held_back[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    let_go.set()
    assert ended.wait(60)
    until(lambda: not has_unanswered_calls())


def test_what_a_look_raises_reaches_its_caller() -> None:
    def look(number: int) -> int:
        return 1 // number

    assert call_within(1.0, look, 1) == 1
    with pytest.raises(ZeroDivisionError):
        call_within(1.0, look, 0)


def test_fields_are_counted_behind_the_name() -> None:
    assert stat_fields(b"7 (a) b (c) S 1 7 7") == [b"S", b"1", b"7", b"7"]


def test_a_process_has_started_as_long_as_it_has_not_ended() -> None:
    """Also of one that nobody has waited for yet: a lease of such a holder is nobody's."""
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["sleep", "600"]) as child:
        ticks = start_ticks(child.pid)
        assert abs(ticks / os.sysconf("SC_CLK_TCK") - begun) < 60
        assert 0 < start_ticks(os.getpid()) <= ticks
        child.kill()
        until(lambda: not start_ticks(child.pid), "the end")
    assert start_ticks(child.pid) == 0


def test_this_process_holds_its_lease_and_another_boot_does_not() -> None:
    owner = this_owner()
    assert owner.boot_id == processes.boot_id()
    assert owner.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert not surely_dead(owner)


def test_capabilities_are_those_of_the_name_given(tmp_path: Path) -> None:
    """Whatever this process is called: a name beyond ASCII once kept it from mounting."""
    ready, tell = os.pipe()
    child = fork()
    if child == 0:
        name_thread("naïve".encode())
        same = has_capability(21) == bool(int(own_status("CapEff"), 16) & 1 << 21)
        os.write(tell, b"%d%d" % (same, can_mount() == (has_capability(21) and not os.geteuid())))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(tell)
    assert os.read(ready, 2) == b"11"
    os.close(ready)
    assert own_status("NoSuchName") == ""


def test_what_an_unknown_boot_left_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /proc two boots looked alike, and bytes that were never synced were taken."""

    def landed(*, resume: bool) -> str | None:
        with PartialDownload.open(
            str(tmp_path / "f"), "a key", size_bytes=4, resume=resume
        ) as landing:
            found = landing.find_digest("", 0, 4)
            landing.add([("", ArrivedRange(0, 4, "a digest"))])
            landing.save()
        return found

    def unknown() -> str:
        raise FileNotFoundError(2, "No such file", "/proc")

    assert [landed(resume=resume) for resume in (False, True)] == [None, "a digest"]
    monkeypatch.setattr(partial_download, "boot_id", unknown)
    assert [landed(resume=resume) for resume in (False, True)] == [None, None]
