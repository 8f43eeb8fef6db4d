"""The background fill: when it may fetch, how fast, and that one server of a node does."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.blockimage.serve import background_fill as fill_module
from bootseer.blockimage.serve.background_fill import Fill
from bootseer.blockimage.serve.data_file import DATA, DataFile
from bootseer.blockimage.serve.fill_settings import Activity, FillSettings
from bootseer.blockimage.serve.image_server import ImageServer, ServeSettings
from bootseer.blockimage.serve.opened_image import BlockImage
from bootseer.blocks import link_turns
from bootseer.blocks.cache import present_index
from bootseer.blocks.cache.cached_object import CachedObject
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch import planner
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.link_turns import LinkTurns
from bootseer.errors import StoreUnavailableError
from bootseer.fuse.operations import Handle
from bootseer.imageprefetch.mount.settings import MountSettings
from tests.support.samples.block_sources import FileSource, block_of, make_source

PAGE = 4096
IDLE = Activity(0, 0)


class Counting:
    """A fetcher (a fake) that brings everything at once, and counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def prefetch(self, source: Any, offset: int, length: int, priority: Any) -> Any:
        self.asked.append((offset, length))
        return self

    done = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def read_into(self, source: Any, offset: int, raw: memoryview, priority: Any) -> int:
        raise StoreUnavailableError("what came is not to be had once more")


