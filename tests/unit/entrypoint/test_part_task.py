"""A part whose work is done before its process has ended."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Mapping

import pytest

from bootseer import events
from bootseer.entrypoint import process_groups
from bootseer.entrypoint.parts import part_task
from bootseer.entrypoint.parts.part_task import Task
from bootseer.entrypoint.plan import PartPlan
from bootseer.entrypoint.process_groups import ProcessGroup
from bootseer.system.readiness import readable

PLAN = PartPlan("part", "checkpoint.load", {}, plain=("false",), deadline_s=20.0)
END = signal.SIGUSR1


def spawn_lingering(message: Mapping[str, object], _: Mapping[str, str]) -> ProcessGroup:
    """A part that reports its result at once, and ends when it is told to."""

    def run(link: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [END])
        link.sendall(json.dumps({"result": 0}).encode() + b"\n")
        signal.sigwait([END])

    return process_groups.start_part(message, lambda link: process_groups.fork_group(link, run))


def begin_lingering() -> tuple[Task, int]:
    """A part that has brought what it was to bring, and its process, which still runs."""
    task = Task(PLAN, events.NullWriter(), {}, spawn_lingering)
    while not task.has_brought:
        assert select.select(task.descriptors(), [], [], 10)[0]
        assert task.advance() is None
    assert task.group is not None
    process = os.pidfd_open(task.group.pid)
    assert not readable(process, timeout_s=0)
    return task, process


def test_a_part_has_brought_its_inputs_before_its_process_ends() -> None:
    task, process = begin_lingering()
    try:
        signal.pidfd_send_signal(process, END)
        assert readable(process, timeout_s=10)
        decision = task.advance()
        assert decision is not None
        assert (decision.step, decision.reason) == ("done", "")
    finally:
        task.close()
        os.close(process)


def test_a_part_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_task, "LEAVE_S", 0.2)
    task, process = begin_lingering()
    try:
        while (decision := task.advance()) is None:
            assert not readable(process, timeout_s=0.05)
        assert readable(process, timeout_s=0)
        assert (decision.step, decision.reason) == ("done", "")
    finally:
        task.close()
        os.close(process)
