"""What a publication in the background has of the process that began it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from pathlib import Path

from bootseer.depsnap.store import detached_publish
from bootseer.system.child_processes import fork
from bootseer.system.readiness import readable


def test_what_a_library_prints_goes_nowhere(tmp_path: Path) -> None:
    """Neither an error nor a line in the next file that is opened, as those of the store."""
    ready, tell = os.pipe()
    path = tmp_path / "archive"
    child = fork()
    if child == 0:
        try:
            detached_publish._leave_job(tell)
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            print("printed", flush=True)
            os.write(file, b"packed")
            os.write(tell, b"done")
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(ready, 10) == b"done"
    os.close(ready)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"packed"


def test_nothing_of_ours_stays_open_whatever_its_number() -> None:
    """Who waits for the end of a pipe must not wait for the publication."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 10_000 if hard == resource.RLIM_INFINITY else min(hard, 10_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    out, into = os.pipe()
    ready, tell = os.pipe()
    high = fcntl.fcntl(into, fcntl.F_DUPFD_CLOEXEC, most - 10)
    child = fork()
    if child == 0:
        try:
            detached_publish._leave_job(tell)
            os.write(tell, b"done")
            signal.pause()
        finally:
            os._exit(0)
    for descriptor in (tell, into, high):
        os.close(descriptor)
    try:
        assert os.read(ready, 10) == b"done"
        assert readable(out, timeout_s=10)
        assert os.read(out, 1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(ready)
        os.close(out)
