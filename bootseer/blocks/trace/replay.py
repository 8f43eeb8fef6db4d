"""Replay: fetch what earlier starts touched, in their order, before this one asks for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bootseer.blocks.extents import Extent
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource
from bootseer.blocks.trace.trace_file import Trace
from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, UsageError

WINDOW_BYTES = 64 << 20
STEP_BYTES = 8 << 20
FAILURES = 3  # in a row: the store fails, and what it can still do belongs to demand
_POLL_S = 0.5


class Ticket(Protocol):
    """A prefetch under way."""

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""

    def cancel(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; True when every block arrived."""


class Prefetcher(Protocol):
    """What replay needs of the fetcher; `prefetch` returns at once."""

    def prefetch(
        self, source: BlockSource, offset: int, length: int, priority: Priority
    ) -> Ticket: ...


def plan_replay(
    trace: Trace, block_bytes: int, *, step_bytes: int = STEP_BYTES, most_bytes: int | None = None
) -> list[Extent]:
    """Whole blocks in the order of their first touch, neighbours in one step; each block once.

    Steps have at most `step_bytes` (one block at least), all together at most `most_bytes`.
    """
    done: set[int] = set()
    runs: list[list[int]] = []  # first block, block behind the last
    room = max(1, step_bytes // block_bytes)
    left = len(range(0, trace.size_bytes, block_bytes))
    if most_bytes is not None:
        left = min(left, most_bytes // block_bytes)
    for extent in trace.extents:
        first = extent.offset // block_bytes
        for block in range(first, -(-(extent.offset + extent.length) // block_bytes)):
            if block in done:
                continue
            if len(done) >= left:
                break
            done.add(block)
            if runs and runs[-1][1] == block and block - runs[-1][0] < room:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
    steps = []
    for start, stop in runs:
        end = min(stop * block_bytes, trace.size_bytes)
        steps.append(Extent(start * block_bytes, end - start * block_bytes))
    return steps


class Replay(Closing):
    """Prefetches a trace's blocks through a fetcher, from a thread of its own.

    At most `window_bytes` are under way at a time, so that demand meets short queues. Where no node
    cache takes the blocks, `most_bytes` is the memory that they may fill. A few faults in a row end
    the replay, and `failed` says so; readers never see these faults. Raises UsageError when the
    trace is of another object.
    """

    def __init__(
        self,
        trace: Trace,
        fetcher: Prefetcher,
        source: BlockSource,
        *,
        window_bytes: int = WINDOW_BYTES,
        most_bytes: int | None = None,
        finished: Callable[[], None] | None = None,
    ) -> None:
        if trace.size_bytes != source.size_bytes or trace.object != source.key:
            raise UsageError(
                f"the trace is of {trace.object}, not of {source.key or 'this object'}"
            )
        self._trace, self._most_bytes = trace, most_bytes
        self._fetcher, self._source = fetcher, source
        self._window_bytes = window_bytes
        self._finished = finished
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._steps: deque[Extent] = deque()
        self._under_way: deque[tuple[Ticket, int]] = deque()
        self._thread: threading.Thread | None = None
        self.replayed_bytes = 0
        self.failed = ""

    def start(self) -> Replay:
        """Begin; returns at once. A second call changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="replay", daemon=True)
            self._thread.start()
        return self

    def pause(self) -> None:
        """Issue nothing more until `resume`; what is under way goes on. Returns at once."""
        self._set(paused=True)

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._set(paused=False)

    def _set(self, *, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, well or not, within the time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is not None and not self._thread.is_alive()

    def close(self) -> None:
        """Cancel what is under way and end; twice is safe."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        block_bytes = self._source.block_bytes
        try:
            self._steps += plan_replay(self._trace, block_bytes, most_bytes=self._most_bytes)
            failures = 0
            while self._fill_window():
                failures = 0 if self._await_oldest() else failures + 1
                if failures == FAILURES:
                    self.failed = f"{failures} steps in a row could not be fetched"
                    break
        except BootseerError as error:
            self.failed = str(error)  # the fetcher was closed
        finally:
            for ticket, _ in self._under_way:
                ticket.cancel()
            if self._finished is not None:
                self._finished()

    def _fill_window(self) -> bool:
        """Issue steps while the window has room; False when nothing is left to wait for."""
        while True:
            with self._changed:
                while self._paused and not self._closed and not self._under_way:
                    self._changed.wait()
                if self._closed:
                    return False
                under_way_bytes = sum(length for _, length in self._under_way)
                full = self._under_way and under_way_bytes >= self._window_bytes
                if self._paused or full or not self._steps:
                    return bool(self._under_way)
                step = self._steps.popleft()
            # Outside the lock, so that `pause` never waits for a fetcher.
            ticket = self._fetcher.prefetch(self._source, step.offset, step.length, Priority.HOT)
            self._under_way.append((ticket, step.length))

    def _await_oldest(self) -> bool:
        """Wait for the oldest step, or until we are closed; False when it failed."""
        ticket, length = self._under_way[0]
        while not (arrived := ticket.wait(_POLL_S)) and not ticket.done:
            with self._changed:
                if self._closed:
                    return True
        self._under_way.popleft()
        if not arrived:
            return False
        self.replayed_bytes += length
        return True

    def __enter__(self) -> Replay:
        return self.start()
