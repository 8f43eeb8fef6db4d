"""Whose bytes go first over a node's link, agreed between processes that share nothing else.

A start fetches by several processes at once: one serves its image, another its checkpoint. What a
program waits for comes first, then what it is about to read (a hot set), then what it will read
later (its checkpoint), then what nobody waits for. In `<runtime>/link/` stands one file for each of
the first three, on which a process holds a shared lock meanwhile. A process whose bytes may wait
looks at these locks before each request. The kernel releases those of a process that dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

from bootseer.context_managers import Closing
from bootseer.system import file_lock

FOLDER = "link"
DEMAND, HOT, CHECKPOINT = KINDS = ("demand", "hot", "checkpoint")
LIMIT_S = 5.0
"""How long bytes wait for others at most: what holds these up may be a server that hangs."""
POLL_S = 0.005


class LinkTurns(Closing):
    """One process's part in the agreement; every method may be called from any thread.

    Where the files cannot be opened, nobody waits.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._looked_at: dict[str, file_lock.FileLock] = {}

    @classmethod
    def of(cls, runtime: str) -> LinkTurns:
        """The agreement of the node's processes that have this runtime directory."""
        return cls(os.path.join(runtime, FOLDER))

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """Tell the others that bytes of one of `KINDS` come now."""
        lock = None
        with contextlib.suppress(OSError):
            lock = self._open(name)
            file_lock.lock(lock.descriptor, shared=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def is_taken(self, kinds: Sequence[str] = KINDS) -> bool:
        """Whether bytes of one of these kinds come at this moment."""
        return any(self._is_held(name) for name in kinds)

    def wait(self, is_over: Callable[[], bool], behind: Sequence[str] = KINDS) -> None:
        """Wait while bytes come that go first, `LIMIT_S` at most, or until `is_over` says so."""
        end_s = time.monotonic() + LIMIT_S
        while self.is_taken(behind) and not is_over() and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _is_held(self, name: str) -> bool:
        try:
            lock = self._looked_at.get(name)
            if lock is None:
                lock = self._looked_at[name] = self._open(name)
            file_lock.lock(lock.descriptor, limit_s=0)
        except BlockingIOError:
            return True
        except OSError:
            return False
        lock.release()
        return False

    def _open(self, name: str) -> file_lock.FileLock:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        path = os.path.join(self._folder, name)
        return file_lock.FileLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def close(self) -> None:
        for lock in self._looked_at.values():
            lock.close()
        self._looked_at.clear()
