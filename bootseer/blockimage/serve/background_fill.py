"""Background fill: the rest of an image into the node cache, while the link is not needed."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from bootseer.blockimage.serve.fill_settings import Activity, FillSettings
from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import Priority
from bootseer.blocks.source import BlockSource, block_count, block_length
from bootseer.errors import BootseerError
from bootseer.system import file_lock

STEP_BYTES = 4 << 20
START_STEP_BYTES = 1 << 20  # at most this competes with a program that reads in mid-start
FAULTS = 5  # steps in a row that failed, before it rests
REST_S = 30.0
FILLS = 2  # `whole` may drop wrong blocks, which are fetched once more
POLL_S = 0.2
LOOK_S = 0.5  # between looks for reads
YIELD_LIMIT_S = 600.0  # without a break: a start that needs the link for longer probably hangs
STORED_S = 0.5  # without news of the blocks of a step; then the fill itself stores them
TURN_S = 2.0  # between looks whether another server of the image has ended


class Fill:
    """Fetches what the cache lacks, from front to back.

    `busy` returns what is read meanwhile, `over` whether the start is over.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        source: BlockSource,
        cache: NodeCache,
        settings: FillSettings,
        *,
        busy: Callable[[], Activity],
        over: Callable[[], bool],
    ) -> None:
        self._fetcher, self._source, self._cache = fetcher, source, cache
        self._settings, self._busy, self._over = settings, busy, over
        self._closing = threading.Event()
        self._seen = -1  # reads, as of the last look
        self._yielded_s = 0.0
        self.done = threading.Event()
        self.filled_bytes = 0

    def run(self, say: Callable[[str], None], whole: Callable[[], bool]) -> None:
        """Fill until all blocks are there, the cache takes no more, or `close`; reports pauses.

        `whole` is called once all are there, while no other server fills; it returns False when
        some of them were wrong and must be fetched again.
        """
        with self._turn() as ours:
            for _ in range(FILLS if ours else 0):
                if not self._all(say):
                    return
                self.done.set()
                if whole():
                    return

    def _all(self, say: Callable[[str], None]) -> bool:
        """Fetch all that is missing; returns whether nothing is missing any more."""
        with self._open_cached() as cached:
            before = count = block_count(self._source)
            while self._pass(cached, count, say):
                left = cached.count_missing(count)
                if not left:
                    return True
                if 2 * left > before:
                    say("filling the cache ends: it does not keep all of this image")
                    return False
                before = left
            return False

    def _open_cached(self) -> CachedObject:
        """Open the image in the cache; tries again where it is just being evicted."""
        for number in range(FAULTS):
            cached = self._cache.open(self._source)
            hopeless = self._cache.stopped or not self._source.key
            if cached.usable or hopeless or self._closing.wait(POLL_S * number):
                break
            cached.close()
        return cached

    def _pass(self, cached: CachedObject, count: int, say: Callable[[str], None]) -> bool:
        """Fetch what is missing, from front to back; False where going on would be useless."""
        first, faults, refused = 0, 0, 0
        while first < count and not self._closing.is_set():
            missing = cached.missing(first, min(1024, count - first))
            if not missing:
                first += 1024
                continue
            # Blocks for which there is no room would be fetched in vain. A frozen image takes
            # none, but may be complete, and must then be verified again.
            if not cached.storing or refused == FAULTS:
                say("filling the cache ends: it takes no more of this image")
                return False
            first = missing[0]
            if not self.quiet():
                return False
            run = _run_of(missing, self._room())
            if self._step(run):
                first, faults = run[-1] + 1, 0
                refused = 0 if self._await_stored(cached, run) else refused + 1
                continue
            faults += 1
            if faults == FAULTS:
                rests = self._settings.rests
                what = "rests" if rests else "ends"
                say(f"filling the cache {what}: {FAULTS} requests in a row failed")
                if not rests:
                    return False
            if self._closing.wait(REST_S if faults >= FAULTS else POLL_S * faults):
                return False
        return not self._closing.is_set()

    def _await_stored(self, cached: CachedObject, run: list[int]) -> bool:
        """Wait until fetched blocks are stored, shortly after arrival; returns whether any is.

        The fetcher does not store blocks again that had arrived earlier and were not kept: they
        are stored here.
        """
        left, pause_s = run, 0.001
        end_s = time.monotonic() + STORED_S
        while missing := cached.missing(run[0], len(run)):
            if len(missing) < len(left):
                end_s = time.monotonic() + STORED_S
            left = missing
            if self._closing.wait(pause_s) or not cached.storing:
                break
            if time.monotonic() > end_s:
                missing = [index for index in left if not self._store(cached, index)]
                break
            pause_s = min(2 * pause_s, POLL_S)
        return len(missing) < len(run)

    def _store(self, cached: CachedObject, index: int) -> bool:
        """Store a block, which is most likely in the fetcher's memory; whether it is kept."""
        source = self._source
        raw = memoryview(bytearray(block_length(source, index)))
        try:
            offset = index * source.block_bytes
            self._fetcher.read_into(source, offset, raw, priority=Priority.BACKGROUND)
        except BootseerError:
            return False
        return cached.store(index, raw) or cached.present(index)

    def _room(self) -> int:
        """Blocks of one step."""
        step_bytes = STEP_BYTES if self._over() else START_STEP_BYTES
        return max(1, step_bytes // self._source.block_bytes)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Wait until no other server of this node fills the image; False when closed."""
        while not self._closing.is_set():
            try:
                lock = file_lock.acquire(self._settings.lock, limit_s=0)
            except BlockingIOError:
                self._closing.wait(TURN_S)
                continue
            except OSError:  # no such folder, or an unusable cache, which is reported elsewhere
                yield True
                return
            with lock:
                yield not self._closing.is_set()
            return
        yield False

    def quiet(self, *, needs_link: bool = True) -> bool:
        """Wait until nothing has been read, or waited for, for a while; False when closed."""
        settings, quiet_s = self._settings, math.inf  # unless something happened since
        while not self._closing.is_set():
            seen = self._busy()
            if not seen.link_taken:
                self._yielded_s = 0.0
            yields = needs_link and seen.link_taken and self._yielded_s < YIELD_LIMIT_S
            if seen.reads != self._seen or seen.waiting or yields:
                self._seen, quiet_s = seen.reads, 0.0
            needed_s = settings.quiet_s if self._over() else settings.start_quiet_s
            if quiet_s >= needed_s and not seen.waiting and not yields:
                return True
            pause_s = min(max(needed_s - quiet_s, POLL_S), LOOK_S)
            self._closing.wait(pause_s)
            quiet_s += pause_s
            if needs_link and seen.link_taken:
                self._yielded_s += pause_s
        return False

    def _step(self, blocks: list[int]) -> bool:
        source = self._source
        offset = blocks[0] * source.block_bytes
        length = sum(block_length(source, index) for index in blocks)
        began_s = time.monotonic()
        ticket = self._fetcher.prefetch(source, offset, length, Priority.BACKGROUND)
        while not ticket.done:
            ticket.wait(POLL_S)
            if self._closing.is_set():
                ticket.cancel()
                return False
        if not ticket.wait(0):
            return False
        self.filled_bytes += length
        if self._settings.rate_bytes_s:
            due_s = began_s + length / self._settings.rate_bytes_s
            self._closing.wait(max(0.0, due_s - time.monotonic()))
        return True

    def close(self) -> None:
        """End soon; twice is safe."""
        self._closing.set()


def _run_of(missing: list[int], room: int) -> list[int]:
    """The first run of neighbouring blocks, `room` at most."""
    run = missing[:1]
    for index in missing[1:room]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run
