"""Where the receiving threads run while they answer small reads.

A small read is so short that two threads on one processor, or on the move between processors,
cost more than the reading itself: with a share of the processors for each thread, 4 KiB reads
through a direct_io mount came about a tenth faster for one reader and for four, with a server
with and one without this in turns (two processors). Large and buffered reads gain nothing, and
may lose where the one idle processor is another thread's, so they end it. The share of a machine
of many processors is large enough for the scheduler to choose from. Whoever starts a thread
passes its processors on, so this is only for trees whose reads are answered from `maps`, without
a call.
"""

from __future__ import annotations

import contextlib
import os

from bootseer.fuse.wire import Opcode

SAMPLE_READS = 256
"""A receiving thread tells of one request among so many."""
SMALL_BYTES = 16 << 10
_SMALL_SAMPLES = 4


class Spread:
    """The processors of one of `threads` receiving threads; made and used by that thread."""

    def __init__(self, number: int, threads: int) -> None:
        self._all: set[int] = set()
        with contextlib.suppress(OSError):
            self._all = os.sched_getaffinity(0)
        share = sorted(self._all)[number % threads :: threads]
        self._share = set(share) if threads > 1 and len(self._all) >= threads else self._all
        self._small = 0

    def sample(self, opcode: int, size_bytes: int) -> None:
        """Take note of a request; small reads, several times in turn, confine the thread."""
        if opcode != Opcode.READ:
            return
        if size_bytes > SMALL_BYTES:
            if self._small >= _SMALL_SAMPLES:
                self._run_on(self._all)
            self._small = 0
        elif self._small < _SMALL_SAMPLES:
            self._small += 1
            if self._small == _SMALL_SAMPLES:
                self._run_on(self._share)

    def _run_on(self, processors: set[int]) -> None:
        if self._share is self._all:
            return
        try:
            os.sched_setaffinity(0, processors)
        except OSError:
            self._share = self._all  # not ours to choose here, or no longer: leave it alone
