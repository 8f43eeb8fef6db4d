"""Signals that end what this process has begun, as an interrupt does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an interrupt does: what it began is taken back.

    Outside the main thread they do what they did.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                old[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
