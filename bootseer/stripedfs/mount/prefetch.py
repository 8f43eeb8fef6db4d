"""Fetching a checkpoint while the job that will load it still imports.

Its files are fetched front to back, behind whatever a reader waits for and what a start on this
node touches sooner, until all of them are on this node, or as many as memory holds. Once the job
opens a large file that was not expected, the guess was wrong: what is left of it is dropped, and
reported. Once all has been fetched, that is reported only where nothing expected was opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from bootseer import events
from bootseer.blocks.link_turns import CHECKPOINT, DEMAND, HOT, KINDS
from bootseer.blocks.settings import Priority
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, describe
from bootseer.fuse.operations import FileSystemError
from bootseer.stripedfs.mount import expected_load
from bootseer.system import page_cache
from bootseer.system.priority import YieldingProcess

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Ticket
    from bootseer.blocks.link_turns import LinkTurns
    from bootseer.stripedfs.mount.inodes import Node
    from bootseer.stripedfs.mount.read_tree import StripedTree

PHASE = "checkpoint.prefetch"
STEP_BYTES = 8 << 20
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES, WINDOW_S = 24 << 20, 64 << 20, 0.2
"""What is under way at a time: what comes within so many seconds.

So a reader's request meets short queues, and where a few connections fill the link, they wake the
processor less often while the job imports: at 1 Gbit/s 20,000 times instead of 30,000 for 143 MB.
"""
SLOW_BYTES_S = 60e6
"""Where less comes, each connection may be slow, and the most are used."""
READ_AHEAD_BYTES = 128 << 10
"""The kernel reads ahead this much at one request on every file system, and drops the rest."""
YIELDING_STEPS = 10
"""How far this process goes behind the container that starts and the imports of its job (nice(2)).

