"""Which job is next: lines of jobs, one a store, and the connections they may use. No threads.

`Lines`, `Shelf`, `Waiters`, `Endings` and `Board` are the fetcher's decisions in five layers, each
knowing those below it only; every method is called with the fetcher's lock held.
"""

from __future__ import annotations

import heapq

from bootseer.blocks.fetch.records import Flight, Group, Job, Line, Status
from bootseer.blocks.settings import FetchSettings, Priority

DEMAND_SHARE = 8  # an eighth of the memory and of the connections is kept for demand


class Lines:
    """Jobs that wait, in line or for their time, and the requests under way."""

    def __init__(self, settings: FetchSettings) -> None:
        self.settings = settings
        self.lines: dict[int, Line] = {}
        self.flights: set[Flight] = set()
        self._running = [0, 0, 0]  # flights by priority
        self._served_bytes = [0, 0, 0]  # by priority: where the job stood that started last
        self._delayed: list[tuple[float, int, Job]] = []
        self._seq = 0

    def line_of(self, owner: object, streams: int) -> Line:
        """The queue of jobs for one store or cache, for one object more."""
        line = self.lines.get(id(owner))
        if line is None:
            line = self.lines[id(owner)] = Line(owner, streams)
        line.objects += 1
        return line

    def _leave_line(self, line: Line) -> None:
        """One object less; a line that serves none goes."""
        line.objects -= 1
        if not line.objects:  # its jobs, if it has any, are of blocks given up
            self.lines.pop(id(line.owner), None)

    def _stand(self, job: Job, group: Group | None) -> None:
        """Give a new job its place among those of its priority.

        Reads take turns by bytes, so that a small one waits for a few requests of a large one,
        not for all; a read's own jobs keep their order. What is fetched ahead keeps its order
        within an object, whoever asked for it, and objects take turns.
        """
        served = self._served_bytes[job.priority]
        if job.priority is Priority.DEMAND and group is not None:
            job.place_bytes = max(served, group.queued_bytes)
            group.queued_bytes = job.place_bytes + job.length
        else:
            queued = job.items[0][0].object.queued_bytes
            job.place_bytes = max(served, queued[job.priority])
            queued[job.priority] = job.place_bytes + job.length

    def _push(self, job: Job) -> None:
        if not job.seq:
            self._seq += 1
            job.seq = self._seq
        heapq.heappush(job.line.heap, job)

    def _push_later(self, job: Job, due_s: float) -> None:
        self._seq += 1
        heapq.heappush(self._delayed, (due_s, self._seq, job))

    def _push_due(self, now_s: float) -> int:
        """Put the jobs whose time has come in line; returns how many."""
        count = 0
        while self._delayed and self._delayed[0][0] <= now_s:
            self._push(heapq.heappop(self._delayed)[2])
            count += 1
        return count

    def backlog(self) -> int:
        """How many of the jobs in line could start now, as far as their stores are concerned."""
        count = 0
        for line in self.lines.values():
            if line.heap:
                most = line.streams + line.streams // DEMAND_SHARE + 1
                count += min(len(line.heap), max(0, most - line.active))
        return count

    def _next_line(self) -> Line | None:
        best: Line | None = None
        for line in self.lines.values():
            if (
                line.heap
                and (best is None or line.heap[0] < best.heap[0])
                and self._may_start(line, line.heap[0])
            ):
                best = line
        return best

    def _may_start(self, line: Line, job: Job) -> bool:
        most, streams, total = self.settings.connections, line.streams, sum(self._running)
        if job.hedges is not None:
            return total < most + max(2, most // 2)
        if job.priority is Priority.DEMAND:
            return total < most and line.active <= streams + streams // DEMAND_SHARE
        if job.priority is Priority.HOT:
            return total < max(1, most - most // DEMAND_SHARE) and line.active < streams
        if self._running[Priority.DEMAND] and self._running[Priority.BACKGROUND]:
            return False  # one goes on, so that nothing starves
        return total < max(1, most // 2) and line.active < max(1, streams // 2)

    def _run(self, flight: Flight) -> None:
        """Count a request that starts."""
        flight.line.active += 1
        served = self._served_bytes
        served[flight.priority] = max(served[flight.priority], flight.place_bytes)
        self._running[flight.priority] += 1
        self.flights.add(flight)

    def _promote_flight(self, flight: Flight, priority: Priority) -> None:
        if priority < flight.priority:
            self._running[flight.priority] -= 1
            self._running[priority] += 1
            flight.priority = priority

    def _stop(self, flight: Flight) -> None:
        """Count a request that ended."""
        self.flights.discard(flight)
        flight.line.active -= 1
        self._running[flight.priority] -= 1

    def _due_s(self, now_s: float) -> float | None:
        """Seconds until the next job's time comes."""
        return max(0.0, self._delayed[0][0] - now_s) if self._delayed else None


def leading_run(job: Job) -> tuple[int, int]:
    """Where the first neighbours of a job that are still its own start and stop."""
    start = end = 0
    for number, (block, piece) in enumerate(job.items):
        if job.hedges is None:
            usable = block.status is Status.WANTED and block.job is job
        else:
            usable = block.status is Status.FLYING and block.flights == [job.hedges]
        if end and (not usable or piece.offset != end):
            return start, number
        if usable:
            start = start if end else number
            end = piece.offset + piece.length
    return (start, len(job.items)) if end else (0, 0)
