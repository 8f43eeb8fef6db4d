"""Removing event files that are old enough not to be read any more."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator

DAY_S = 86_400.0


def remove_old_files(folder: str, age_s: float) -> int:
    """Remove event files of ended processes of this host, unchanged for `age_s`; returns how many.

    Other hosts remove their own files. Nothing raises.
    """
    host = re.escape(os.uname().nodename.replace("/", "_") or "localhost")
    ours = re.compile(rf"{host}-(\d+)-[0-9a-f]+\.jsonl")
    removed = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = ours.fullmatch(entry.name)
            if match is None or os.path.exists(f"/proc/{match[1]}"):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > age_s:
                    os.unlink(entry.path)
                    removed += 1
    return removed


@contextlib.contextmanager
def daily_cleanup(folder: str, age_s: float) -> Iterator[None]:
    """Remove old event files now and once a day within the block; none with an age of 0."""
    ended = threading.Event()

    def work() -> None:
        while True:
            remove_old_files(folder, age_s)
            if ended.wait(DAY_S):
                return

    thread = threading.Thread(target=work, name="old events", daemon=True)
    if folder and age_s > 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
