"""A part whose work is done before its process has ended."""

from __future__ import annotations

import signal

import pytest

from bootseer.entrypoint.parts import part_task
from bootseer.system.readiness import readable
from tests.support.lingering_parts import END, lingering


def test_a_part_has_brought_its_inputs_before_its_process_ends() -> None:
    with lingering() as (task, process, _):
        signal.pidfd_send_signal(process, END)
        assert readable(process, timeout_s=10)
        decision = task.advance()
        assert decision is not None
        assert (decision.step, decision.reason) == ("done", "")


def test_a_part_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_task, "LEAVE_S", 0.2)
    with lingering() as (task, process, child):
        while (decision := task.advance()) is None:
            assert not readable(process, timeout_s=0.05)
        assert readable(process, timeout_s=0)
        assert (decision.step, decision.reason) == ("done", "")
        assert not readable(child, timeout_s=0.2)
