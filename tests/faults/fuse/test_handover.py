"""A mount that outlives its server: workers are killed under load, and readers never notice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts.fuse import end_mount, in_time, output
from tests.support.paths import TESTS
from tests.support.trees.memory import pattern
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

MIB = 1 << 20
CONTENT = pattern(8 * MIB + 77)
DIGEST = hashlib.md5(CONTENT).hexdigest()


class Supervised:
    """The supervisor's process and what it says."""

    def __init__(self, process: subprocess.Popen[str], where: Path) -> None:
        self.process = process
        self.where = where

    def says(self) -> str:
        """Its next line; "" at its end."""
        assert self.process.stdout is not None
        line: str = in_time(self.process.stdout.readline)
        return line.strip()

    @property
    def worker(self) -> int:
        """The process id of the worker; waits for one."""
        pid = self.process.pid
        while True:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                children = file.read().split()
            if children:
                return int(children[0])

    def is_mounted(self) -> bool:
        return f" {self.where} " in Path("/proc/self/mountinfo").read_text()


@contextlib.contextmanager
def supervised(tmp_path: Path, **settings: Any) -> Iterator[Supervised]:
    where = tmp_path / "m"
    with contextlib.suppress(FileExistsError):
        os.mkdir(where)
    (tmp_path / "source").write_bytes(CONTENT)
    settings = {"file": str(tmp_path / "source"), "options": {}, **settings}
    program = TESTS / "support/programs/fuse_supervised.py"
    process = subprocess.Popen(
        [sys.executable, program, where, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield Supervised(process, where)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            end_mount(where)
            process.kill()


def read_on(path: Path, stop: threading.Event, digests: list[str]) -> None:
    """Read the file again and again, past the page cache; every error is a result too."""
    while not stop.is_set():
        try:
            digest = hashlib.md5()
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while block := file.read(MIB):
                    digest.update(block)
            digests.append(digest.hexdigest())
        except OSError as error:
            digests.append(str(error))


def kill_under_load(tmp_path: Path, times: int, pause_s: float, **settings: Any) -> list[str]:
    """Kill the worker so many times while four readers read; returns the digests they saw."""
    digests: list[str] = []
    stop = threading.Event()
    with supervised(tmp_path, limits={"young_s": 0, "deaths": 1000}, **settings) as mount:
        assert mount.says() == "ready"
        file = mount.where / "f"
        readers = [threading.Thread(target=read_on, args=(file, stop, digests)) for _ in range(4)]
        for reader in readers:
            reader.start()
        for _ in range(times):
            time.sleep(pause_s)
            worker = mount.worker
            os.kill(worker, signal.SIGKILL)
            said = mount.says()
            if said.startswith("fault"):
                said = mount.says()
            assert said == f"dead {worker}"
        seen = len(digests)
        while len(digests) < seen + 4:
            assert mount.process.poll() is None
            time.sleep(0.01)
        stop.set()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive()
    assert mount.process.returncode == 0
    assert not mount.is_mounted()
    return digests


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct_io"])
def test_readers_never_notice_that_the_server_was_killed(tmp_path: Path, direct: bool) -> None:
    assert set(kill_under_load(tmp_path, 3, 0.3, direct=direct)) == {DIGEST}


def test_waiting_reads_are_sent_to_the_next_server(tmp_path: Path) -> None:
    digests = kill_under_load(tmp_path, 3, 0.3, direct=True, slow_s=0.05)
    assert set(digests) == {DIGEST}


def test_files_passed_through_are_read_across_the_hand_over(tmp_path: Path) -> None:
    options = {"passthrough": True}
    with supervised(tmp_path, passed=True, options=options) as mount:
        assert mount.says() == "ready"
        with open(mount.where / "f", "rb", buffering=0) as before:
            assert in_time(lambda: before.read(100)) == CONTENT[:100]
            os.kill(mount.worker, signal.SIGKILL)
            while not mount.says().startswith("dead"):
                pass
            with open(mount.where / "f", "rb") as after:
                assert in_time(after.read) == CONTENT
            assert in_time(before.read) == CONTENT[100:]
        assert in_time((mount.where / "f").read_bytes) == CONTENT


@pytest.mark.soak
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct_io"])
@pytest.mark.parametrize("slow_s", [0, 0.02], ids=["at once", "parked"])
def test_readers_never_notice_twenty_kills(tmp_path: Path, direct: bool, slow_s: float) -> None:
    digests = kill_under_load(tmp_path, 20, 0.25, direct=direct, slow_s=slow_s)
    assert set(digests) == {DIGEST}


@pytest.mark.parametrize("crash", ["build", "read"])
def test_servers_that_keep_dying_end_the_mount(tmp_path: Path, crash: str) -> None:
    with supervised(tmp_path, crash=crash, build_s=0.1) as mount:
        if crash == "read":
            assert mount.says() == "ready"
            reader = subprocess.Popen(
                ["cat", mount.where / "f"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            assert reader.wait(60) == 1
        said = []
        while line := mount.says():
            said.append(line)
        assert mount.process.wait(60) == 5
    assert len([line for line in said if line.startswith("dead")]) == 5
    assert len([line for line in said if line.startswith("fault")]) == 1
    assert said[-1].startswith("StoreUnavailableError: ")
    assert "died 5 times in a row" in said[-1]
    assert not mount.is_mounted()


def test_a_tree_that_cannot_be_built_is_said_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, crash="refuse") as mount:
        said = [mount.says(), mount.says()]
        assert said[-1] == "NotFoundError: no such checkpoint; check the name"
        assert mount.process.wait(60) == 3
    assert not mount.is_mounted()


def test_small_reads_take_no_memory(tmp_path: Path) -> None:
    """Of the worker: 100,000 reads past the page cache."""

    def memory_kib() -> int:
        text = Path(f"/proc/{mount.worker}/status").read_text(encoding="ascii")
        return int(text.partition("VmRSS:")[2].split()[0])

    def read_often() -> None:
        fd = os.open(mount.where / "f", os.O_RDONLY)
        try:
            for number in range(20_000):
                offset = number * 4096 % (7 * MIB)
                assert os.pread(fd, 4096, offset) == CONTENT[offset : offset + 4096]
        finally:
            os.close(fd)

    with supervised(tmp_path, direct=True) as mount:
        assert mount.says() == "ready"
        in_time(read_often)
        before = memory_kib()
        for _ in range(4):
            in_time(read_often)
        assert memory_kib() - before < 2048


def test_a_server_that_never_comes_up_is_ended(tmp_path: Path) -> None:
    with supervised(tmp_path, build_s=600, limits={"ready_s": 0.2, "deaths": 2}) as mount:
        said = [mount.says() for _ in range(4)]
        assert mount.process.wait(60) == 5
    assert "died 2 times" in said[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        assert mount.is_mounted()
        mount.process.send_signal(number)
        assert mount.says() == "ended"
        assert mount.process.wait(60) == 0
    assert not mount.is_mounted()


def test_a_signal_to_the_worker_unmounts_too(tmp_path: Path) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        os.kill(mount.worker, signal.SIGTERM)
        assert mount.says() == "ended"
    assert not mount.is_mounted()


def test_unmounting_from_outside_ends_it_all(tmp_path: Path) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        subprocess.run(["umount", mount.where], check=True)
        assert mount.says() == "ended"
        assert mount.process.wait(60) == 0


def test_a_busy_mount_is_unmounted_after_a_grace(tmp_path: Path) -> None:
    with supervised(tmp_path, options={"unmount_grace_s": 0.3}) as mount:
        assert mount.says() == "ready"
        with open(mount.where / "f", "rb", buffering=0) as file:
            assert file.read(10) == CONTENT[:10]
            mount.process.terminate()
            assert mount.says() == "ended"
            assert not mount.is_mounted()
            file.seek(4 * MIB)
            with pytest.raises(OSError, match=r"not connected|abort"):
                in_time(lambda: file.read(10))


def test_a_lazily_unmounted_file_is_served_until_it_is_closed(tmp_path: Path) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        with open(mount.where / "f", "rb", buffering=0) as file:
            subprocess.run(["umount", "-l", mount.where], check=True)
            file.seek(4 * MIB)
            assert in_time(lambda: file.read(10)) == CONTENT[4 * MIB : 4 * MIB + 10]
        assert mount.says() == "ended"


def test_what_serves_there_next_is_left_alone(tmp_path: Path) -> None:
    """A start that follows at once has the same name, place and device number as the last."""

    def same_number() -> bool:
        with supervised(tmp_path) as mount:
            assert mount.says() == "ready"
            before = line_of(mount)
            mount.process.send_signal(signal.SIGSTOP)  # as a slow end of it
            subprocess.run(["umount", mount.where], check=True)
            with supervised(tmp_path) as again:
                assert again.says() == "ready"
                same = line_of(again) == before
                mount.process.send_signal(signal.SIGCONT)
                assert mount.says() == "ended"
                assert mount.process.wait(60) == 0
                assert in_time((again.where / "f").read_bytes) == CONTENT
        return same

    until(same_number, "a mount that has the number of the last")


def test_who_takes_over_leaves_what_serves_there_next_alone(tmp_path: Path) -> None:
    """A worker that looked for its mount by name found the one that was put there since."""
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        with open(mount.where / "f", "rb", buffering=0) as file:
            subprocess.run(["umount", "-l", mount.where], check=True)
            with supervised(tmp_path) as again:
                assert again.says() == "ready"
                os.kill(mount.worker, signal.SIGKILL)
                assert mount.says().startswith("dead")
                assert mount.says().startswith("fault")
                file.seek(4 * MIB)  # by the worker that took over
                assert in_time(lambda: file.read(10)) == CONTENT[4 * MIB : 4 * MIB + 10]
                mount.process.terminate()
                assert mount.says() == "ended"
                assert again.is_mounted()
                assert in_time((again.where / "f").read_bytes) == CONTENT


def line_of(mount: Supervised) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f" {mount.where} " in line]


def test_the_supervisors_death_unmounts_and_ends_the_worker(tmp_path: Path) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        worker = os.pidfd_open(mount.worker)
        try:
            mount.process.kill()
            mount.process.wait(60)
            in_time(lambda: wait(worker))
        finally:
            os.close(worker)
        assert not mount.is_mounted()


def wait(process: int) -> None:
    """Until a process that is no child of ours ended."""
    select.select([process], [], [])


def test_a_mount_left_by_a_crash_of_both_is_replaced(tmp_path: Path) -> None:
    with supervised(tmp_path) as mount:
        assert mount.says() == "ready"
        worker = os.pidfd_open(mount.worker)
        try:
            signal.pidfd_send_signal(worker, signal.SIGSTOP)  # it must not clean up
            mount.process.kill()
            signal.pidfd_send_signal(worker, signal.SIGKILL)
            in_time(lambda: wait(worker))
        finally:
            os.close(worker)
        mount.process.wait(60)
        assert mount.is_mounted()
        with pytest.raises(OSError, match="not connected"):
            os.statvfs(mount.where)
        with supervised(tmp_path) as again:
            assert again.says() == "ready"
            assert in_time((again.where / "f").read_bytes) == CONTENT
    assert not mount.is_mounted()


def test_a_killed_worker_leaves_no_descriptor_in_the_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path, limits={"young_s": 0, "deaths": 1000}) as mount:
        assert mount.says() == "ready"
        counts = []
        for _ in range(3):
            os.kill(mount.worker, signal.SIGKILL)
            while not mount.says().startswith("dead"):
                pass
            assert in_time((mount.where / "f").read_bytes) == CONTENT
            counts.append(len(os.listdir(f"/proc/{mount.process.pid}/fd")))
            assert len(os.listdir(f"/proc/{mount.process.pid}/task")) == 1
        assert len(set(counts)) == 1


def test_a_supervisor_with_threads_is_refused(tmp_path: Path) -> None:
    from bootseer.errors import NotSupportedError
    from bootseer.fuse.serve.handover import supervise

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="stays")
    thread.start()
    try:
        with pytest.raises(NotSupportedError, match=r"one thread only.* run also .*stays"):
            supervise(lambda: None, str(tmp_path))  # type: ignore[arg-type, return-value]
    finally:
        stop.set()
        thread.join()


# A thread that Python knows nothing of, as libraries have them.
_FOREIGN = """
import ctypes, os
from bootseer.errors import NotSupportedError
from bootseer.fuse.serve.handover import supervise
from bootseer.fuse.mount.mount_point import find_mount
libc = ctypes.CDLL(None)
sleeper, thread = ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_ulong()
assert libc.pthread_create(ctypes.byref(thread), None, sleeper, None) == 0
(task,) = {int(t) for t in os.listdir("/proc/self/task")} - {os.getpid()}
with open(f"/proc/self/task/{task}/comm", "w") as name:
    name.write("foreign")
try:
    supervise(None, sys.argv[1])
except NotSupportedError as error:
    print(error, find_mount(sys.argv[1]))
"""


def test_a_supervisor_names_the_threads_of_libraries(tmp_path: Path) -> None:
    said = output(_FOREIGN, tmp_path)
    assert "one thread only" in said
    assert "run also foreign;" in said
    assert said.endswith("None\n")
