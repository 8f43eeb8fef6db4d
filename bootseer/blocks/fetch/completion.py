"""Waits for blocks, and requests after their start: how each ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.blocks.fetch import retry_policy, shared_claims
from bootseer.blocks.fetch.block_memory import BlockMemory
from bootseer.blocks.fetch.records import (
    Block,
    Copy,
    Effects,
    Job,
    ObjectRecord,
    Piece,
    Request,
    Status,
    StoreHealth,
    StoreQueue,
    Waiter,
)
from bootseer.blocks.fetch.replica_choice import ReplicaChoice
from bootseer.blocks.fetch.slabs import Slot
from bootseer.blocks.fetch.store_queues import StoreQueues
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.errors import BootseerError, CorruptDataError, DeadlineError, StoreUnavailableError

MOST_PROBES = 8
PROBE_EVERY_S = 3.0
"""At most eight, one every 3 s: so each lasts longer than a store may be silent (`stall_s`)."""


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
        """Fail a waiter at its deadline, as no thread waits for it."""
        self.watched[waiter] = queue

    def patience_s(self, record: ObjectRecord, now_s: float) -> float:
        """How long a read that begins now waits: briefly where others have just waited in vain.

        While reads keep failing it is one outage; after a pause it is a new one.
        """
        limit_s, health = self._settings.demand_deadline_s, record.queue.health
        if health.outage_s and now_s - health.outage_s < limit_s:
            return min(limit_s, self._settings.outage_deadline_s)
        health.outage_s = 0.0
        return limit_s

    def block_arrived(self, waiter: Waiter, block: Block) -> None:
        """Count a block for a waiter that has it, or will once its copies (`writing`) are made."""
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
        """Give up a block, and fail all waiters for it."""
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

        Requests that write into the waiter's memory are cancelled too; when `writing` is 0, the
        memory belongs to its reader again.
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

    def forget(self, waiter: Waiter) -> None:
        """Withdraw a waiter without calling its receiver."""
        waiter.on_done = None
        self.watched.pop(waiter, None)
        self.withdraw(waiter)

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
        """Cancel those of a block's requests of which no block is in flight any more."""
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
        """Fail watched waiters after `stalled_s` without bytes from their store.

        Later reads wait as in any outage.
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
        """Keep one block of a failed read requested, to see when the store works again.

        A store that works again may need longer for its first byte than reads wait in an outage.
        Once this block arrives, reads wait as usual again. Of several such blocks the oldest is
        dropped, because its request may date from the time when the store was away.
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


Copies = Sequence[tuple[Waiter, Sequence[Copy]]]


class Unfinished(NamedTuple):
    """What is left to do for a block that arrived, without the lock."""

    fill: Slot | None = None
    """Copy the reader's bytes here and report the block again, for other waiters."""
    copies: Copies = ()
    """Copy from the block into readers' memory, then report `copies_made`."""


NOTHING_LEFT = Unfinished()


