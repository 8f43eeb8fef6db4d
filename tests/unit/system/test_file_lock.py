"""Locks of files and directories: who has them, for how long, and of which file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.system import file_lock
from bootseer.system.child_processes import fork
from bootseer.system.file_lock import acquire, acquire_directory, is_named, lock, unlock
from tests.support.waiting import until


def is_held(path: Path) -> bool:
    try:
        acquire(str(path), create=False, limit_s=0).close()
    except BlockingIOError:
        return True
    return False


def test_one_has_it_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with acquire(str(path), 0o640) as held:
        assert path.stat().st_mode & 0o777 == 0o640
        assert not os.get_inheritable(held.descriptor)
        assert is_held(path)
    assert not is_held(path)
    held.close()
    assert path.exists()


def test_what_is_not_there_is_made_where_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        acquire(str(path), create=False)
    with pytest.raises(FileNotFoundError):
        acquire_directory(str(path))
    path.symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        acquire(str(path), flags=os.O_NOFOLLOW)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_is_locked_as_a_file_is(tmp_path: Path) -> None:
    with acquire_directory(str(tmp_path)), pytest.raises(BlockingIOError):
        acquire_directory(str(tmp_path), limit_s=0)
    acquire_directory(str(tmp_path), limit_s=0).close()


def test_a_wait_ends_with_its_limit_or_with_the_lock(tmp_path: Path) -> None:
    path, waits = str(tmp_path / "lock"), []
    holder = acquire(path)
    with pytest.raises(BlockingIOError):
        acquire(path, limit_s=0.2, waiting=lambda: waits.append("limited"))
    others = [
        threading.Thread(target=lambda limit=limit: acquire(path, limit_s=limit).close())
        for limit in (None, 600.0)
    ]
    for other in others:
        other.start()
    assert waits == ["limited"]
    holder.close()
    for other in others:
        other.join(60)
        assert not other.is_alive()
    acquire(path, limit_s=0, waiting=lambda: waits.append("free")).close()
    assert waits == ["limited"]


def test_nothing_stays_open_of_a_lock_that_is_not_had(tmp_path: Path) -> None:
    with acquire(str(tmp_path / "lock")):
        before = os.listdir("/proc/self/fd")
        with pytest.raises(BlockingIOError):
            acquire(str(tmp_path / "lock"), limit_s=0)
        assert os.listdir("/proc/self/fd") == before


def test_shared_locks_stand_beside_each_other_alone(tmp_path: Path) -> None:
    fds = [os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT) for _ in range(3)]
    for fd in fds[:2]:
        lock(fd, shared=True, limit_s=0)
    with pytest.raises(BlockingIOError):
        lock(fds[2], limit_s=0)
    with pytest.raises(BlockingIOError):
        lock(fds[0], limit_s=0)
    unlock(fds[0])
    unlock(fds[1])
    lock(fds[2], limit_s=0)
    lock(fds[2], shared=True, limit_s=0)
    lock(fds[0], shared=True, limit_s=0)
    for fd in fds:
        os.close(fd)


def test_a_file_that_has_lost_its_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with acquire(str(path)) as held:
        assert held.is_named(str(path))
        path.rename(tmp_path / "other")
        assert not held.is_named(str(path))
        path.touch()
        assert not held.is_named(str(path))
        path.unlink()
        path.symlink_to("other")
        assert not held.is_named(str(path))
        assert not is_named(held.descriptor, f"{tmp_path}/other/below")
        assert held.is_named(f"{tmp_path}/other")


def test_a_child_holds_it_too_unless_it_is_released(tmp_path: Path) -> None:
    for released in (False, True):
        held = acquire(str(tmp_path / "lock"))
        child = fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        if released:
            held.release()
        held.close()
        assert is_held(tmp_path / "lock") != released
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not is_held(tmp_path / "lock")


def test_it_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = "import sys, time; from bootseer.system.file_lock import acquire\n"
    code += "acquire(sys.argv[1]); print('held', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_held(tmp_path / "lock")
        # No child that it makes without Python's own care holds it after an exec.
        with open(f"/proc/{other.pid}/fdinfo/3", encoding="ascii") as file:
            assert int(file.read().split("flags:")[1].split()[0], 8) & os.O_CLOEXEC
        other.kill()
    until(lambda: not is_held(tmp_path / "lock"), "the lock")


def test_where_files_have_no_locks_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAKE: a file system without them."""

    def flock(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    before = os.listdir("/proc/self/fd")
    for limit_s in (None, 0, 1.0):
        with pytest.raises(OSError, match="not supported"):
            acquire(str(tmp_path / "lock"), limit_s=limit_s)
    assert os.listdir("/proc/self/fd") == before
