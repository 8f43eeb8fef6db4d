"""Threads in a process that waits for a command by its signals."""

from __future__ import annotations

import signal
import threading


def start_without_signals(thread: threading.Thread) -> None:
    """Start a thread with all signals blocked.

    A recorder blocks all signals and waits for its command's SIGCHLD. A thread that did not block
    it could receive it between two waits, and ignore it, and the end of the command would go
    unnoticed. A SIGTERM would end this process instead of the command.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()  # it begins with our mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