On two cores the container began 0.03 to 0.08 s sooner.
"""
FAILURES = 3
"""Steps in a row that failed: what the store can still do belongs to readers."""
_POLL_S = 0.5


class Prefetch(Closing):
    """Fetches what a mount's job is expected to load, from a thread of its own.

    `wanted` is as in `expected_load`. At most `most_bytes` are fetched (None: all, as a node cache
    keeps them). `turns` tells when other processes of the node need the link more, and them, where
    the job `is_starting`, that what nobody waits for shall come later. Then this process, which is
    the mount's worker, also yields the processor until the job opens a large file.
    """

    def __init__(
        self,
        tree: StripedTree,
        wanted: str,
        *,
        most_bytes: int | None,
        turns: LinkTurns | None = None,
        is_starting: bool = False,
    ) -> None:
        self._tree, self._wanted, self._most_bytes = tree, wanted, most_bytes
        self._turns, self._is_starting = turns, is_starting
        self._yielding = YieldingProcess(YIELDING_STEPS)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._expected: frozenset[str] | None = None
        self._opened: set[str] = set()
        self._stray, self._has_ended = "", False
        self._under_way: deque[tuple[Ticket, int]] = deque()
        self._failures = 0
        self._begun_s, self._arrived_bytes = 0.0, 0
        self.fetched_bytes = 0
        self._thread = threading.Thread(target=self._run, name="stripe-prefetch", daemon=True)
        self._late_report: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def note_open(self, node: Node) -> None:
        """Note that a reader opened a file; quick, from any thread."""
        if self._closing.is_set() or node.info.size_bytes <= expected_load.SMALL_BYTES:
            return
        with self._lock:
            self._yielding.end()
            self._opened.add(node.path)
            self._check_guess()

    def _check_guess(self) -> None:
        """End where something else was opened; for a caller that holds the lock."""
        expected = self._expected or frozenset()
        stray = self._opened - expected if expected else None
        if not stray or (self._has_ended and self._opened & expected):
            return
        self._stray = min(stray)
        self._closing.set()
        if self._has_ended:  # in a thread, for the reader waits for its opening
            self._late_report = threading.Thread(target=self._report_stray, daemon=True)
            self._late_report.start()

    def _report_stray(self) -> None:
        """Report a wrong guess of which all had been fetched."""
        with events.open_writer() as writer:
            about = {"bootseer.source": "checkpoint", "bootseer.reason": self._why_ended()}
            writer.point(PHASE, "fallback", about)

    def close(self) -> None:
        """Give up what is under way; twice is safe."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._late_report is not None:
            self._late_report.join()

    def _run(self) -> None:
        with events.open_writer() as writer:
            span = writer.begin(PHASE, {"bootseer.source": "checkpoint"})
            status, reason = "ok", ""
            try:
                with self._announcing():
                    expected = expected_load.find_expected(self._tree, self._wanted)
                    # The job may begin much later, and shall see what is published until then.
                    for node in self._tree.nodes.all():
                        if node.info.is_folder and not node.is_fixed:
                            self._tree.nodes.outdate(node)
                    self._yield()
                    reason = self.fetch(expected)
            except (BootseerError, FileSystemError, OSError) as error:
                reason = describe(error)
            except Exception as error:  # a border: readers are served without it
                reason = f"internal fault: {error!r}"
            finally:
                for ticket, _ in self._under_way:
                    ticket.cancel()
            with self._lock:
                self._yielding.end()
                self._has_ended = True
                reason = reason or self._why_ended()
            about: dict[str, object] = {"bootseer.bytes": self.fetched_bytes}
            if reason:
                status, about = "fallback", {**about, "bootseer.reason": reason}
            writer.end(span, PHASE, status, about)

    def _yield(self) -> None:
        if self._is_starting:
            with self._lock:
                if not self._opened:
                    self._yielding.begin()

    def _announcing(self) -> AbstractContextManager[None]:
        if self._turns is None or not self._is_starting:
            return nullcontext()
        return self._turns.holding(CHECKPOINT)

    def fetch(self, nodes: Sequence[Node]) -> str:
        """Fetch files, in this thread; returns why that ended early, "" where it did not."""
        with self._lock:
            self._expected = frozenset(node.path for node in nodes)
            self._check_guess()
        left, self._begun_s = self._most_bytes, time.monotonic()
        for node in nodes:
            if self._closing.is_set() or left == 0:
                break
            source = self._tree.source(node)
            length = source.size_bytes if left is None else min(left, source.size_bytes)
            left = None if left is None else left - length
            sealed = self._tree.open_passed(source)
            if sealed is not None:
                with sealed:
                    self._read_ahead(sealed.descriptor, length)
                continue
            for begin in range(0, length, STEP_BYTES):
                if not self._make_room():
                    return self._why_ended()
                step = min(STEP_BYTES, length - begin)
                ticket = self._tree.files.fetcher.prefetch(source, begin, step, Priority.HOT)
                self._under_way.append((ticket, step))
        while self._under_way:
            if not self._await_oldest():
                return self._why_ended()
        return self._why_ended()

    def _read_ahead(self, descriptor: int, length: int) -> None:
        """Have the kernel read what it will serve by itself from this node's disk.

        Nobody's turn on the link is waited for: nothing of this comes over it. A call waits while
        the disk's queue is full, so that no more is under way than the disk takes.
        """
        if _is_cached(descriptor, length):  # a thousand calls would be for nothing
            self.fetched_bytes += length
            return
        for begin in range(0, length, READ_AHEAD_BYTES):
            if self._closing.is_set():
                return
            window = min(READ_AHEAD_BYTES, length - begin)
            try:
                os.posix_fadvise(descriptor, begin, window, os.POSIX_FADV_WILLNEED)
            except OSError:  # then the kernel reads it when the job does
                return
            self.fetched_bytes += window

    def _why_ended(self) -> str:
        if self._stray:
            expected = self._wanted or "all of it"
            return f"the job loads {self._stray}, not what was expected ({expected})"
        if self._failures >= FAILURES:
            return f"{FAILURES} requests in a row failed"
        return ""

    def _make_room(self) -> bool:
        """Wait until another step may begin; False where none may."""
        if self._turns is not None:
            behind, waits_s = (DEMAND, HOT) if self._is_starting else KINDS, time.monotonic()
            self._turns.wait(self._closing.is_set, behind)
            self._begun_s += time.monotonic() - waits_s
        while sum(length for _, length in self._under_way) >= self._window_bytes():
            if not self._await_oldest():
                return False
        return not self._closing.is_set()

    def _window_bytes(self) -> int:
        if self._arrived_bytes < LEAST_WINDOW_BYTES:
            return LEAST_WINDOW_BYTES
        rate_bytes_s = self._arrived_bytes / (time.monotonic() - self._begun_s)
        if rate_bytes_s < SLOW_BYTES_S:
            return MOST_WINDOW_BYTES
        return min(MOST_WINDOW_BYTES, max(LEAST_WINDOW_BYTES, int(rate_bytes_s * WINDOW_S)))

    def _await_oldest(self) -> bool:
        """Wait for the oldest step; False where it is no use to go on."""
        ticket, length = self._under_way[0]
        while not (arrived := ticket.wait(_POLL_S)) and not ticket.done:
            if self._closing.is_set():
                return False
        self._under_way.popleft()
        if arrived:
            self.fetched_bytes += length
            self._arrived_bytes += length
            self._failures = 0
        else:
            self._failures += 1
        return self._failures < FAILURES and not self._closing.is_set()


def _is_cached(descriptor: int, length: int) -> bool:
    try:
        return page_cache.count_cached_bytes(descriptor, 0, length) >= length
    except OSError:  # a kernel before 6.5
        return False
