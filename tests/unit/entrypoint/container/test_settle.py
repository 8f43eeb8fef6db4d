"""The end of what has mounted a container's checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from bootseer.entrypoint.container import start
from bootseer.entrypoint.container.start import Preparation
from bootseer.entrypoint.parts.part_task import Task
from bootseer.system.readiness import readable
from tests.support.lingering_parts import lingering


def fail(_: Task) -> None:
    raise OSError(24, "Too many open files")


def test_a_part_that_cannot_be_awaited_is_ended_and_its_mount_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its servers are its children until it has ended, and the container reads through them."""
    monkeypatch.setattr(start, "_await", fail)
    nothing: Any = None
    preparation = Preparation(nothing, nothing, nothing, nothing, {})
    with lingering() as (task, process, server):
        preparation._task = task
        with pytest.raises(OSError, match="Too many"):
            preparation.settle()
        assert readable(process, timeout_s=0)
        assert task.group is None
        assert not readable(server, timeout_s=0.2)
        preparation.close()
