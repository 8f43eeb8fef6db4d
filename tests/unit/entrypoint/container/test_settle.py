"""The end of what has mounted a container's checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.entrypoint.container.start import Preparation


def test_a_part_that_cannot_be_awaited_is_ended() -> None:
    ended: list[str] = []

    def fail() -> None:
        raise OSError(24, "Too many open files")

    nothing: Any = None
    preparation = Preparation(nothing, nothing, nothing, nothing, {})
    task: Any = SimpleNamespace(has_brought=True, advance=fail, close=lambda: ended.append("task"))
    preparation._task = task
    with pytest.raises(OSError, match="Too many"):
        preparation.settle()
    assert ended == ["task"]
    preparation.close()
    assert ended == ["task"]
