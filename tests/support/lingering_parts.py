"""Processes of parts whose work is done and which have not ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping

from bootseer import events
from bootseer.entrypoint import process_groups
from bootseer.entrypoint.parts.part_task import Task
from bootseer.entrypoint.plan import PartPlan
from bootseer.entrypoint.process_groups import ProcessGroup
from bootseer.system.processes import children_of
from bootseer.system.readiness import readable

PLAN = PartPlan("part", "checkpoint.load", {}, plain=("false",), deadline_s=20.0)
END = signal.SIGUSR1


def _spawn(message: Mapping[str, object], _: Mapping[str, str]) -> ProcessGroup:
    """A part that reports its result at once, and ends when it is told to."""

    def run(link: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [END])
        if os.fork() == 0:
            os.setpgid(0, 0)
            signal.pause()
        link.sendall(json.dumps({"result": 0}).encode() + b"\n")
        signal.sigwait([END])

    return process_groups.start_part(message, lambda link: process_groups.fork_group(link, run))


@contextlib.contextmanager
def lingering() -> Iterator[tuple[Task, int, int]]:
    """A part that has brought what it was to bring; its process, and a child of that, which run.

    The processes as descriptors. The child is in a group of its own, as what serves a mount is. All
    have ended after the block.
    """
    task = Task(PLAN, events.NullWriter(), {}, _spawn)
    with contextlib.ExitStack() as stack:
        stack.callback(task.close)
        while not task.has_brought:
            assert select.select(task.descriptors(), [], [], 10)[0]
            assert task.advance() is None
        assert task.group is not None
        process, child = (
            os.pidfd_open(pid) for pid in (task.group.pid, *children_of(task.group.pid))
        )
        for descriptor in (process, child):
            stack.callback(os.close, descriptor)
            stack.callback(_kill, descriptor)
            assert not readable(descriptor, timeout_s=0)
        yield task, process, child


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
