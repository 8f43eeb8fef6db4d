"""The fetcher's decisions: what is wanted, in flight and ready. No threads, no I/O, no clock.

Every method is called with the fetcher's lock held and returns quickly. What must happen outside
the lock is left in `woken` (groups whose waiters to wake), `cancels` (attempts to cancel),
`fresh` (blocks that need a plan) and `closes` (cached objects to close); `Engine` takes these
after each call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.blocks.fetch.completion import Endings
from bootseer.blocks.fetch.plan import retry_policy
from bootseer.blocks.fetch.records import (
    Block,
    Copy,
    Flight,
    Group,
    Job,
    Object,
    Status,
)
from bootseer.blocks.fetch.store_queues import leading_run
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import block_length
from bootseer.storage.request_control import Attempt

FAR_BLOCKS = 4  # a second request pays when it brings much less than what comes before ...
FAR_S = 0.2  # ... and when that takes long


class Want(NamedTuple):
    """One block somebody needs, and where its bytes go; `landing` takes the whole block."""

    block: int
    copies: Sequence[Copy] = ()
    landing: memoryview | None = None


class Board(Endings):
    """See the module text, and `lines`."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self.starved = False

    # --- wanting -----------------------------------------------------------------------------

    def want(
        self, found: Object, wants: Iterable[Want], group: Group
    ) -> list[tuple[Block, Sequence[Copy]]]:
        """Join a group to blocks, making those that are absent; `fresh` then needs a plan.

        Returns ready blocks, pinned, to copy from at once; hand each to `unpin` afterwards.
        """
        now: list[tuple[Block, Sequence[Copy]]] = []
        for index, asked, landing in wants:
            copies = asked
            block = found.blocks.get(index)
            if block is not None and block.status is Status.READY:
                self._use_ready(block, group, copies, landing, now)
                continue
            if block is None:
                block = Block(found, index, block_length(found.source, index), group.priority)
                found.blocks[index] = block
                self.fresh.append(block)
                if landing is not None:
                    block.landing, block.landing_group = landing, group
            elif landing is not None:
                copies = (Copy(0, landing),)
            if group.priority < block.priority:
                self._promote(block, group.priority)
            elif found.line.out_s and block.tries and block.status is Status.WANTED and block.job:
                # In an outage a reader waits less long than others' back-off may take.
                block.job = None
                self.fresh.append(block)
            block.waiters.append((group, copies))
            group.blocks[block] = None
            group.remaining += 1
        return now

    def _use_ready(
        self,
        block: Block,
        group: Group,
        copies: Sequence[Copy],
        landing: memoryview | None,
        now: list[tuple[Block, Sequence[Copy]]],
    ) -> None:
        if landing is not None:
            copies = (Copy(0, landing),)
        if group.keep:
            self.pin(block)
            group.pinned.append(block)
        elif copies:
            self.pin(block)
            now.append((block, copies))
        elif not block.pins:
            self.touch(block)

    def _promote(self, block: Block, priority: Priority) -> None:
        block.priority = priority
        if block.status is Status.WANTED:
            block.job = None
            self.fresh.append(block)
        for flight in block.flights:
            self._promote_flight(flight, priority)

    def enqueue(self, jobs: Iterable[Job]) -> int:
        """Put planned jobs in line; blocks that meanwhile have another job stay with that one."""
        count = 0
        for job in jobs:
            for block, _ in job.items:
                if block.status is Status.WANTED and (
                    block.job is None or job.priority < block.job.priority
                ):
                    block.job = job
            waiters = job.items[0][0].waiters
            self._stand(job, waiters[-1][0] if waiters else None)
            self._push(job)
            count += 1
        return count

    # --- starting ----------------------------------------------------------------------------

    def take(self, now_s: float) -> Flight | None:
        """The next request to make, its memory and connection counted; None when none may start."""
        self.starved = False
        while (line := self._next_line()) is not None:
            flight = self._launch(heapq.heappop(line.heap))
            if flight is not None:
                self._start(flight, now_s)
                return flight
            if self.starved:
                return None
        return None

    def _launch(self, job: Job) -> Flight | None:
        start, stop = leading_run(job)
        if start == stop:
            return None
        flight = Flight(job, job.items[start:stop], Attempt(stall_s=self.settings.stall_s))
        if not self._give_memory(flight):
            self.starved = True
            self._push(job)
            return None
        rest = job.items[start + len(flight.items) :]
        if rest:
            later = Job(job.line, rest, job.priority, job.hedges)
            later.seq, later.place_bytes = job.seq, job.place_bytes
            for block, _ in rest:
                if block.job is job:
                    block.job = later
            self._push(later)
        return flight

    def _give_memory(self, flight: Flight) -> bool:
        """Find a target for every block, or for the leading ones; False when there is none."""
        found = flight.items[0][0].object
        in_place = flight.line is not found.line or found.source.in_place
        while not in_place:
            stored = sum(piece.length for _, piece in flight.items)
            flight.scratch = self.slot(stored, flight.priority)
            if flight.scratch is not None:
                break
            if len(flight.items) == 1:
                return False
            del flight.items[len(flight.items) // 2 :]
        for block, _ in flight.items:
            if block.landing is not None and block.landing_flight is None:
                flight.slots.append(None)
                flight.targets.append(block.landing)
                continue
            slot = self.slot(block.length, flight.priority)
            if slot is None:
                break
            flight.slots.append(slot)
            flight.targets.append(None)
        del flight.items[len(flight.slots) :]
        if not flight.items and flight.scratch is not None:
            self.pool.give(flight.scratch)
        return bool(flight.items)

    def _start(self, flight: Flight, now_s: float) -> None:
        owners: dict[Group, None] = {}
        for (block, _), target in zip(flight.items, flight.targets, strict=True):
            block.status = Status.FLYING
            block.job = None
            block.flights.append(flight)
            if target is not None:
                block.landing_flight = flight
                if block.landing_group is not None:
                    owners[block.landing_group] = None
        flight.owners = list(owners)
        for group in flight.owners:
            group.writing += 1
        flight.began_s = flight.progress_s = now_s
        self._run(flight)

    def steer(self, flight: Flight, replicas: Sequence[str]) -> None:
        """Choose the replica a flight asks, counting who is busy."""
        self._replicas.choose(flight, tuple(replicas))

    # --- time --------------------------------------------------------------------------------

    def tick(self, now_s: float) -> int:
        """Start due retries, hedge requests that hang, end late reads; returns new jobs."""
        jobs = self._push_due(now_s)
        self._replicas.expire(now_s)
        for group in list(self._held):
            self._check_held(group, now_s)
        for flight in list(self.flights):
            jobs += self._check_flight(flight, now_s)
        return jobs

    def _check_flight(self, flight: Flight, now_s: float) -> int:
        received = flight.attempt.received_bytes
        if received != flight.progress_bytes:
            flight.progress_bytes, flight.progress_s = received, now_s
            return self._overtake(flight, now_s)
        if flight.hedged or flight.hedges is not None or not self.settings.hedge_s:
            return 0
        if flight.priority is not Priority.DEMAND and not self._replicas.suspected(flight.replica):
            return 0
        if not flight.asked:
            flight.progress_s = now_s  # or its hedge might ask the same server
            return 0
        limit_s = retry_policy.hedge_after_s(flight.line.first_s, self.settings)
        if now_s - flight.progress_s < limit_s or flight.line is not flight.items[0][0].object.line:
            return 0
        items = [(block, piece) for block, piece in flight.items if block.status is Status.FLYING]
        flight.hedged = True
        self._replicas.suspect(flight.replica, now_s)
        if not items:
            return 0
        self._push(Job(flight.line, items, flight.priority, flight))
        return 1

    def _overtake(self, flight: Flight, now_s: float) -> int:
        """Ask apart for blocks that somebody waits for, far behind in what nobody waited for."""
        if not flight.ahead or flight.priority is not Priority.DEMAND:
            return 0
        reached = flight.items[0][1].offset + flight.progress_bytes
        bytes_per_s = flight.progress_bytes / max(1e-3, now_s - flight.began_s)
        items = [
            (block, piece)
            for block, piece in flight.items
            if block.status is Status.FLYING
            and block.priority is Priority.DEMAND
            and block.flights == [flight]
            and block.job is None
            and piece.offset - reached > max(FAR_BLOCKS * piece.length, FAR_S * bytes_per_s)
        ]
        if not items:
            return 0
        job = Job(flight.line, items, Priority.DEMAND, flight)
        for block, _ in items:
            block.job = job
        self._push(job)
        return 1

    def next_due_s(self, now_s: float, tick_s: float) -> float | None:
        """Seconds until `tick` may have something to do; None = not before a new request."""
        due_s = self._due_s(now_s)
        if self._foreign:
            look_s = max(0.0, self._look_s - now_s)
            due_s = look_s if due_s is None else min(due_s, look_s)
        if self.flights or self._held or any(line.heap for line in self.lines.values()):
            return tick_s if due_s is None else min(tick_s, due_s)
        return due_s
