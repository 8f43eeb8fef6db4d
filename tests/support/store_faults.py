"""What a store did not serve, as this process met it, so that a test can show that a fault struck.

Nothing is injected and nothing changed: the errors of the code under test are noted as they are
made, also those that are never raised to the caller because a later try succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from bootseer.errors import StoreUnavailableError
from tests.support.waiting import until


def note_store_faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The message of every StoreUnavailableError from now on, in all threads of this process."""
    messages: list[str] = []
    made = StoreUnavailableError.__init__

    def note(error: StoreUnavailableError, message: str = "", **more: Any) -> None:
        messages.append(message)
        made(error, message, **more)

    monkeypatch.setattr(StoreUnavailableError, "__init__", note)
    return messages


def wait_for_fault(under_way: Future[Any], struck: Callable[[], object]) -> None:
    """Return once the fault struck work that is under way; fails when the work ended without it."""
    until(lambda: struck() or under_way.done())
    assert not under_way.done(), f"the fault struck nothing: {under_way.exception() or 'it ended'}"
