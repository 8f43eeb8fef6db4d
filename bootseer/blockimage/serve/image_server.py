"""Serving a mounted block image: hot frames first, demand alongside, the rest when idle.

The order at a start: the data file answers, EROFS is mounted over it, and the caller is answered.
Only then are the index and the block table read; reads that come meanwhile wait some milliseconds.
The receiving thread takes frames from the pack's stream, resumes the reads that wait for them, and
hands them to the warmer. While a program waits for a cold block the stream pauses: demand has
priority on the link.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.blockimage import erofs_mount
from bootseer.blockimage.pack_format import EMPTY, Frame, Index, open_frame
from bootseer.blockimage.serve.byte_source import Bytes, Frames, Reads
from bootseer.blockimage.serve.data_file import DataFile
from bootseer.blockimage.serve.fill_settings import Activity, FillSettings
from bootseer.blockimage.serve.huge_pages import Arena
from bootseer.blockimage.serve.opened_image import BlockImage, FrameStream
from bootseer.blocks.extents import Extent
from bootseer.blocks.link_turns import DEMAND, HOT
from bootseer.blocks.settings import DEFAULTS, FetchSettings
from bootseer.blocks.source import BlockSource
from bootseer.errors import BootseerError, CorruptDataError
from bootseer.light_dataclasses import dataclass

if TYPE_CHECKING:
    from bootseer.blockimage.serve.background_fill import Fill
    from bootseer.blockimage.serve.bulk_fetch import WholeFetch
    from bootseer.blockimage.serve.page_cache_warmer import Warmer
    from bootseer.blocks.cache.node_cache import NodeCache
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.blocks.link_turns import LinkTurns
    from bootseer.blocks.stats import Counters

NAME = "d"
ROOM_WAIT_S = 10.0
LATER_READ_AHEAD_KIB, COMPLETE_READ_AHEAD_KIB = 128, 1024
WARMED_STAY_S = 5.0
DEMAND_PAUSE_S = 0.001
DEMAND_PAUSES = 200  # a read that waits longer has met a fault: the stream goes on
KEEP_FREE = 0.15  # of the disk; with less free, a kubelet evicts pods, and it cannot free the cache
DEMAND_STAYS_S = 0.03  # after a program waited for a block, it probably waits for another
DEMAND_LOOK_S = 0.5
STANDS_STILL_S = 2.0  # without a byte of the stream, readers ask for blocks themselves

Say = Callable[[str, str], None]
"""Receives a kind of fault and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How an image is served. `frames_bytes` bounds hot frames that are not warmed yet.

    `cache_dir` is the node cache ("" = none). `loop`: over loop devices, None where needed. By
    `turns` other processes of the node give way to what this start needs. `eager`: an image without
    a hot set is fetched whole.
    """

    cache_dir: str = ""
    cache_limit_bytes: int = 64 << 30
    frames_bytes: int = 256 << 20
    fetch: FetchSettings = DEFAULTS
    loop: bool | None = None
    warm: bool = True
    fill: FillSettings | None = None
    turns: LinkTurns | None = None
    eager: bool = False


class ImageServer:
    """One image behind its data file. `say` gets the faults that readers do not see."""

    def __init__(
        self,
        image: BlockImage,
        file: DataFile,
        settings: ServeSettings,
        *,
        say: Say,
        hot_done: Callable[[], None] | None = None,
    ) -> None:
        self.image, self.settings = image, settings
        self._file = file
        self._say, self._hot_done = say, hot_done
        self._lock = threading.Lock()
        self._fetcher: Fetcher | None = None
        self._cache: NodeCache | None = None
        self._supply: Bytes | None = None
        self._source: BlockSource | None = None
        self._frames: Frames | None = None
        self._warmer: Warmer | None = None
        self._whole: WholeFetch | None = None
        self._fill: Fill | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._bdis: tuple[str, ...] = ()
        self._recorded = self._start_over = False
        self._arena = Arena()
        self._pulse = 0  # changes with each piece of the stream
        self.hot_bytes = self.hot_frames = 0  # stored bytes of frames that arrived; how many
        file.set_size(image.data_bytes)

    def mount(self, directory: str, target: str) -> erofs_mount.Erofs:
        """Mount the image at `target`; its data file must answer in `directory`."""
        mounted = erofs_mount.mount_erofs(
            self.image.meta_path, f"{directory}/{NAME}", target, loop=self.settings.loop
        )
        self._file.set_mounted(self._file.last_handle, behind_loop=mounted.loop)
        self.adopt(mounted.bdis)
        return mounted

    def adopt(self, bdis: tuple[str, ...]) -> None:
        """Go on with what is mounted, by this server or one before it: see `Erofs`."""
        self._bdis = bdis

    def begin(self, target: str, *, recorded: bool = False) -> None:
        """Let bytes come: reads the index, replays the hot set through `target`, then fills.

        `recorded`: what is read is recorded until `start_is_over`.
        """
        self._recorded = recorded
        index = self._index()
        frames = Frames(index, memory_bytes=self.settings.frames_bytes)
        self._frames = frames
        receive = index.frames and self.image.frames is not None
        if not receive:
            frames.give_up()
        else:
            self._start_warmer(target, index)
        supply = Bytes(self.image.data_bytes, frames, self.open_data)
        supply.read_ahead = not index.frames  # without a hot set, what follows has to be guessed
        self._supply = supply
        self._file.supply(supply, self._on_miss if index.fetch else None)
        self._thread(lambda: self._run(index), "image-hot")
        if self.settings.turns is not None:
            turns = self.settings.turns
            self._thread(lambda: self._announce_demand(turns), "image-demand")

    def open_data(self) -> tuple[Fetcher, BlockSource]:
        """The fetcher and the data's blocks; made when they are first asked for."""
        with self._lock:
            if self._closed:
                raise CorruptDataError("the image's server has ended")
            if self._fetcher is None:
                from bootseer.blocks.fetch.fetcher import Fetcher  # a mount need not wait for it

                self._source = self.image.source()
                self._cache = self._open_cache()
                self._fetcher = Fetcher(self.settings.fetch, cache=self._cache)
            assert self._source is not None
            return self._fetcher, self._source

    def _open_cache(self) -> NodeCache | None:
        settings = self.settings
        if not settings.cache_dir:
            return None
        from bootseer.blocks.cache.node_cache import NodeCache

        try:
            return NodeCache.at(
                settings.cache_dir,
                settings.cache_limit_bytes,
                keep_free=KEEP_FREE,
                on_stop=lambda why: self._say("cache", why),
            )
        except BootseerError as error:  # nothing is kept then, and reads go on
            self._say("cache", str(error))
            return None

    @property
    def reads(self) -> Reads:
        """What reads cost so far."""
        return self._file.reads

    def count_fetched(self) -> Counters:
        """What the fetcher has brought so far."""
        from bootseer.blocks.stats import Counters

        return self._fetcher.stats.total() if self._fetcher is not None else Counters()

    def give_up(self, stalled_s: float) -> None:
        """Fail reads that have waited `stalled_s` without any bytes; see `Fetcher.give_up`."""
        with self._lock:
            fetcher = None if self._closed else self._fetcher
        if fetcher is not None:
            fetcher.give_up(stalled_s)

    def start_is_over(self) -> None:
        """Stop recording: from now on the kernel may read ahead as it does elsewhere."""
        self._recorded, self._start_over = False, True
        self._read_ahead()

    def _read_ahead(self) -> None:
        complete = self._fill is not None and self._fill.done.is_set()
        if not self._recorded and (complete or self._start_over):
            kib = COMPLETE_READ_AHEAD_KIB if complete else LATER_READ_AHEAD_KIB
            erofs_mount.set_read_ahead(self._bdis, kib)

    # --- the hot set -----------------------------------------------------------------------

    def _index(self) -> Index:
        if self.image.index is None:
            return EMPTY
        try:
            return self.image.index()
        except CorruptDataError as error:
            self._say("pack index", str(error))
            return EMPTY

    def _start_warmer(self, target: str, index: Index) -> None:
        from bootseer.blockimage.serve import page_cache_warmer

        frames = self._frames
        assert frames is not None
        if not self.settings.warm:
            return
        try:
            root = page_cache_warmer.clone_mount(target)
        except OSError as error:
            self._say("warm", f"the page cache cannot be warmed: {error}")
            return
        made = page_cache_warmer.Warmer(root, index, frames.note_warmed, finished=self._all_warmed)
        made.start()
        self._file.set_warming_threads(made.thread_ids)
        self._warmer = made

    def _all_warmed(self) -> None:
        """Free the frames once the kernel has certainly read what it was asked to read ahead."""

        def free() -> None:
            time.sleep(WARMED_STAY_S)
            self._file.set_warming_threads(frozenset())  # the system gives these ids to others
            if self._frames is not None:
                self._frames.drop_warmed()

        self._thread(free, "image-warmed")

    def _run(self, index: Index) -> None:
        try:
            with self._announcing_hot():
                self._bring_hot(index)
        except Exception as error:  # a border: readers go on by their own requests
            self._say("replay", f"the hot set was not replayed whole: {error}")
        finally:
            if self._frames is not None:
                self._frames.give_up()
            if self._warmer is not None:
                self._warmer.end()
            else:
                self._all_warmed()
            if self._hot_done is not None:
                self._hot_done()
        try:
            self._start_fill()
        except Exception as error:  # a border: the image is served without being filled
            self._say("fill", f"the cache is not filled: {error}")

    def _bring_hot(self, index: Index) -> None:
        if index.frames and self.image.frames is not None:
            self._receive(index)
        elif index.fetch:
            self._fetch(index.fetch)
        elif self.settings.eager and self.image.data_bytes:
            self._fetch([Extent(0, self.image.data_bytes)])
        else:
            self.open_data()  # nothing is hot: be ready for the first read

    def _announcing_hot(self) -> contextlib.AbstractContextManager[None]:
        """Have other processes of the node wait for the hot set."""
        turns = self.settings.turns
        return contextlib.nullcontext() if turns is None else turns.holding(HOT)

    def _announce_demand(self, turns: LinkTurns) -> None:
        """Have other processes of the node give way while a program waits, during the start."""
        began = self._file.cold_began
        while not self._closed and not self._start_over:
            if not began.wait(DEMAND_LOOK_S):
                continue
            with turns.holding(DEMAND):
                while began.is_set() or self._file.cold_waits:
                    began.clear()
                    time.sleep(DEMAND_STAYS_S)
                    if self._closed:
                        return

    def _watch_stream(self, done: threading.Event) -> None:
        """Stop waiting for a stream that hangs, while blocks may still come."""
        assert self._frames is not None
        before = -1
        while not done.wait(STANDS_STILL_S):
            if before == self._pulse:
                self._frames.stand_still()
            before = self._pulse

    def _receive(self, index: Index) -> None:
        """Take frame after frame from the stream until its end, or a fault."""
        frames, stream, warmer = self._frames, self.image.frames, self._warmer
        assert frames is not None
        assert stream is not None
        done = threading.Event()
        self._thread(lambda: self._watch_stream(done), "image-watch")
        room = memoryview(bytearray(max(frame.stored_length for frame in index.frames)))
        try:
            with stream:
                for number, frame in enumerate(index.frames):
                    if self._closed:
                        return
                    if not frames.has_room(ROOM_WAIT_S) and warmer is not None:
                        raise CorruptDataError("warming stands still")
                    self._yield_to_demand()
                    stored = room[: frame.stored_length]
                    self._fill_view(stream, stored)
                    self.hot_bytes += len(stored)
                    self.hot_frames += 1
                    self._take(number, frame, stored)
        finally:
            done.set()

    def _fill_view(self, stream: FrameStream, view: memoryview) -> None:
        """Fill a view from the stream. Raises CorruptDataError at its end."""
        done = 0
        while done < len(view):
            count = stream.readinto(view[done:])
            if not count:
                raise CorruptDataError("the pack ends in the middle of a frame")
            done += count
            self._pulse += 1

    def _take(self, number: int, frame: Frame, stored: memoryview) -> None:
        frames = self._frames
        assert frames is not None
        try:
            raw = self._arena.take(frame.raw_bytes)
            open_frame(frame, stored, raw)
        except CorruptDataError as error:
            self._say("pack frame", str(error))
            frames.drop(number)  # its pages are read as cold ones
            if self.image.frames is not None:
                self.image.frames.spoil()
            return
        frames.add_frame(number, raw)
        if self._warmer is not None:
            self._warmer.put(number)
        else:
            frames.note_warmed(number)

    def _yield_to_demand(self) -> None:
        for _ in range(DEMAND_PAUSES):
            if not self._file.cold_waits or self._closed:
                return
            time.sleep(DEMAND_PAUSE_S)

    def _fetch(self, extents: Sequence[Extent]) -> None:
        """Most of the image is hot: fetch its blocks whole, in order and in parallel."""
        from bootseer.blockimage.serve.bulk_fetch import WholeFetch

        fetcher, source = self.open_data()
        most = None if self._cache is not None else self.settings.fetch.memory_bytes // 2
        whole = self._whole = WholeFetch(fetcher, source, extents, most_bytes=most)
        whole.run()
        if whole.failed:
            self._say("replay", f"the hot set was not replayed whole: {whole.failed}")

    def _on_miss(self, offset: int) -> None:
        if self._whole is not None:
            self._whole.note_miss(offset)

    def _start_fill(self) -> None:
        if self._closed or not self.settings.cache_dir:
            return
        fetcher, source = self.open_data()
        if self._supply is not None:
            self._supply.direct_reads = fetcher.direct_reads(source)
        cache = self._cache
        if cache is None or self.settings.fill is None:
            return
        from bootseer.blockimage.serve.background_fill import Fill

        self._fill = Fill(
            fetcher,
            source,
            cache,
            self.settings.fill,
            busy=self._activity,
            over=lambda: self._start_over,
        )
        self._fill.run(lambda text: self._say("fill", text), whole=lambda: self._all_here(source))

    def _all_here(self, source: BlockSource) -> bool:
        """Use that all bytes are on this node; returns False when some must be fetched again."""
        fill, supply = self._fill, self._supply
        assert fill is not None
        if supply is not None and supply.direct_reads is None and self._fetcher is not None:
            supply.direct_reads = self._fetcher.direct_reads(
                source
            )  # it could not be opened before
        self._read_ahead()
        return self._seal(source, lambda: fill.quiet(needs_link=False))

    def _activity(self) -> Activity:
        reads, turns = self._file.reads, self.settings.turns
        is_taken = turns is not None and turns.is_taken()
        return Activity(reads.reads + reads.warm_reads, self._file.cold_waits, is_taken)

    def _seal(self, source: BlockSource, quiet: Callable[[], bool]) -> bool:
        """Make sure that the next mount may read the cache's file itself."""
        from bootseer.blocks.cache import sealed_objects

        try:
            return sealed_objects.seal(self.settings.cache_dir, source, go_on=quiet)
        except BootseerError as error:
            self._say("seal", f"it will be served next time, too: {error}")
            return True

    # --- the end ---------------------------------------------------------------------------

    def _thread(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End all threads; readers that wait get EIO. Twice is safe."""
        with self._lock:
            self._closed = True
        if self.image.frames is not None:
            with contextlib.suppress(BootseerError, OSError):
                self.image.frames.close()
        for part in (
            self._warmer,
            self._whole,
            self._fill,
            self._frames,
            self._fetcher,
        ):
            if part is not None:
                part.close()
        if self._cache is not None:
            self._cache.close()
