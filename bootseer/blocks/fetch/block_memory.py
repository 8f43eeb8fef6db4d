"""What is known of objects, and which of their blocks are in memory. No threads, no I/O."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from bootseer.blocks.fetch.records import Block, CachedBlocks, Object, Status
from bootseer.blocks.fetch.slabs import Pool, Slot
from bootseer.blocks.fetch.store_queues import DEMAND_SHARE, Lines
from bootseer.blocks.settings import FetchSettings, Priority
from bootseer.blocks.source import BlockSource, memory_key

KEPT_OBJECTS = 256  # records (and open files of the node cache) of objects that nobody reads now


class Shelf(Lines):
    """Records of objects, and ready blocks, least recently used first. See `lines`."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self.pool = Pool(settings.memory_bytes)
        self.objects: OrderedDict[str | int, Object] = OrderedDict()  # least recently used first
        self.closes: list[CachedBlocks] = []  # to be closed outside the lock
        self._ready: OrderedDict[Block, None] = OrderedDict()  # unpinned, least recently used first
        self._ready_bytes = 0

    def object_of(self, source: BlockSource) -> Object:
        """The record of a source, made at its first use."""
        key = memory_key(source)
        found = self.objects.get(key)
        if found is None:
            store = source.store
            preferred = store.preferred
            streams = min(self.settings.connections, max(1, preferred.streams))
            line = self.line_of(store, streams)
            found = Object(key, source, line, max(1, preferred.range_bytes))
            self.objects[key] = found
            self._trim_objects()
        else:
            self.objects.move_to_end(key)
        found.forgotten = False
        return found

    def cache(self, found: Object, cached: CachedBlocks) -> bool:
        """Use an opened object of the node cache; False when it came too late."""
        if found.cached is not None or self.objects.get(found.key) is not found:
            return False
        found.cached = cached
        found.cache_line = self.line_of(cached, self.settings.cache_streams)
        return True

    def _trim_objects(self) -> None:
        """Forget objects that were not used for longest; those in use now stay, however many."""
        surplus = max(0, len(self.objects) - KEPT_OBJECTS)
        for found in list(itertools.islice(self.objects.values(), surplus)):
            idle = not found.claims and all(
                block.status is Status.READY and not block.pins for block in found.blocks.values()
            )
            if idle:
                self.forget(found)

    def forget(self, found: Object) -> None:
        """Drop what memory holds of an object; the record goes once nothing of it is in use."""
        found.forgotten = True
        for block in list(found.blocks.values()):
            if block.status is Status.READY and not block.pins:
                self._evict(block)
        self._drop_forgotten(found)

    def drop_arrived(self, block: Block) -> None:
        """Drop a block that came after its object was forgotten; `unpin` does if it is in use."""
        if block.status is Status.READY and not block.pins:
            self._evict(block)

    def _drop_forgotten(self, found: Object) -> None:
        if found.blocks or found.claims or self.objects.get(found.key) is not found:
            return
        del self.objects[found.key]
        for line in (found.line, found.cache_line):
            if line is not None:
                self._leave_line(line)
        if found.cached is not None:
            self.closes.append(found.cached)

    def all_ready(self, found: Object, first: int, last: int) -> list[Block] | None:
        """The blocks `first` to `last` if every one of them is in memory."""
        out = []
        for index in range(first, last + 1):
            block = found.blocks.get(index)
            if block is None or block.status is not Status.READY:
                return None
            out.append(block)
        return out

    def pin(self, block: Block) -> None:
        """Keep a ready block's memory."""
        if not block.pins:
            del self._ready[block]
            self._ready_bytes -= self._memory_of(block)
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`."""
        block.pins -= 1
        if not block.pins:
            self._ready[block] = None
            self._ready_bytes += self._memory_of(block)
            if block.object.forgotten:
                self._evict(block)

    def touch(self, block: Block) -> None:
        """An unpinned ready block was used."""
        self._ready.move_to_end(block)

    @staticmethod
    def _memory_of(block: Block) -> int:
        return block.slot.size_bytes if block.slot is not None else 0

    def _evict(self, block: Block) -> None:
        del self._ready[block]
        self._ready_bytes -= self._memory_of(block)
        if block.slot is not None:
            self.pool.give(block.slot)
            block.slot = None
        self._gone(block)

    def _gone(self, block: Block) -> None:
        block.status = Status.GONE
        block.waiters = []
        block.landing = block.landing_group = None
        if block.object.blocks.get(block.index) is block:
            del block.object.blocks[block.index]
            if block.object.forgotten:
                self._drop_forgotten(block.object)

    def _keep(self, block: Block, slot: Slot) -> None:
        """A verified block is ready, not pinned yet."""
        block.slot = slot
        block.status = Status.READY
        self._ready[block] = None
        self._ready_bytes += slot.size_bytes

    def slot(self, size_bytes: int, priority: Priority) -> Slot | None:
        """Memory for one block, evicting what was not used for longest; None when all is in use."""
        budget = self.pool.budget_bytes
        if priority is not Priority.DEMAND:
            in_use = self.pool.used_bytes - self._ready_bytes + size_bytes
            if in_use > budget - budget // DEMAND_SHARE and self.flights:
                return None
        while True:
            slot = self.pool.take(size_bytes)
            if slot is not None or not self._ready:
                break
            self._evict(next(iter(self._ready)))
        if slot is None and not self.flights:
            # Nothing under way could free any, and whoever holds the rest may wait for this one.
            slot = self.pool.take(size_bytes, beyond=True)
        return slot
