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

from bootseer.blocks import claims, retry
from bootseer.blocks.lines import leading_run
from bootseer.blocks.plan import Piece
from bootseer.blocks.pool import Slot
from bootseer.blocks.replicas import Replicas
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import block_length
from bootseer.blocks.state import (
    Block,
    Copy,
    Flight,
    Group,
    Job,
    Line,
    Object,
    Status,
)
from bootseer.blocks.waiters import Waiters
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage.attempt import Attempt

FIRST_WAITS = 32
FAR_BLOCKS = 4  # a second request pays when it brings much less than what comes before ...
FAR_S = 0.2  # ... and when that takes long


class Want(NamedTuple):
    """One block somebody needs, and where its bytes go; `landing` takes the whole block."""

    block: int
    copies: Sequence[Copy] = ()
    landing: memoryview | None = None


class Settled(NamedTuple):
    """What is left to do for a block that arrived, outside the lock."""

    fill: Slot | None = None
    """Copy the landed bytes here and settle again: others wait for the block too."""
    copies: Sequence[tuple[Group, Sequence[Copy]]] = ()
    """Copy from the block into readers' memory, then tell `copied`."""


NOTHING_LEFT = Settled()


class Board(Waiters):
    """See the module text, and `lines`."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self.fresh: list[Block] = []
        self.starved = False
        self._foreign: dict[Block, None] = {}  # left to other processes, for now
        self._look_s = 0.0  # when to look for them again
        self._replicas = Replicas(settings)

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

    # --- ending ------------------------------------------------------------------------------

    def settle(self, flight: Flight, number: int, now_s: float) -> Settled:
        """Block `number` of a flight has arrived and was verified."""
        block, target = flight.items[number][0], flight.targets[number]
        if not flight.landed:
            flight.line.first_s.append(now_s - flight.began_s)
            del flight.line.first_s[:-FIRST_WAITS]
        flight.landed += 1
        if block.status is not Status.FLYING:
            return NOTHING_LEFT  # the other request was first, or nobody wants it any more
        slot = flight.slots[number]
        direct = target is not None and target is block.landing
        if slot is None:
            others = [w for w in block.waiters if not direct or w[0] is not block.landing_group]
            if others and (slot := self.slot(block.length, Priority.DEMAND)) is not None:
                flight.slots[number] = slot
                flight.landed -= 1
                return Settled(fill=slot)
            self._deliver_direct(block, others)
            return NOTHING_LEFT
        flight.slots[number] = None
        self._keep(block, slot)
        copies = self._deliver(block, direct)
        self._cancel_idle(block)
        return Settled(copies=copies)

    def _deliver_direct(self, block: Block, others: list[tuple[Group, Sequence[Copy]]]) -> None:
        """The block stands in its reader's memory alone; `others`, if any, need it once more."""
        owner = block.landing_group
        if owner is not None:
            self._one_less(owner, block)
            self._wake_if_done(owner)
        block.landing = block.landing_group = None
        if not others:
            self._gone(block)
            self._cancel_idle(block)
            return
        block.waiters = others
        block.status = Status.WANTED
        block.job = None
        self.fresh.append(block)

    def _deliver(self, block: Block, direct: bool) -> list[tuple[Group, Sequence[Copy]]]:
        todo: list[tuple[Group, Sequence[Copy]]] = []
        for group, copies in block.waiters:
            self._one_less(group, block)
            if group is block.landing_group and block.landing is not None:
                if not direct:  # its memory may still be written to by the request that lost
                    self.pin(block)
                    group.late.append((block, Copy(0, block.landing)))
            elif copies:
                self.pin(block)
                group.writing += 1
                todo.append((group, copies))
            elif group.keep:
                self.pin(block)
                group.pinned.append(block)
            self._wake_if_done(group)
        block.waiters = []
        block.landing = block.landing_group = None
        return todo

    def copied(self, block: Block, copies: Sequence[tuple[Group, Sequence[Copy]]]) -> None:
        """The copies that `settle` asked for are made."""
        for group, _ in copies:
            self.unpin(block)
            group.writing -= 1
            self._wake_if_done(group)

    def ended(self, flight: Flight, error: BaseException | None, now_s: float) -> int:
        """A request returned: its memory is free again; returns how many blocks are tried again."""
        self._stop(flight)
        self._replicas.leave(flight)
        if isinstance(error, BootseerError) and error.retryable and not flight.attempt.cancelled:
            self._replicas.suspect(flight.replica, now_s)
        if flight.scratch is not None:
            self.pool.give(flight.scratch)
            flight.scratch = None
        again: dict[float, list[tuple[Block, Piece]]] = {}
        for number, (block, piece) in enumerate(flight.items):
            delay_s = self._leave(flight, number, error, now_s)
            if delay_s is not None:
                again.setdefault(delay_s, []).append((block, piece))
        for group in flight.owners:
            group.writing -= 1
            self._wake_if_done(group)
        for delay_s, items in again.items():
            self._retry(flight.line, items, delay_s, now_s)
        return sum(map(len, again.values()))

    def _leave(
        self, flight: Flight, number: int, error: BaseException | None, now_s: float
    ) -> float | None:
        """Part one block from a flight that is over; the delay of its next try, if there is one."""
        block = flight.items[number][0]
        self._take_back(flight, number)
        if block.status is not Status.FLYING:
            return None
        cause = flight.errors.get(number) or error
        cancelled = flight.attempt.cancelled and number not in flight.errors
        if cause is not None and not cancelled and flight.replica:
            block.avoid |= {flight.replica}
            if isinstance(cause, CorruptDataError):
                block.bad |= {flight.replica}
        if block.flights:
            return None  # its hedge goes on
        if not block.waiters:
            self._gone(block)
            return None
        block.status = Status.WANTED
        if flight.line is not block.object.line:  # not in the cache after all
            block.uncached = True
            block.avoid = block.bad = frozenset()
            self.fresh.append(block)
            return None
        if cancelled:
            return retry.AT_ONCE
        block.tries += 1
        cause = cause or StoreUnavailableError(
            f"{flight.items[number][1].part}: the store ended a request early; try again"
        )
        delay_s = retry.next_try_s(
            cause,
            tries=block.tries,
            replicas=flight.replicas,
            avoid=block.avoid,
            bad=block.bad,
            settings=self.settings,
            chance=flight.chance,
        )
        if delay_s is None:
            self.fail(block, cause)
        elif delay_s:
            block.avoid = frozenset()
        return delay_s

    def concede(self, flight: Flight, refused: set[int], now_s: float) -> int:
        """Leave blocks to the processes that claimed them, before the request is made.

        What is left of the flight is its first run of neighbours; others of its own become jobs
        again. Returns the number of new jobs.
        """
        start, stop = claims.first_run(len(flight.items), refused)
        later: list[tuple[Block, Piece]] = []
        for number in (*range(start), *range(stop, len(flight.items))):
            block, piece = flight.items[number]
            self._take_back(flight, number)
            if block.status is not Status.FLYING or block.flights:
                continue
            if not block.waiters:
                self._gone(block)
                continue
            block.status = Status.WANTED
            if number in refused:
                block.foreign_s = block.foreign_s or now_s
                self._foreign[block] = None
                self._look_s = now_s + claims.FIRST_POLL_S
            else:
                later.append((block, piece))
        for column in (flight.items, flight.slots, flight.targets):
            del column[stop:]
            del column[:start]
        self._disown(flight)
        if later:
            self._retry(flight.line, later, 0.0, now_s)
        return int(bool(later))

    def elsewhere(self, now_s: float) -> list[Block]:
        """Blocks left to other processes, if it is time to look for them in the cache."""
        if not self._foreign or now_s < self._look_s:
            return []
        for block in [b for b in self._foreign if b.status is not Status.WANTED or b.job]:
            del self._foreign[block]
        return list(self._foreign)

    def come_back(self, blocks: Iterable[Block], now_s: float) -> None:
        """Plan blocks anew that were left to other processes; look for the others again."""
        for block in blocks:
            if block in self._foreign:
                del self._foreign[block]
                if block.status is Status.WANTED and block.job is None:
                    self.fresh.append(block)
        youngest_s = max((block.foreign_s for block in self._foreign), default=now_s)
        self._look_s = now_s + claims.poll_s(now_s - youngest_s)

    def _take_back(self, flight: Flight, number: int) -> None:
        """Undo what `_start` did for one block."""
        block, slot = flight.items[number][0], flight.slots[number]
        block.flights.remove(flight)
        if block.landing_flight is flight:
            block.landing_flight = None
        if slot is not None:
            flight.slots[number] = None
            self.pool.give(slot)

    def _disown(self, flight: Flight) -> None:
        """Let go of readers whose memory a flight writes to no longer."""
        still = {block.landing_group for block, _ in flight.items if block.landing_flight is flight}
        for group in [group for group in flight.owners if group not in still]:
            flight.owners.remove(group)
            group.writing -= 1
            self._wake_if_done(group)

    def _retry(
        self, line: Line, items: list[tuple[Block, Piece]], delay_s: float, now_s: float
    ) -> None:
        job = Job(line, items, min(block.priority for block, _ in items))
        for block, _ in items:
            block.job = job
        if delay_s:
            self._push_later(job, now_s + delay_s)
        else:
            self._push(job)

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
        limit_s = retry.hedge_after_s(flight.line.first_s, self.settings)
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