class Storing(Counting):
    """A fetcher (a fake) of which each block is stored a moment after it came.

    `lost` are not, when they come first; with `in_memory` they can be had from there at least.
    """

    def __init__(
        self, cached: CachedObject, after_s: float, lost: set[int], *, in_memory: bool = False
    ) -> None:
        super().__init__()
        self._cached, self._after_s, self._lost = cached, after_s, lost
        self._in_memory = in_memory

    def prefetch(self, source: Any, offset: int, length: int, priority: Any) -> Any:
        first = offset // source.block_bytes
        for index in range(first, first + length // source.block_bytes):
            if index in self._lost:
                self._lost.remove(index)
                continue
            raw = memoryview(block_of(source, index))
            threading.Timer(self._after_s, self._cached.store, (index, raw)).start()
        return super().prefetch(source, offset, length, priority)

    def read_into(self, source: Any, offset: int, raw: memoryview, priority: Any) -> int:
        if not self._in_memory:
            return super().read_into(source, offset, raw, priority)
        raw[:] = block_of(source, offset // source.block_bytes)
        return len(raw)


class Pauses:
    """An event (a fake) whose waits take no time; `then` is told of each one."""

    def __init__(self, then: Callable[[float], None] = lambda _: None) -> None:
        self.waits: list[float] = []
        self._then = then
        self.closed = False

    def is_set(self) -> bool:
        return self.closed

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self._then(timeout_s)
        return self.closed


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileSource:
    monkeypatch.setattr(fill_module, "STEP_BYTES", PAGE)
    monkeypatch.setattr(fill_module, "STORED_S", 0.0)  # most fetchers here store nothing
    return make_source(tmp_path / "source", 64 * PAGE)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache.at(str(tmp_path / "cache"), 1 << 30) as made:
        yield made


def a_fill(
    source: FileSource,
    cache: NodeCache,
    settings: FillSettings,
    *,
    pauses: Pauses | None = None,
    busy: Callable[[], Activity] = lambda: IDLE,
    over: Callable[[], bool] = lambda: True,
) -> tuple[Fill, Counting]:
    fetcher = Counting()
    made = Fill(fetcher, source, cache, settings, busy=busy, over=over)  # type: ignore[arg-type]
    if pauses is not None:
        made._closing = pauses  # type: ignore[assignment]
    return made, fetcher


def test_it_ends_where_the_cache_takes_no_more(source: FileSource, cache: NodeCache) -> None:
    said: list[str] = []
    fill, fetcher = a_fill(source, cache, FillSettings(quiet_s=0))
    fill.run(said.append, lambda: True)
    assert len(fetcher.asked) == fill_module.FAULTS
    assert said == ["filling the cache ends: it takes no more of this image"]
    assert not fill.done.is_set()


class Failing(Counting):
    """A fetcher (a fake) of which no request succeeds."""

    def wait(self, timeout_s: float) -> bool:
        return False


@pytest.mark.parametrize("rests", [True, False])
def test_after_requests_in_a_row_that_failed_it_rests_or_ends(
    source: FileSource, cache: NodeCache, rests: bool
) -> None:
    said: list[str] = []
    pauses = Pauses()
    fetcher = Failing()
    settings = FillSettings(quiet_s=0, rests=rests)
    fill = Fill(fetcher, source, cache, settings, busy=lambda: IDLE, over=lambda: True)  # type: ignore[arg-type]
    fill._closing = pauses  # type: ignore[assignment]

    def end_after_a_rest(pause_s: float) -> None:
        pauses.closed = pause_s == fill_module.REST_S

    pauses._then = end_after_a_rest
    fill.run(said.append, lambda: True)
    what = "rests" if rests else "ends"
    assert said == [f"filling the cache {what}: {fill_module.FAULTS} requests in a row failed"]
    assert pauses.closed is rests
    assert len(fetcher.asked) == fill_module.FAULTS
    assert not fill.done.is_set()


def test_without_locks_it_fills_beside_other_servers(
    source: FileSource, cache: NodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injected: a file system that has no locks."""
    monkeypatch.setattr(fill_module, "STORED_S", 0.3)

    def refused(_path: str, *, limit_s: float) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fill_module, "file_lock", SimpleNamespace(acquire=refused))
    with cache.open(source) as cached:
        fill, _ = a_fill(source, cache, FillSettings(quiet_s=0, lock=str(tmp_path / "lock")))
        fill._fetcher = Storing(cached, 0.0, set())  # type: ignore[assignment]
        fill.run(lambda _: None, lambda: True)
        assert cached.missing(0, 64) == []
    assert fill.done.is_set()


@pytest.mark.parametrize(
    ("lost", "in_memory", "more"),
    [(set(), False, 0), ({0, 7, 63}, False, 3), ({0, 7, 63}, True, 0)],
)
def test_it_waits_for_a_slow_disk_and_comes_back_to_what_was_not_kept(
    source: FileSource,
    cache: NodeCache,
    monkeypatch: pytest.MonkeyPatch,
    lost: set[int],
    in_memory: bool,
    more: int,
) -> None:
    monkeypatch.setattr(fill_module, "STORED_S", 0.3)
    said: list[str] = []
    with cache.open(source) as cached:
        fill, _ = a_fill(source, cache, FillSettings(quiet_s=0))
        fetcher = Storing(cached, 0.005, set(lost), in_memory=in_memory)
        fill._fetcher = fetcher  # type: ignore[assignment]
        fill.run(said.append, lambda: True)
        assert cached.missing(0, 64) == []
    assert said == []
    assert fill.done.is_set()
    assert len(fetcher.asked) == 64 + more


def test_what_was_read_while_the_image_could_not_be_opened_is_kept_by_the_fill(
    source: FileSource, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the fetcher's memory, which stores nothing that has come already."""
    monkeypatch.setattr(planner, "REOPEN_S", 0.1)
    identity = present_index.identity_of(source)
    assert identity is not None
    cache.open(source).close()
    with Fetcher(cache=cache) as fetcher:
        with open(f"{cache.directory}/{identity.folder}/present", "rb") as present:
            fcntl.flock(present, fcntl.LOCK_EX)
            fetcher.read_into(source, 8, bytearray(40 * PAGE))
        made = Fill(
            fetcher,
            source,
            cache,
            FillSettings(quiet_s=0),
            busy=lambda: IDLE,
            over=lambda: True,
        )
        said: list[str] = []
        made.run(said.append, lambda: True)
    assert said == []
    with cache.open(source) as cached:
        assert cached.missing(0, 64) == []


def test_an_image_of_which_much_is_never_kept_is_given_up(
    source: FileSource, cache: NodeCache
) -> None:
    said: list[str] = []
    with cache.open(source) as cached:
        fill, _ = a_fill(source, cache, FillSettings(quiet_s=0))
        kept = set(range(0, 64, 3))

        class Some(Storing):
            def prefetch(self, source: Any, offset: int, length: int, priority: Any) -> Any:
                index = offset // source.block_bytes
                if index in kept:
                    cached.store(index, memoryview(block_of(source, index)))
                return Counting.prefetch(self, source, offset, length, priority)

        fetcher = Some(cached, 0.0, set())
        fill._fetcher = fetcher  # type: ignore[assignment]
        fill.run(said.append, lambda: True)
    assert said == ["filling the cache ends: it does not keep all of this image"]
    assert len(fetcher.asked) == 64


def test_an_image_that_is_being_evicted_at_the_moment_is_filled_a_little_later(
    source: FileSource, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_module, "POLL_S", 0.05)
    identity = present_index.identity_of(source)
    assert identity is not None
    with cache.open(source) as cached:
        for index in range(64):
            cached.store(index, memoryview(block_of(source, index)))
    fill, _ = a_fill(source, cache, FillSettings(quiet_s=0))
    with open(f"{cache.directory}/{identity.folder}/present", "rb") as present:
        fcntl.flock(present, fcntl.LOCK_EX)
        threading.Timer(0.1, fcntl.flock, (os.dup(present.fileno()), fcntl.LOCK_UN)).start()
        fill.run(lambda _: None, lambda: True)
    assert fill.done.is_set()


def test_it_keeps_to_its_rate(source: FileSource, cache: NodeCache) -> None:
    settings, pauses = FillSettings(quiet_s=0, rate_bytes_s=PAGE // 8), Pauses()
    fill, fetcher = a_fill(source, cache, settings, pauses=pauses)
    fill.run(lambda _: None, lambda: True)
    asked_bytes = sum(length for _, length in fetcher.asked)
    assert 0.9 < sum(pauses.waits) / (8 * asked_bytes / PAGE) < 1.1


def test_it_has_a_rate_unless_somebody_takes_it_away() -> None:
    assert MountSettings(ref="image", directory="/").fill_rate_bytes_s > 0


@pytest.mark.parametrize("over", [False, True])
def test_in_the_middle_of_a_start_it_waits_longer_and_takes_less(
    source: FileSource, cache: NodeCache, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    monkeypatch.setattr(fill_module, "STEP_BYTES", 8 * source.block_bytes)
    monkeypatch.setattr(fill_module, "START_STEP_BYTES", 2 * source.block_bytes)
    reads, pauses = iter((3, 4, 4)), Pauses()

    def busy() -> Activity:
        return Activity(next(reads, 4), 0)

    settings = FillSettings(quiet_s=2, start_quiet_s=5)
    fill, fetcher = a_fill(source, cache, settings, pauses=pauses, busy=busy, over=lambda: over)
    fill.run(lambda _: None, lambda: True)
    looks = 1 + (4 if over else 10)  # the first one sees reads, and so does the second
    assert pauses.waits[:looks] == [fill_module.LOOK_S] * looks
    assert pauses.waits[looks : looks + 1] != [fill_module.LOOK_S]
    assert fetcher.asked[0] == (0, (8 if over else 2) * source.block_bytes)


def test_nothing_is_fetched_while_a_program_waits(source: FileSource, cache: NodeCache) -> None:
    """A read that waits for long is the same read at each look."""
    waiting, seen = [1], []

    def answered(_: float) -> None:
        seen.append(list(fetcher.asked))
        if len(seen) == 4:
            waiting[0] = 0

    pauses = Pauses(answered)
    fill, fetcher = a_fill(
        source, cache, FillSettings(), pauses=pauses, busy=lambda: Activity(7, waiting[0])
    )
    fill.run(lambda _: None, lambda: True)
    assert seen[:4] == [[]] * 4
    assert fetcher.asked


def test_replay_is_something_to_wait_for(tmp_path: Path) -> None:
    """What warms an image for somebody else's start needs the link as that start does."""
    file = DataFile(on_release=lambda: None, on_error=lambda *_: None)
    image = BlockImage(meta_path="", data_bytes=PAGE, source=lambda: None)  # type: ignore[arg-type,return-value]
    server = ImageServer(image, file, ServeSettings(), say=lambda *_: None)
    file.set_warming_threads(frozenset({threading.get_native_id()}))

    class Later:
        thread = threading.get_native_id()

        def park(self, _: Any) -> None: ...

        def __call__(self) -> Any:
            return self

    before = server._activity()
    file.read(DATA, Handle(1), 0, PAGE, Later())
    assert server._activity().reads == before.reads + 1


@pytest.mark.parametrize("kind", link_turns.KINDS)
def test_what_a_start_on_this_node_needs_is_waited_for(tmp_path: Path, kind: str) -> None:
    """Its checkpoint above all: meanwhile nobody reads the image."""
    file = DataFile(on_release=lambda: None, on_error=lambda *_: None)
    image = BlockImage(meta_path="", data_bytes=PAGE, source=lambda: None)  # type: ignore[arg-type,return-value]
    turns = LinkTurns.of(str(tmp_path))
    server = ImageServer(image, file, ServeSettings(turns=turns), say=lambda *_: None)
    with turns, LinkTurns.of(str(tmp_path)) as others:
        assert not server._activity().link_taken
        with others.holding(kind):
            assert server._activity().link_taken
        assert not server._activity().link_taken


def test_a_pause_counts_from_the_end_of_a_wait(source: FileSource, cache: NodeCache) -> None:
    for last in (Activity(0, 1), Activity(0, 0, link_taken=True)):
        seen, pauses = iter((last, last)), Pauses()
        fill, _ = a_fill(
            source,
            cache,
            FillSettings(start_quiet_s=3),
            pauses=pauses,
            busy=lambda seen=seen: next(seen, IDLE),  # type: ignore[misc]
            over=lambda: False,
        )
        assert fill.quiet()
        assert sum(pauses.waits) == fill_module.LOOK_S + 3
        assert fill.quiet()
        assert sum(pauses.waits) == fill_module.LOOK_S + 3


def test_a_link_that_is_never_free_is_waited_for_no_longer_than_a_start_takes(
    source: FileSource, cache: NodeCache
) -> None:
    """And not at all by what reads this node's disk; but again once it was free."""
    pauses, taken = Pauses(), True
    fill, _ = a_fill(
        source,
        cache,
        FillSettings(quiet_s=2),
        pauses=pauses,
        busy=lambda: Activity(0, 0, link_taken=taken),
    )
    assert fill.quiet(needs_link=False)
    assert sum(pauses.waits) == 2
    for _ in range(2):
        assert fill.quiet()
        assert sum(pauses.waits) == 2 + fill_module.YIELD_LIMIT_S + 2 - fill_module.LOOK_S
    before_s = sum(pauses.waits)
    taken = False
    assert fill.quiet()
    taken = True
    assert fill.quiet()
    assert sum(pauses.waits) - before_s == fill_module.YIELD_LIMIT_S + 2 - fill_module.LOOK_S


def test_servers_of_one_image_take_turns(
    source: FileSource, cache: NodeCache, tmp_path: Path
) -> None:
    lock = tmp_path / "lock"
    held = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    seen: list[int] = []

    def waited(timeout_s: float) -> None:
        seen.append(len(fetcher.asked))
        if len(seen) == 3:
            os.close(held)

    settings = FillSettings(quiet_s=0, lock=str(lock))
    fill, fetcher = a_fill(source, cache, settings, pauses=Pauses(waited))
    fill.run(lambda _: None, lambda: True)
    assert seen[:3] == [0, 0, 0]
    assert fetcher.asked
    with open(lock) as free:  # it has let go of it
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_that_waits_for_its_turn_ends_when_told(
    source: FileSource, cache: NodeCache, tmp_path: Path
) -> None:
    lock = tmp_path / "lock"
    fill, fetcher = a_fill(source, cache, FillSettings(lock=str(lock)))
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=fill.run, args=(lambda _: None, lambda: True))
        thread.start()
        fill.close()
        thread.join(60)
    assert not thread.is_alive()
    assert not fetcher.asked
