"""The fetcher of this process, for callers that have none of their own.

A process has one budget of connections and memory: every file object and file system shares it. A
forked child makes its own with the first use, since threads do not survive a fork.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.readahead import Share


class _Shared:
    """The one fetcher, and the process it belongs to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fetcher: Fetcher | None = None
        self.pid = 0
        self.shares: weakref.WeakKeyDictionary[Fetcher, Share] = weakref.WeakKeyDictionary()


_shared = _Shared()


def shared_fetcher() -> Fetcher:
    """This process's fetcher, made with the first call and never closed."""
    fetcher = used_fetcher()
    if fetcher is not None:
        return fetcher
    with _shared.lock:
        if _shared.fetcher is None or _shared.pid != os.getpid():
            _shared.fetcher, _shared.pid = Fetcher(), os.getpid()
            atexit.register(_emit_stats, _shared.fetcher, _shared.pid)
        return _shared.fetcher


def used_fetcher() -> Fetcher | None:
    """This process's fetcher, if it has been made."""
    return _shared.fetcher if _shared.pid == os.getpid() else None


def _emit_stats(fetcher: Fetcher, pid: int) -> None:
    """Write what was fetched as events; a forked child does not repeat its parent's."""
    if pid == os.getpid():
        fetcher.stats.emit()


def share_of(fetcher: Fetcher) -> Share:
    """What all files read through a fetcher may have fetched ahead together: half its memory."""
    with _shared.lock:
        share = _shared.shares.get(fetcher)
        if share is None:
            share = _shared.shares[fetcher] = Share(fetcher.settings.memory_bytes // 2)
        return share


def _replace_lock() -> None:
    _shared.lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_replace_lock)
