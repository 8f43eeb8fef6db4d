"""Who waits for blocks, and how a wait ends: all arrived, failed, late, or given up."""

from __future__ import annotations

from bootseer.blocks.fetch.block_memory import BlockMemory
from bootseer.blocks.fetch.records import (
    Block,
    Effects,
    ObjectRecord,
    Request,
    Status,
    StoreHealth,
    StoreQueue,
    Waiter,
)
from bootseer.blocks.fetch.store_queues import StoreQueues
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.errors import DeadlineError

MOST_PROBES = 8
PROBE_EVERY_S = 3.0
"""Eight at most, one each 3 s: each has longer than a store may be silent (`stall_s`)."""


class Waiters:
    """Waiters and the blocks that they wait for.

    No threads, no I/O, no clock; called with the fetcher's lock held.
    """

    def __init__(
        self,
        settings: FetchSettings,
        queues: StoreQueues,
        memory: BlockMemory,
        effects: Effects,
    ) -> None:
        self._settings, self._queues = settings, queues
        self._memory, self._effects = memory, effects
        self.watched: dict[Waiter, StoreQueue] = {}

    # --- waiting -----------------------------------------------------------------------------

    def watch(self, waiter: Waiter, queue: StoreQueue) -> None:
        """Fail a waiter at its deadline; one that no thread waits for."""
        self.watched[waiter] = queue

    def patience_s(self, record: ObjectRecord, now_s: float) -> float:
        """How long a read that begins now waits: not long where others waited in vain just now.

        As long as reads go on to fail it is one outage; after a pause it is a new one.
        """
        limit_s, health = self._settings.demand_deadline_s, record.queue.health
        if health.outage_s and now_s - health.outage_s < limit_s:
            return min(limit_s, self._settings.outage_deadline_s)
        health.outage_s = 0.0
        return limit_s

    def block_arrived(self, waiter: Waiter, block: Block) -> None:
        """A waiter has a block, or will when the copies that it counts in `writing` are made."""
        waiter.remaining -= 1
        waiter.blocks.pop(block, None)
        if not waiter.remaining:
            self.call_if_done(waiter)

    def call_if_done(self, waiter: Waiter) -> None:
        """To be called after each change of what a waiter waits for."""
        if waiter.on_done is not None and waiter.finished:
            self._effects.to_call.append(waiter.on_done)
            waiter.on_done = None
            self.watched.pop(waiter, None)

    # --- the end of a wait -------------------------------------------------------------------

    def fail_block(self, block: Block, error: Exception) -> None:
        """Give a block up, and fail all that wait for it."""
        waiters, health = block.waiters, block.object.queue.health
        if health.failed_s - health.failing_s >= self._settings.outage_deadline_s and any(
            waiter.priority is Priority.DEMAND for waiter, _ in waiters
        ):
            health.outage_s = health.failed_s
        self._memory.drop(block)
        for waiter, _ in waiters:
            waiter.remaining -= 1
            waiter.blocks.pop(block, None)
            self.fail(waiter, error)

    def fail(self, waiter: Waiter, error: Exception) -> None:
        """End a wait with an error."""
        waiter.error = waiter.error or error
        self.withdraw(waiter)

    def withdraw(self, waiter: Waiter) -> None:
        """Take a waiter off all blocks it still waits for, and cancel what nothing else needs.

        What writes into the waiter's memory is cancelled too; the memory is its reader's again
        when `writing` is 0.
        """
        if waiter.closed:
            return
        waiter.closed = True
        for block in waiter.blocks:
            self._leave(block, waiter)
        if waiter.writing:
            for request in self._queues.requests:
                if waiter in request.writes_to:
                    self._cancel(request)
        for block in waiter.pinned:
            self._memory.unpin(block)
        for block, _ in waiter.late:
            self._memory.unpin(block)
        waiter.blocks, waiter.pinned, waiter.late = {}, [], []
        self.call_if_done(waiter)

    def _leave(self, block: Block, waiter: Waiter) -> None:
        block.waiters = [one for one in block.waiters if one[0] is not waiter]
        if block.direct_waiter is waiter:
            block.direct_target = block.direct_waiter = None
        if block.waiters:
            return
        if block.status is Status.WANTED:
            self._memory.drop(block)
            return
        for request in block.requests:
            if not any(other.waiters for other, _ in request.items):
                self._cancel(request)

    def cancel_unneeded(self, block: Block) -> None:
        """Cancel the requests of a block that now bring nothing that is wanted."""
        for request in block.requests:
            if request.arrived < len(request.items) and not any(
                other.status is Status.IN_FLIGHT for other, _ in reversed(request.items)
            ):
                self._cancel(request)

    def _cancel(self, request: Request) -> None:
        if request in self._queues.requests and not request.attempt.cancelled:
            self._effects.to_cancel.append(request.attempt)

    # --- time --------------------------------------------------------------------------------

    def check_deadlines(self, now_s: float) -> None:
        """Fail the watched waiters whose deadline has passed."""
        for waiter, queue in list(self.watched.items()):
            if now_s <= waiter.deadline_s:
                continue
            health = queue.health
            if health.arrived_s < waiter.deadline_s - self._settings.demand_deadline_s:
                health.outage_s = now_s
            if health.outage_s:
                self._probe(health, waiter, now_s)
            error = f"a read was not answered in time{_cause(health)}"
            self.fail(waiter, DeadlineError(error))

    def give_up(self, stalled_s: float, now_s: float) -> None:
        """Fail the watched waiters that have waited so long for a store that brought nothing.

        Those that follow wait as in any outage.
        """
        for waiter, queue in list(self.watched.items()):
            health = queue.health
            began_s = waiter.deadline_s - self._settings.demand_deadline_s
            if now_s - max(began_s, health.arrived_s) < stalled_s:
                continue
            health.outage_s = now_s
            error = f"nothing came for {stalled_s:g} s, and the reader was asked to end"
            self.fail(waiter, DeadlineError(f"{error}{_cause(health)}"))

    def _probe(self, health: StoreHealth, waiter: Waiter, now_s: float) -> None:
        """Let a block of a read that is given up come all the same, though no reader waits for it.

        A store that is back may need longer for its first byte than reads wait in an outage: the
        block shows when it comes, and then they wait again. The oldest of several gives way, for
        its request may be of the time when the store was away.
        """
        block = next(iter(waiter.blocks), None)
        if block is None or now_s - health.probed_s < PROBE_EVERY_S:
            return
        health.probes = [probe for probe in health.probes if not probe.finished]
        if len(health.probes) >= MOST_PROBES:
            self.withdraw(health.probes.pop(0))
        probe = Waiter(Priority.HOT, remaining=1)
        block.waiters.append((probe, ()))
        probe.blocks[block] = None
        health.probes.append(probe)
        health.probed_s = now_s


def _cause(health: StoreHealth) -> str:
    return f": {health.error}" if health.error is not None else "; see the store"
