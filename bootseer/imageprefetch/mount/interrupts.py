"""Signals that end this process as an interrupt does, so that what it has begun is undone."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit within the block on SIGTERM and SIGHUP; in the main thread only."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    old_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                old_handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