class Completion:
    """Requests after their start.

    No threads, no I/O, no clock; called with the fetcher's lock held.
    """

    def __init__(
        self,
        settings: FetchSettings,
        queues: StoreQueues,
        memory: BlockMemory,
        waiters: Waiters,
        replicas: ReplicaChoice,
        effects: Effects,
    ) -> None:
        self._settings, self._queues, self._memory = settings, queues, memory
        self._waiters, self._replicas, self._effects = waiters, replicas, effects
        self._left: dict[Block, None] = {}  # to other processes, for now
        self._look_s = 0.0  # when to look for them again

    # --- arrival -----------------------------------------------------------------------------

    def block_arrived(self, request: Request, number: int, now_s: float) -> Unfinished:
        """Handle block `number` of a request, which has arrived and was verified."""
        block, target = request.items[number][0], request.targets[number]
        health = request.queue.health
        if not request.arrived:
            health.first_waits_s.append(now_s - request.began_s)
        request.arrived += 1
        health.block_arrived(now_s)
        if block.status is not Status.IN_FLIGHT:
            return NOTHING_LEFT  # the other request was first, or the block is not wanted any more
        slot = request.slots[number]
        is_direct = target is not None and target is block.direct_target
        if slot is None:
            others = [
                waiter
                for waiter in block.waiters
                if not is_direct or waiter[0] is not block.direct_waiter
            ]
            if others and (slot := self._memory.slot(block.length, Priority.DEMAND)) is not None:
                request.slots[number] = slot
                request.arrived -= 1
                return Unfinished(fill=slot)
            self._deliver_direct(block, others)
            return NOTHING_LEFT
        request.slots[number] = None
        self._memory.keep(block, slot)
        copies = self._deliver(block, is_direct)
        self._waiters.cancel_unneeded(block)
        return Unfinished(copies=copies)

    def _deliver_direct(self, block: Block, others: list[tuple[Waiter, Sequence[Copy]]]) -> None:
        """The block is in its reader's memory alone; `others`, if any, need it once more."""
        reader = block.direct_waiter
        if reader is not None:
            self._waiters.block_arrived(reader, block)
        block.direct_target = block.direct_waiter = None
        if not others:
            self._memory.drop(block)
            self._waiters.cancel_unneeded(block)
            return
        block.waiters = others
        self._plan_again(block)

    def _deliver(self, block: Block, is_direct: bool) -> Copies:
        copies_to_make: list[tuple[Waiter, Sequence[Copy]]] = []
        for waiter, copies in block.waiters:
            if waiter is block.direct_waiter and block.direct_target is not None:
                if not is_direct:  # its memory may still be written to by the request that lost
                    self._memory.pin(block)
                    waiter.late.append((block, Copy(0, block.direct_target)))
            elif copies:
                self._memory.pin(block)
                waiter.writing += 1
                copies_to_make.append((waiter, copies))
            elif waiter.keep:
                self._memory.pin(block)
                waiter.pinned.append(block)
            self._waiters.block_arrived(waiter, block)
        block.waiters = []
        block.direct_target = block.direct_waiter = None
        return copies_to_make

    def copies_made(self, block: Block, copies: Copies) -> None:
        """Note that the copies that `block_arrived` asked for are made."""
        for waiter, _ in copies:
            self._memory.unpin(block)
            waiter.writing -= 1
            if not waiter.writing:
                self._waiters.call_if_done(waiter)

    # --- the end of a request ----------------------------------------------------------------

    def request_ended(self, request: Request, error: Exception | None, now_s: float) -> int:
        """End a request and free its memory; returns how many of its blocks are tried again."""
        self._queues.request_ended(request)
        self._replicas.request_ended(request)
        cause = error or next(iter(request.errors.values()), None)
        if cause is not None and not request.attempt.cancelled:
            request.queue.health.request_failed(cause, now_s)
        if isinstance(error, BootseerError) and error.retryable and not request.attempt.cancelled:
            self._replicas.suspect(request.replica, now_s)
        if request.scratch is not None:
            self._memory.pool.give(request.scratch)
            request.scratch = None
        again: dict[float, list[tuple[Block, Piece]]] = {}
        for number, (block, piece) in enumerate(request.items):
            delay_s = self._part(request, number, error)
            if delay_s is not None:
                again.setdefault(delay_s, []).append((block, piece))
        for waiter in request.writes_to:
            waiter.writing -= 1
            self._waiters.call_if_done(waiter)
        for delay_s, items in again.items():
            self._try_again(request.queue, items, delay_s, now_s)
        return sum(map(len, again.values()))

    def _part(self, request: Request, number: int, error: Exception | None) -> float | None:
        """Detach a block from a finished request; returns the delay before its next try, if any."""
        block = request.items[number][0]
        self._take_off(request, number)
        if block.status is not Status.IN_FLIGHT:
            if block.object.forgotten:
                self._memory.drop_forgotten(block)
            return None
        cause = request.errors.get(number) or error
        cancelled = request.attempt.cancelled and number not in request.errors
        if cause is not None and not cancelled and request.replica:
            block.failed_replicas |= {request.replica}
            if isinstance(cause, CorruptDataError):
                block.corrupt_replicas |= {request.replica}
        if block.requests:
            return None  # its other request goes on
        if not block.waiters:
            self._memory.drop(block)
            return None
        if request.queue is not block.object.queue:  # not in the cache after all
            block.not_cached = True
            block.failed_replicas = block.corrupt_replicas = frozenset()
            self._plan_again(block)
            return None
        block.status = Status.WANTED
        return retry_policy.AT_ONCE if cancelled else self._next_try_s(request, number, cause)

    def _next_try_s(self, request: Request, number: int, cause: Exception | None) -> float | None:
        """Delay until a block that did not arrive is tried again; None once it failed for good."""
        block = request.items[number][0]
        block.tries += 1
        cause = cause or StoreUnavailableError(
            f"{request.items[number][1].part}: the store ended a request early; try again"
        )
        delay_s = retry_policy.next_try_s(
            cause,
            tries=block.tries,
            replicas=request.replicas,
            avoid=block.failed_replicas,
            bad=block.corrupt_replicas,
            settings=self._settings,
            chance=request.chance,
        )
        if delay_s is None:
            self._waiters.fail_block(block, cause)
        elif delay_s:
            block.failed_replicas = frozenset()
        return delay_s

    def _plan_again(self, block: Block) -> None:
        block.status = Status.WANTED
        block.job = None
        self._effects.to_plan.append(block)

    def _try_again(
        self, queue: StoreQueue, items: list[tuple[Block, Piece]], delay_s: float, now_s: float
    ) -> None:
        """Queue blocks again, ahead of all others; the worker that is free now will take them."""
        job = Job(queue, items, min(block.priority for block, _ in items))
        for block, _ in items:
            block.job = job
        if delay_s:
            self._queues.push_later(job, now_s + delay_s)
        else:
            self._queues.push(job)
        self._effects.clock_changed = True

    def _take_off(self, request: Request, number: int) -> None:
        """Undo what the request's start did for one block."""
        block, slot = request.items[number][0], request.slots[number]
        block.requests.remove(request)
        if block.direct_request is request:
            block.direct_request = None
        if slot is not None:
            request.slots[number] = None
            self._memory.pool.give(slot)

    # --- blocks that other processes fetch ---------------------------------------------------

    def leave_to_others(self, request: Request, refused: set[int], now_s: float) -> None:
        """Leave blocks to the processes that claimed them, before the request is made.

        The request keeps the first run of neighbours that it may fetch; its other blocks that it
        may fetch are queued again.
        """
        start, stop = shared_claims.first_run(len(request.items), refused)
        later: list[tuple[Block, Piece]] = []
        for number in (*range(start), *range(stop, len(request.items))):
            block, piece = request.items[number]
            self._take_off(request, number)
            if block.status is not Status.IN_FLIGHT or block.requests:
                continue
            if not block.waiters:
                self._memory.drop(block)
                continue
            block.status = Status.WANTED
            if number in refused:
                block.left_s = block.left_s or now_s
                self._left[block] = None
                self._look_s = now_s + shared_claims.FIRST_POLL_S
            else:
                later.append((block, piece))
        for column in (request.items, request.slots, request.targets):
            del column[stop:]
            del column[:start]
        self._let_go(request)
        self._effects.clock_changed = True
        if later:
            self._try_again(request.queue, later, 0.0, now_s)
            self._effects.new_jobs += 1

    def _let_go(self, request: Request) -> None:
        """Release readers whose memory a request no longer writes to."""
        still = {b.direct_waiter for b, _ in request.items if b.direct_request is request}
        for waiter in [one for one in request.writes_to if one not in still]:
            request.writes_to.remove(waiter)
            waiter.writing -= 1
            self._waiters.call_if_done(waiter)

    def left_blocks(self, now_s: float) -> list[Block]:
        """Blocks left to other processes, if it is time to look for them in the cache."""
        if not self._left or now_s < self._look_s:
            return []
        for block in [b for b in self._left if b.status is not Status.WANTED or b.job]:
            del self._left[block]
        return list(self._left)

    def stop_leaving(self, blocks: Iterable[Block], now_s: float) -> None:
        """Plan these blocks that were left to other processes; look for the others again."""
        for block in blocks:
            if block in self._left:
                del self._left[block]
                if block.status is Status.WANTED and block.job is None:
                    self._effects.to_plan.append(block)
        youngest_s = max((block.left_s for block in self._left), default=now_s)
        self._look_s = now_s + shared_claims.poll_s(now_s - youngest_s)

    def look_in_s(self, now_s: float) -> float | None:
        """Seconds until the blocks left to other processes are to be looked for."""
        return max(0.0, self._look_s - now_s) if self._left else None
