"""Calls with a time limit: what they leave as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bootseer.errors import DeadlineError
from bootseer.system.blocking_calls import call_in_thread

# In a process of its own: pytest's has threads.
LOGGED = """
import logging
from bootseer.system.blocking_calls import call_in_thread
from bootseer.system.child_processes import has_threads
assert not has_threads()
call_in_thread(lambda: logging.getLogger("x").warning("asked again"), 5, "it")
assert not has_threads()
"""


def test_a_call_has_its_callers_signal_mask() -> None:
    """What it starts would be deaf to SIGTERM."""
    assert call_in_thread(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), 5, "it") == set()


def test_a_call_that_logged_leaves_no_thread_behind() -> None:
    """`logging` asks for the current thread, and `threading` never forgets one it did not start."""
    done = subprocess.run([sys.executable, "-c", LOGGED], timeout=60, check=False)
    assert done.returncode == 0


def test_a_call_that_does_not_return_is_late() -> None:
    readable, writable = os.pipe()
    try:
        with pytest.raises(DeadlineError, match=r"the store did not answer for 0\.1 s"):
            call_in_thread(lambda: os.read(readable, 1), 0.1, "the store")
    finally:
        os.write(writable, b"\0")  # the thread that was left behind ends
        os.close(writable)
    with pytest.raises(ValueError, match="of the call"):
        call_in_thread(lambda: int("of the call"), 5, "it")
