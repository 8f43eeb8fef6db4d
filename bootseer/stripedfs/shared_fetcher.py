"""The fetcher of this process, for whoever brings none of their own.

One connection and memory budget a process: every file object and file system shares it. A forked
child gets a fresh one with its first use, since threads do not survive a fork.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.blocks.fetch.plan.readahead import Share


class _Shared:
    """Holds the one fetcher and the process it belongs to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fetcher: Fetcher | None = None
        self.pid = 0
        self.shares: weakref.WeakKeyDictionary[Fetcher, Share] = weakref.WeakKeyDictionary()


_shared = _Shared()


def shared_fetcher() -> Fetcher:
    """This process's fetcher, made with the first call and never closed."""
    # The process first: it is noted after its fetcher, perhaps between our two looks.
    if _shared.pid == os.getpid() and (found := _shared.fetcher) is not None:
        return found
    with _shared.lock:
        if _shared.fetcher is None or _shared.pid != os.getpid():
            from bootseer.blocks.fetch.fetcher import Fetcher

            _shared.fetcher, _shared.pid = Fetcher(), os.getpid()
            atexit.register(_tell, _shared.fetcher, _shared.pid)
        return _shared.fetcher


def used_fetcher() -> Fetcher | None:
    """This process's fetcher, if it has been made."""
    return _shared.fetcher if _shared.pid == os.getpid() else None


def _tell(fetcher: Fetcher, pid: int) -> None:
    """Write what was fetched as events; a forked child does not repeat its parent's."""
    if pid == os.getpid():
        fetcher.stats.emit()


def share_of(fetcher: Fetcher) -> Share:
    """What all files read through a fetcher may have fetched ahead together: half its memory."""
    with _shared.lock:
        found = _shared.shares.get(fetcher)
        if found is None:
            from bootseer.blocks.fetch.plan.readahead import Share

            found = _shared.shares[fetcher] = Share(fetcher.settings.memory_bytes // 2)
        return found


def _new_lock() -> None:
    _shared.lock = threading.Lock()  # another thread may have held the parent's


os.register_at_fork(after_in_child=_new_lock)
