"""Who waits for blocks, and how a wait ends: all there, failed, late, or given up. No threads."""

from __future__ import annotations

from bootseer.blocks.fetch.block_memory import Shelf
from bootseer.blocks.fetch.records import Block, Flight, Group, Line, Object, Status
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.errors import DeadlineError
from bootseer.storage.request_control import Attempt

MOST_PROBES = 8
PROBE_EVERY_S = 3.0
"""Eight at most, one each 3 s: each has longer than a store may be silent (`stall_s`)."""


class Waiters(Shelf):
    """Groups and the blocks they wait for. See `lines` for the layers."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self.woken: list[Group] = []
        self.cancels: list[Attempt] = []
        self._held: dict[Group, tuple[Object, tuple[int, int]]] = {}

    def submitted(self, group: Group) -> None:
        """All that a group wants was said: undo the one more in `remaining` that kept it open."""
        group.remaining -= 1
        self._wake_if_done(group)

    def fail(self, block: Block, error: BaseException) -> None:
        """Give a block up and tell everybody who waits for it."""
        waiters = block.waiters
        line = block.object.line
        if line.failed_s - line.failing_s >= self.settings.outage_deadline_s and any(
            group.priority is Priority.DEMAND for group, _ in waiters
        ):
            line.out_s = line.failed_s
        self._gone(block)
        for group, _ in waiters:
            self._one_less(group, block)
            self.fail_group(group, error)

    def patience_s(self, found: Object, now_s: float) -> float:
        """How long a read that begins now waits: not long where others waited in vain just now.

        As long as reads go on to fail it is one outage; after a pause it is a new one.
        """
        limit_s, line = self.settings.demand_deadline_s, found.line
        if line.out_s and now_s - line.out_s < limit_s:
            return min(limit_s, self.settings.outage_deadline_s)
        line.out_s = 0.0
        return limit_s

    def fail_group(self, group: Group, error: BaseException) -> None:
        """End a group with an error: it leaves all its blocks."""
        group.error = group.error or error
        self.withdraw(group)
        self._wake_if_done(group)

    def give_up(self, stalled_s: float, now_s: float) -> None:
        """Fail the held reads that have waited so long for a store that brought nothing meanwhile.

        Those that follow wait as in any outage.
        """
        for group, (found, _) in list(self._held.items()):
            line, began_s = found.line, group.deadline_s - self.settings.demand_deadline_s
            if group.told or now_s - max(began_s, line.landed_s) < stalled_s:
                continue
            line.out_s = now_s
            why = f": {line.error}" if line.error is not None else "; see the store"
            error = f"nothing came for {stalled_s:g} s, and who reads was asked to end{why}"
            self.fail_group(group, DeadlineError(error))

    def withdraw(self, group: Group) -> None:
        """Take a group off all blocks it still waits for, and cancel what then nobody needs.

        What writes into the group's memory is cancelled too; the memory is the group's again
        when `writing` is 0.
        """
        if group.closed:
            return
        group.closed = True
        for block in group.blocks:
            self._part(block, group)
        if group.writing:
            for flight in self.flights:
                if group in flight.owners:
                    self._cancel(flight)
        for block in group.pinned:
            self.unpin(block)
        for block, _ in group.late:
            self.unpin(block)
        group.blocks, group.pinned, group.late = {}, [], []

    def _part(self, block: Block, group: Group) -> None:
        block.waiters = [waiter for waiter in block.waiters if waiter[0] is not group]
        if block.landing_group is group:
            block.landing = block.landing_group = None
        if block.waiters:
            return
        if block.status is Status.WANTED:
            self._gone(block)
            return
        for flight in block.flights:
            if not any(other.waiters for other, _ in flight.items):
                self._cancel(flight)

    @staticmethod
    def _one_less(group: Group, block: Block) -> None:
        group.remaining -= 1
        group.blocks.pop(block, None)

    def _wake_if_done(self, group: Group) -> None:
        if not group.told and group.finished:
            group.told = group.callback is not None
            self.woken.append(group)

    def _cancel(self, flight: Flight) -> None:
        if flight in self.flights and not flight.attempt.cancelled:
            self.cancels.append(flight.attempt)

    def _cancel_idle(self, block: Block) -> None:
        """Cancel the requests of a block that now bring nothing anybody wants."""
        for flight in block.flights:
            if flight.landed < len(flight.items) and not any(
                other.status is Status.FLYING for other, _ in reversed(flight.items)
            ):
                self._cancel(flight)

    def hold(self, found: Object, span: tuple[int, int], group: Group) -> None:
        """Remember a group whose outcome will be collected by `collect`."""
        found.claims.setdefault(span, []).append(group)
        self._held[group] = (found, span)

    def collect(self, found: Object, span: tuple[int, int]) -> Group | None:
        """A group that is done and waits for these bytes, taken off the board."""
        groups = found.claims.get(span)
        if not groups:
            return None
        for group in groups:
            if group.told:
                self._unhold(group)
                return group
        return None

    def _probe(self, line: Line, group: Group, now_s: float) -> None:
        """Let a block of a read that is given up come all the same, though nobody waits for it.

        A store that is back may need longer for its first byte than reads wait in an outage: the
        block tells when it comes, and then they wait again. The oldest of several gives way, for
        its request may be of the time when the store was away.
        """
        block = next(iter(group.blocks), None)
        if block is None or now_s - line.probed_s < PROBE_EVERY_S:
            return
        line.probes = [probe for probe in line.probes if not probe.finished]
        if len(line.probes) >= MOST_PROBES:
            self.withdraw(line.probes.pop(0))
        probe = Group(Priority.HOT)
        block.waiters.append((probe, ()))
        probe.blocks[block] = None
        probe.remaining = 1
        line.probes.append(probe)
        line.probed_s = now_s

    def _unhold(self, group: Group) -> None:
        found, span = self._held.pop(group)
        groups = found.claims[span]
        groups.remove(group)
        if not groups:
            del found.claims[span]
            if found.forgotten:
                self._drop_forgotten(found)

    def _check_held(self, group: Group, now_s: float) -> None:
        if group.told:
            group.deadline_s = min(group.deadline_s, now_s)
            if now_s > group.deadline_s + self.settings.claim_s:
                self._unhold(group)
                self.withdraw(group)
        elif now_s > group.deadline_s:
            line = self._held[group][0].line
            if line.landed_s < group.deadline_s - self.settings.demand_deadline_s:
                line.out_s = now_s
            if line.out_s:
                self._probe(line, group, now_s)
            why = f": {line.error}" if line.error is not None else "; see the store"
            self.fail_group(group, DeadlineError(f"a read was not answered in time{why}"))
