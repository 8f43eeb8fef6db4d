"""When this container began, by process 1 of its namespace."""

from __future__ import annotations

import os
import time

from bootseer.system.processes import find_start_ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.events.writer import AnyWriter


def start_age_ns(pid: int) -> int | None:
    """Return how long ago a process was forked, in ns (grain 10 ms), or None when unknown."""
    try:
        ticks = find_start_ticks(pid)
    except TimeoutError:
        return None
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
