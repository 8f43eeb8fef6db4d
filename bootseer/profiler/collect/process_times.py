"""Start times of processes from /proc; that of process 1 is this container's."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.events.writer import AnyWriter


def start_ticks(pid: int) -> int | None:
    """Return when a process was forked, in clock ticks since boot, or None when unknown.

    Field 22 of /proc/PID/stat (proc(5)); the command's name in field 2 may hold spaces and
    parentheses, so fields are counted from the last parenthesis.
    """
    try:
        return int(_read_stat(pid).rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _read_stat(pid: int) -> bytes:
    path = f"/proc/{pid}/stat"
    if pid != os.getpid():
        from bootseer.system.proc_files import read_proc

        return read_proc(path)
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def start_age_ns(pid: int) -> int | None:
    """Return how long ago a process was forked, in ns (grain 10 ms), or None when unknown."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return max(0, now_ns - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def write_container_start(writer: AnyWriter) -> None:
    """Write the event `container.start`; for use inside a container only.

    As process 1, a span from the runtime's fork until now. In any other process, what ran in
    between is not known, so only a point at the moment when the container started.
    """
    age_ns = start_age_ns(1)
    if age_ns is None:
        return
    unix_ns, mono_ns = time.time_ns(), time.monotonic_ns()
    unix_began_ns, mono_began_ns = unix_ns - age_ns, max(0, mono_ns - age_ns)
    attributes = {"bootseer.source": "proc"}
    if os.getpid() == 1:
        span = writer.begin("container.start", attributes, None, unix_began_ns, mono_began_ns)
        writer.end(span, "container.start", "ok", None, unix_ns, mono_ns)
    else:
        writer.point("container.start", "ok", attributes, None, unix_began_ns, mono_began_ns)
