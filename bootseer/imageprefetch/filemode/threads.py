"""Threads beside a command that this process waits for."""

from __future__ import annotations

import signal
import threading


def start_deaf(thread: threading.Thread) -> None:
    """Start a thread that takes no signal from whoever waits for one.

    A recorder holds all signals back and waits for its command's SIGCHLD. A thread that does not
    hold it back takes it, where it comes between two waits: by default it is ignored there, and
    the end of the command is never heard of. A SIGTERM would end us instead of the command.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()  # it begins with our mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
