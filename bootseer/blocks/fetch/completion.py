"""How requests end: blocks arrive, are tried again, or are left to other processes. No threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.blocks.fetch import shared_claims
from bootseer.blocks.fetch.plan import retry_policy
from bootseer.blocks.fetch.plan.replica_choice import Replicas
from bootseer.blocks.fetch.plan.request_plan import Piece
from bootseer.blocks.fetch.records import Block, Copy, Flight, Group, Job, Line, Status
from bootseer.blocks.fetch.slabs import Slot
from bootseer.blocks.fetch.waiters import Waiters
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError

FIRST_WAITS = 32


class Settled(NamedTuple):
    """What is left to do for a block that arrived, outside the lock."""

    fill: Slot | None = None
    """Copy the landed bytes here and settle again: others wait for the block too."""
    copies: Sequence[tuple[Group, Sequence[Copy]]] = ()
    """Copy from the block into readers' memory, then tell `copied`."""


NOTHING_LEFT = Settled()


class Endings(Waiters):
    """Flights after their start. See `lines` for the layers."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self.fresh: list[Block] = []
        self._foreign: dict[Block, None] = {}  # left to other processes, for now
        self._look_s = 0.0  # when to look for them again
        self._replicas = Replicas(settings)

    def settle(self, flight: Flight, number: int, now_s: float) -> Settled:
        """Block `number` of a flight has arrived and was verified."""
        block, target = flight.items[number][0], flight.targets[number]
        if not flight.landed:
            flight.line.first_s.append(now_s - flight.began_s)
            del flight.line.first_s[:-FIRST_WAITS]
        flight.landed += 1
        flight.line.landed(now_s)
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
        cause = error or next(iter(flight.errors.values()), None)
        if cause is not None and not flight.attempt.cancelled:
            flight.line.failed(cause, now_s)
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
            if block.object.forgotten:
                self.drop_arrived(block)
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
        return retry_policy.AT_ONCE if cancelled else self._next_try_s(flight, number, cause)

    def _next_try_s(self, flight: Flight, number: int, cause: BaseException | None) -> float | None:
        """When a block that did not come is tried again; None, and the block failed, if never."""
        block = flight.items[number][0]
        block.tries += 1
        cause = cause or StoreUnavailableError(
            f"{flight.items[number][1].part}: the store ended a request early; try again"
        )
        delay_s = retry_policy.next_try_s(
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
        start, stop = shared_claims.first_run(len(flight.items), refused)
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
                self._look_s = now_s + shared_claims.FIRST_POLL_S
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
        self._look_s = now_s + shared_claims.poll_s(now_s - youngest_s)

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
