"""Start times from /proc: when this container began, told by process 1 of its namespace."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.profiler.events import AnyWriter

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h


def start_age_ns(pid: int | str) -> int | None:
    """Return how long ago a process was forked, in ns (grain 10 ms), or None when unknown.

    Field 22 of /proc/PID/stat counts clock ticks since boot (proc(5)); the command's name in
    field 2 may hold spaces and parentheses, so fields are counted from the last parenthesis.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        ticks = int(fields[19])
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return max(0, now - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def in_container() -> bool:
    """Tell whether this process lives in a pid namespace of its own."""
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def write_container_start(writer: AnyWriter) -> None:
    """Write `container.start`, unless this is no container.

    As process 1, a span from the runtime's fork to now; else what ran in between is not known,
    so only the moment when the container began, as a point.
    """
    if not in_container():
        return
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
