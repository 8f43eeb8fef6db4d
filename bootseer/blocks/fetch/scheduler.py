"""The fetcher's decisions: what is wanted, in flight and ready.

`Scheduler` is composed of `StoreQueues` (which job is next), `BlockMemory` (which blocks are in
memory), `Waiters` (what is waited for), `ReplicaChoice` (which server is asked) and `Completion`
(what follows when a request brings a block, or ends).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.blocks.fetch import retry_policy
from bootseer.blocks.fetch.block_memory import BlockMemory
from bootseer.blocks.fetch.completion import Completion, Waiters
from bootseer.blocks.fetch.records import (
    Block,
    Copy,
    Effects,
    Job,
    ObjectRecord,
    Request,
    Status,
    Waiter,
)
from bootseer.blocks.fetch.replica_choice import ReplicaChoice
from bootseer.blocks.fetch.store_queues import StoreQueues
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.storage.request_control import Attempt

FAR_BLOCKS = (
    4  # a second request pays when it is much shorter than what arrives before the block ...
)
FAR_S = 0.2  # ... and when that takes long


class Want(NamedTuple):
    """One wanted block, and where its bytes go; `direct` is memory for the whole block."""

    block: int
    copies: Sequence[Copy] = ()
    direct: memoryview | None = None


class Scheduler:
    """See the module text.

    No threads, no I/O, no clock: every method, of a part too, is called with `lock` held and
    returns quickly. Actions that need the lock to be free are left in `effects`, and
    `workers.Decision` carries them out.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self.lock = threading.Lock()
        self.effects = effects = Effects()
        self.queues = queues = StoreQueues(settings)
        self.memory = memory = BlockMemory(settings, queues, effects)
        self.waiters = waiters = Waiters(settings, queues, memory, effects)
        self.replicas = replicas = ReplicaChoice(settings)
        self.completion = Completion(settings, queues, memory, waiters, replicas, effects)
        self.starved = False
        """The next job could not start for lack of memory."""

    # --- wanting -----------------------------------------------------------------------------

    def want(
        self, record: ObjectRecord, wants: Iterable[Want], waiter: Waiter
    ) -> list[tuple[Block, Sequence[Copy]]]:
        """Join a waiter to blocks, making those that are absent.

        Returns ready blocks, pinned, to copy from at once; hand each to `memory.unpin` afterwards.
        """
        ready: list[tuple[Block, Sequence[Copy]]] = []
        for index, copies, direct in wants:
            block = record.blocks.get(index)
            if direct is not None and block is not None:
                copies = (Copy(0, direct),)  # noqa: PLW2901 - memory of ours has it, or will
            if block is not None and block.status is Status.READY:
                self._use_ready(block, waiter, copies, ready)
                continue
            if block is None:
                length = record.block_length(index)
                reader = None if direct is None else waiter
                block = Block(record, index, length, waiter.priority, direct, reader)
                record.blocks[index] = block
                self.effects.to_plan.append(block)
            if waiter.priority < block.priority:
                self._promote(block, waiter.priority)
            elif (
                record.queue.health.outage_s
                and block.tries
                and block.status is Status.WANTED
                and block.job
            ):
                # In an outage the back-off of earlier readers may outlast this reader's wait.
                block.job = None
                self.effects.to_plan.append(block)
            block.waiters.append((waiter, copies))
            waiter.blocks[block] = None
            waiter.remaining += 1
        return ready

    def want_in_time(
        self, record: ObjectRecord, wants: Iterable[Want], waiter: Waiter, now_s: float
    ) -> None:
        """As `want` for a waiter for which no thread watches its deadline."""
        waiter.deadline_s = now_s + self.waiters.patience_s(record, now_s)
        self.want(record, wants, waiter)
        if waiter.keep:
            self.waiters.watch(waiter, record.queue)

    def _use_ready(
        self,
        block: Block,
        waiter: Waiter,
        copies: Sequence[Copy],
        ready: list[tuple[Block, Sequence[Copy]]],
    ) -> None:
        if waiter.keep:
            self.memory.pin(block)
            waiter.pinned.append(block)
        elif copies:
            self.memory.pin(block)
            ready.append((block, copies))
        elif not block.pins:
            self.memory.touch(block)

    def _promote(self, block: Block, priority: Priority) -> None:
        block.priority = priority
        if block.status is Status.WANTED:
            block.job = None
            self.effects.to_plan.append(block)
        for request in block.requests:
            self.queues.promote(request, priority)

    def enqueue(self, jobs: Iterable[Job]) -> None:
        """Queue planned jobs; blocks that have got another job meanwhile stay with it."""
        for job in jobs:
            for block, _ in job.items:
                if block.status is Status.WANTED and (
                    block.job is None or job.priority < block.job.priority
                ):
                    block.job = job
            waiters = job.items[0][0].waiters
            self.queues.push_new(job, waiters[-1][0] if waiters else None)
            self.effects.new_jobs += 1

    # --- starting ----------------------------------------------------------------------------

    def start_next(self, now_s: float) -> Request | None:
        """The next request to make, its memory and connection counted; None when none may start."""
        self.starved = False
        while (job := self.queues.pop()) is not None:
            request = self._launch(job)
            if request is not None:
                self._start(request, now_s)
                return request
            if self.starved:
                return None
        return None

    def _launch(self, job: Job) -> Request | None:
        start, stop = _leading_run(job)
        if start == stop:
            return None
        request = Request(
            job.queue,
            job.items[start:stop],
            job.priority,
            job.hedge_of,
            job.place_bytes,
            Attempt(stall_s=self._settings.stall_s),
            job.priority > Priority.DEMAND,
        )
        if not self._give_memory(request):
            self.starved = True
            self.queues.push(job)
            return None
        rest = job.items[start + len(request.items) :]
        if rest:
            later = Job(job.queue, rest, job.priority, job.hedge_of, job.place_bytes, job.number)
            for block, _ in rest:
                if block.job is job:
                    block.job = later
            self.queues.push(later)
        return request

    def _give_memory(self, request: Request) -> bool:
        """Find a target for every block, or for the leading ones; False when there is none."""
        record, memory = request.items[0][0].object, self.memory
        in_place = request.queue is not record.queue or record.source.in_place
        while not in_place:
            stored = sum([piece.length for _, piece in request.items])
            request.scratch = memory.slot(stored, request.priority)
            if request.scratch is not None:
                break
            if len(request.items) == 1:
                return False
            del request.items[len(request.items) // 2 :]
        for block, _ in request.items:
            if block.direct_target is not None and block.direct_request is None:
                request.slots.append(None)
                request.targets.append(block.direct_target)
                continue
            slot = memory.slot(block.length, request.priority)
            if slot is None:
                break
            request.slots.append(slot)
            request.targets.append(None)
        del request.items[len(request.slots) :]
        if not request.items and request.scratch is not None:
            memory.pool.give(request.scratch)
        return bool(request.items)

    def _start(self, request: Request, now_s: float) -> None:
        readers: dict[Waiter, None] = {}
        for (block, _), target in zip(request.items, request.targets, strict=True):
            block.status = Status.IN_FLIGHT
            block.job = None
            block.requests.append(request)
            if target is not None:
                block.direct_request = request
                if block.direct_waiter is not None:
                    readers[block.direct_waiter] = None
        request.writes_to = list(readers)
        for waiter in readers:
            waiter.writing += 1
        request.began_s = request.progress_s = now_s
        self.queues.request_started(request)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Start due retries, hedge requests that hang, end late reads."""
        self.effects.new_jobs += self.queues.push_due(now_s)
        self.replicas.expire(now_s)
        self.waiters.check_deadlines(now_s)
        for request in list(self.queues.requests):
            self._check_progress(request, now_s)

    def _check_progress(self, request: Request, now_s: float) -> None:
        received_bytes = request.attempt.received_bytes
        if received_bytes != request.progress_bytes:
            request.progress_bytes, request.progress_s = received_bytes, now_s
            self._overtake(request, now_s)
            return
        if request.has_hedge or request.hedge_of is not None or not self._settings.hedge_s:
            return
        is_waited_for = request.priority is Priority.DEMAND
        if not is_waited_for and not self.replicas.is_suspect(request.replica):
            return
        if not request.replica_chosen:
            request.progress_s = now_s  # or its hedge might ask the same server
            return
        queue = request.queue
        limit_s = retry_policy.hedge_after_s(queue.health.first_waits_s, self._settings)
        if now_s - request.progress_s < limit_s or queue is not request.items[0][0].object.queue:
            return
        items = [item for item in request.items if item[0].status is Status.IN_FLIGHT]
        request.has_hedge = True
        self.replicas.suspect(request.replica, now_s)
        if items:
            self._hedge(Job(queue, items, request.priority, request))

    def _overtake(self, request: Request, now_s: float) -> None:
        """Request blocks a second time if a reader waits for them far down a read-ahead request."""
        if not request.ahead or request.priority is not Priority.DEMAND:
            return
        reached = request.items[0][1].offset + request.progress_bytes
        bytes_per_s = request.progress_bytes / max(1e-3, now_s - request.began_s)
        items = [
            (block, piece)
            for block, piece in request.items
            if block.status is Status.IN_FLIGHT
            and block.priority is Priority.DEMAND
            and block.requests == [request]
            and block.job is None
            and piece.offset - reached > max(FAR_BLOCKS * piece.length, FAR_S * bytes_per_s)
        ]
        if not items:
            return
        job = Job(request.queue, items, Priority.DEMAND, request)
        for block, _ in items:
            block.job = job
        self._hedge(job)

    def _hedge(self, job: Job) -> None:
        self.queues.push(job)
        self.effects.new_jobs += 1

    def next_due_s(self, now_s: float, tick_s: float) -> float | None:
        """Seconds until `tick` may have something to do; None = not before a new request."""
        due_s = self.queues.due_in_s(now_s)
        look_s = self.completion.look_in_s(now_s)
        if look_s is not None:
            due_s = look_s if due_s is None else min(due_s, look_s)
        queues = self.queues
        if (
            queues.requests
            or self.waiters.watched
            or any(queue.heap for queue in queues.queues.values())
        ):
            return tick_s if due_s is None else min(tick_s, due_s)
        return due_s

    # --- the end -----------------------------------------------------------------------------

    def fail_all(self, error: Exception) -> None:
        """Fail all waiters, and cancel all requests."""
        for record in list(self.memory.objects.values()):
            for block in list(record.blocks.values()):
                if block.status is not Status.READY:
                    self.waiters.fail_block(block, error)
        self.effects.to_cancel += [request.attempt for request in self.queues.requests]


def _leading_run(job: Job) -> tuple[int, int]:
    """Where the first neighbours of a job that are still its own start and stop."""
    start = end = 0
    for number, (block, piece) in enumerate(job.items):
        if job.hedge_of is None:
            usable = block.status is Status.WANTED and block.job is job
        else:
            usable = block.status is Status.IN_FLIGHT and block.requests == [job.hedge_of]
        if end and (not usable or piece.offset != end):
            return start, number
        if usable:
            start = start if end else number
            end = piece.offset + piece.length
    return (start, len(job.items)) if end else (0, 0)
