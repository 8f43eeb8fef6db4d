"""What is known of objects, and which of their blocks are in memory."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.fetch.records import Block, Effects, ObjectRecord, Status
from bootseer.blocks.fetch.slabs import Pool, Slot
from bootseer.blocks.fetch.store_queues import DEMAND_SHARE, StoreQueues
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import BlockSource, block_count, block_length

KEPT_OBJECTS = 256  # records (and open files of the node cache) of objects that are not in use


def memory_key(source: BlockSource) -> str | int:
    """Under what a source's blocks are found in memory."""
    return id(source) if source.volatile or not source.key else source.key


class BlockMemory:
    """Records of objects, and their ready blocks, least recently used first.

    No threads, no I/O; called with the fetcher's lock held.
    """

    def __init__(self, settings: FetchSettings, queues: StoreQueues, effects: Effects) -> None:
        self._settings, self._queues, self._effects = settings, queues, effects
        self.pool = Pool(settings.memory_bytes)
        # Both least recently used first; the blocks are those that are not pinned.
        self.objects: OrderedDict[str | int, ObjectRecord] = OrderedDict()
        self._ready: OrderedDict[Block, None] = OrderedDict()
        self._ready_bytes = 0

    def record_of(self, source: BlockSource) -> ObjectRecord:
        """The record of a source, made at its first use."""
        key = memory_key(source)
        record = self.objects.get(key)
        if record is None:
            preferred = source.store.preferred
            streams = min(self._settings.connections, max(1, preferred.streams))
            queue = self._queues.join(source.store, streams)
            last = block_count(source) - 1
            record = ObjectRecord(
                key, source, queue, max(1, preferred.range_bytes), last, block_length(source, last)
            )
            self.objects[key] = record
            self._trim_objects()
        else:
            self.objects.move_to_end(key)
        record.forgotten = False
        return record

    def known_record(self, source: BlockSource) -> ObjectRecord | None:
        """The record of a source that was used before."""
        return self.objects.get(memory_key(source))

    def attach(self, record: ObjectRecord, cached: CachedObject) -> bool:
        """Use an opened object of the node cache; False if the record has one or was forgotten."""
        if record.cached is not None or self.objects.get(record.key) is not record:
            return False
        record.cached = cached
        record.cache_queue = self._queues.join(cached, self._settings.cache_streams)
        return True

    def _trim_objects(self) -> None:
        """Forget the least recently used objects; those in use now stay, however many."""
        surplus = max(0, len(self.objects) - KEPT_OBJECTS)
        for record in list(itertools.islice(self.objects.values(), surplus)):
            if all(b.status is Status.READY and not b.pins for b in record.blocks.values()):
                self.forget(record)

    def forget(self, record: ObjectRecord) -> None:
        """Drop an object's blocks; its record is dropped once none of them is in use."""
        record.forgotten = True
        for block in list(record.blocks.values()):
            if block.status is Status.READY and not block.pins:
                self._evict(block)
        self._drop_unused(record)

    def drop_forgotten(self, block: Block) -> None:
        """Drop a block that arrived after its object was forgotten, unless it is in use."""
        if block.status is Status.READY and not block.pins:
            self._evict(block)

    def _drop_unused(self, record: ObjectRecord) -> None:
        if record.blocks or self.objects.get(record.key) is not record:
            return
        del self.objects[record.key]
        for queue in (record.queue, record.cache_queue):
            if queue is not None:
                self._queues.leave(queue)
        if record.cached is not None:
            self._effects.to_close.append(record.cached)

    def ready_blocks(self, record: ObjectRecord, first: int, last: int) -> list[Block] | None:
        """The blocks `first` to `last` if every one of them is in memory."""
        blocks = []
        for index in range(first, last + 1):
            block = record.blocks.get(index)
            if block is None or block.status is not Status.READY:
                return None
            blocks.append(block)
        return blocks

    def pin(self, block: Block) -> None:
        """Keep a ready block's memory."""
        if not block.pins:
            del self._ready[block]
            if block.slot is not None:
                self._ready_bytes -= block.slot.size_bytes
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`."""
        block.pins -= 1
        if not block.pins:
            self._ready[block] = None
            if block.slot is not None:
                self._ready_bytes += block.slot.size_bytes
            if block.object.forgotten:
                self._evict(block)

    def touch(self, block: Block) -> None:
        """An unpinned ready block was used."""
        self._ready.move_to_end(block)

    def keep(self, block: Block, slot: Slot) -> None:
        """A verified block is ready, not pinned yet."""
        block.slot = slot
        block.status = Status.READY
        self._ready[block] = None
        self._ready_bytes += slot.size_bytes

    def drop(self, block: Block) -> None:
        """A block is absent from now on; it has no memory of ours."""
        block.status = Status.DROPPED
        block.waiters = []
        block.direct_target = block.direct_waiter = None
        record = block.object
        if record.blocks.get(block.index) is block:
            del record.blocks[block.index]
            if record.forgotten:
                self._drop_unused(record)

    def _evict(self, block: Block) -> None:
        del self._ready[block]
        if block.slot is not None:
            self._ready_bytes -= block.slot.size_bytes
            self.pool.give(block.slot)
            block.slot = None
        self.drop(block)

    def slot(self, size_bytes: int, priority: Priority) -> Slot | None:
        """Memory for one block, evicting the least recently used; None when all is in use."""
        budget = self.pool.budget_bytes
        if priority is not Priority.DEMAND:
            in_use = self.pool.used_bytes - self._ready_bytes + size_bytes
            if in_use > budget - budget // DEMAND_SHARE and self._queues.requests:
                return None
        while True:
            slot = self.pool.take(size_bytes)
            if slot is not None or not self._ready:
                break
            self._evict(next(iter(self._ready)))
        if slot is None and not self._queues.requests:
            # No request will free memory, and the readers that hold the rest may wait for this one.
            slot = self.pool.take(size_bytes, beyond=True)
        return slot
