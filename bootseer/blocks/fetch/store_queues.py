"""Which job is next: queues of jobs, one a store, and the connections that they may use."""

from __future__ import annotations

import heapq

from bootseer.blocks.fetch.records import Job, Request, StoreQueue, Waiter
from bootseer.blocks.settings import FetchSettings, Priority

DEMAND_SHARE = 8  # an eighth of the memory and of the connections is kept for demand


class StoreQueues:
    """Jobs that wait, in a queue or for their time, and the requests under way.

    No threads, no I/O, no clock; called with the fetcher's lock held.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._connections = settings.connections
        self.queues: dict[int, StoreQueue] = {}
        self.requests: set[Request] = set()
        self._running = [0, 0, 0]  # requests by priority
        self._served_bytes = [0, 0, 0]  # by priority: the place of the job that started last
        self._delayed: list[tuple[float, int, Job]] = []
        self._last_number = 0

    def join(self, owner: object, streams: int) -> StoreQueue:
        """The queue of a store or of a cached object; counts one more object that uses it."""
        queue = self.queues.get(id(owner))
        if queue is None:
            queue = self.queues[id(owner)] = StoreQueue(owner, max(1, streams))
        queue.objects += 1
        return queue

    def leave(self, queue: StoreQueue) -> None:
        """Count one object less; removes a queue that serves none."""
        queue.objects -= 1
        if not queue.objects:  # its jobs, if it has any, are of blocks given up
            self.queues.pop(id(queue.owner), None)

    def push_new(self, job: Job, reader: Waiter | None) -> None:
        """Give a new job its place among those of its priority, and queue it.

        Reads take turns by bytes, so that a small read waits for only a few requests of a large
        one; a read's own jobs keep their order. Blocks fetched ahead keep their order within an
        object, whatever asked for them, and objects take turns.
        """
        served_bytes = self._served_bytes[job.priority]
        length = sum([piece.length for _, piece in job.items])
        if job.priority is Priority.DEMAND and reader is not None:
            job.place_bytes = max(served_bytes, reader.queued_bytes)
            reader.queued_bytes = job.place_bytes + length
        else:
            queued_bytes = job.items[0][0].object.queued_bytes
            job.place_bytes = max(served_bytes, queued_bytes[job.priority])
            queued_bytes[job.priority] = job.place_bytes + length
        self.push(job)

    def push(self, job: Job) -> None:
        """Queue a job that has a place, or one that goes before all others."""
        if not job.number:
            self._last_number += 1
            job.number = self._last_number
        heapq.heappush(job.queue.heap, job)

    def push_later(self, job: Job, due_s: float) -> None:
        """Queue a job when its time has come."""
        self._last_number += 1
        heapq.heappush(self._delayed, (due_s, self._last_number, job))

    def push_due(self, now_s: float) -> int:
        """Queue the jobs whose time has come; returns how many."""
        count = 0
        while self._delayed and self._delayed[0][0] <= now_s:
            self.push(heapq.heappop(self._delayed)[2])
            count += 1
        return count

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until the next job's time comes."""
        return max(0.0, self._delayed[0][0] - now_s) if self._delayed else None

    def backlog(self) -> int:
        """How many of the queued jobs could start now, as far as their stores are concerned."""
        count = 0
        for queue in self.queues.values():
            if queue.heap:
                most = queue.streams + queue.streams // DEMAND_SHARE + 1
                count += min(len(queue.heap), max(0, most - queue.active))
        return count

    def pop(self) -> Job | None:
        """The next job, of those that may start."""
        best: StoreQueue | None = None
        for queue in self.queues.values():
            if (
                queue.heap
                and (best is None or queue.heap[0] < best.heap[0])
                and self._may_start(queue, queue.heap[0])
            ):
                best = queue
        return heapq.heappop(best.heap) if best is not None else None

    def _may_start(self, queue: StoreQueue, job: Job) -> bool:
        most, streams, total = self._connections, queue.streams, sum(self._running)
        if job.hedge_of is not None:
            return total < most + max(2, most // 2)
        if job.priority is Priority.DEMAND:
            return total < most and queue.active <= streams + streams // DEMAND_SHARE
        if job.priority is Priority.HOT:
            return total < max(1, most - most // DEMAND_SHARE) and queue.active < streams
        if self._running[Priority.DEMAND] and self._running[Priority.BACKGROUND]:
            return False  # one goes on, so that nothing starves
        return total < max(1, most // 2) and queue.active < max(1, streams // 2)

    def request_started(self, request: Request) -> None:
        """Count a request."""
        request.queue.active += 1
        served_bytes = self._served_bytes
        served_bytes[request.priority] = max(served_bytes[request.priority], request.place_bytes)
        self._running[request.priority] += 1
        self.requests.add(request)

    def request_ended(self, request: Request) -> None:
        """Stop counting a request."""
        self.requests.discard(request)
        request.queue.active -= 1
        self._running[request.priority] -= 1

    def promote(self, request: Request, priority: Priority) -> None:
        """Raise a request's priority, unless it has a higher one."""
        if priority < request.priority:
            self._running[request.priority] -= 1
            self._running[priority] += 1
            request.priority = priority
