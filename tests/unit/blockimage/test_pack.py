"""The pack of a hot set: written, read, damaged in every way, forged."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blockimage import pack_format
from bootseer.blockimage.pack_format import Frame, Index, Limits, Warm
from bootseer.blockimage.pack_writer import PackInfo, build_pack, plan_frames
from bootseer.blocks.extents import PAGE_BYTES, Extent
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.errors import BootseerError, CorruptDataError, UsageError
from tests.support.examples import examples
from tests.support.trees.hotsets import unpack_frame

PAGES = 600
DATA = random.Random(1).randbytes(PAGES * PAGE_BYTES // 2) + bytes(PAGES * PAGE_BYTES // 2)
META, TABLE = b"metadata" * 700, b"table" * 50
KEY = "table of the tests"


class OneFile:
    """A file map by which all data is one file, from its start."""

    def ranges(self, data_extents):
        return [(b"usr/all", offset, length) for offset, length in data_extents]


def trace_of(*pages: tuple[int, int], key: str = KEY) -> Trace:
    rows = [Touched(first * PAGE_BYTES, count * PAGE_BYTES, 0, 1) for first, count in pages]
    return Trace(key, len(DATA), "", 1, tuple(rows))


def read_raw(offset: int, buffer: memoryview) -> None:
    buffer[:] = DATA[offset : offset + len(buffer)]


def packed(trace: Trace, **options) -> tuple[PackInfo, bytes]:
    out = io.BytesIO()
    about = {"meta": META, "table": TABLE, "key": KEY, "block_bytes": 1 << 16}
    info = build_pack(trace, files=OneFile(), read_raw=read_raw, out=out, **about | options)
    return info, out.getvalue()


@st.composite
def touches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Runs of pages that do not overlap, in any order."""
    cuts = sorted(draw(st.sets(st.integers(0, PAGES), max_size=24)))
    runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return draw(st.permutations(runs))


# --- what is packed comes back -----------------------------------------------------------------


@settings(max_examples=examples(25))
@given(touches())
def test_a_pack_gives_the_hot_pages_back_in_the_order_of_first_touch(runs):
    info, data = packed(trace_of(*runs), whole_share=2.0)
    boot = pack_format.parse_boot(data[: info.boot_length])
    index = boot.index()
    assert (bytes(boot.meta), bytes(boot.table), boot.data_bytes) == (META, TABLE, len(DATA))
    got, order = b"", []
    for frame in index.frames:
        start = info.boot_length + frame.offset
        raw = unpack_frame(frame, data[start : start + frame.stored_length])
        assert len(raw) == frame.raw_bytes <= pack_format.FRAME_BYTES
        order += frame.extents
        got += raw
        warmed = b"".join(DATA[w.offset : w.offset + w.length] for w in frame.warm)
        assert warmed == raw
        assert {index.paths[w.path] for w in frame.warm} == {b"usr/all"}
    pages = [p for first, count in runs for p in range(first, first + count)]
    assert [e.offset // PAGE_BYTES + i for e in order for i in range(e.length // PAGE_BYTES)] == (
        pages
    )
    assert got == b"".join(DATA[p * PAGE_BYTES : (p + 1) * PAGE_BYTES] for p in pages)
    assert info.hot_bytes == len(got)
    assert not info.fetch_bytes
    assert len(data) == info.size_bytes == info.boot_length + index.frames_bytes
    assert info.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    boot_digest = hashlib.sha256(data[: info.boot_length]).hexdigest()
    assert info.boot_digest == f"sha256:{boot_digest}"


@given(touches(), st.integers(1, 40))
def test_frames_share_out_all_pages_once_and_only_the_last_is_not_full(runs, pages):
    extents = [Extent(first * PAGE_BYTES, count * PAGE_BYTES) for first, count in runs]
    frames = plan_frames(extents, frame_bytes=pages * PAGE_BYTES)
    sizes = [sum(e.length for e in frame) for frame in frames]
    assert all(size == pages * PAGE_BYTES for size in sizes[:-1])
    assert all(0 < size <= pages * PAGE_BYTES for size in sizes)
    flat = [p for frame in frames for e in frame for p in range(e.offset, e.end, PAGE_BYTES)]
    assert flat == [p for e in extents for p in range(e.offset, e.end, PAGE_BYTES)]


def test_the_same_input_gives_the_same_bytes():
    trace = trace_of((500, 90), (0, 290))
    assert packed(trace, threads=1) == packed(trace, threads=4)


def test_a_last_page_that_is_cut_off_is_packed():
    size = len(DATA) - 1000
    last = size // PAGE_BYTES * PAGE_BYTES
    trace = Trace(KEY, size, "", 1, (Touched(last, size - last, 0, 1),))
    info, data = packed(trace)
    (frame,) = pack_format.parse_boot(data[: info.boot_length]).index().frames
    assert unpack_frame(frame, data[info.boot_length :]) == DATA[last:size]


def test_a_hot_set_that_is_most_of_its_image_is_fetched_as_whole_blocks_in_order():
    info, data = packed(trace_of((400, 200), (0, 390)))
    index = pack_format.parse_boot(data).index()
    assert not index.frames
    assert len(data) == info.boot_length
    assert index.fetch[0].offset == 400 * PAGE_BYTES // (1 << 16) * (1 << 16)
    assert info.fetch_bytes == sum(e.length for e in index.fetch) == len(DATA)


def test_an_empty_hot_set_is_a_pack_that_mounts():
    info, data = packed(trace_of())
    assert pack_format.parse_boot(data).index() == pack_format.EMPTY
    assert info.hot_bytes == 0


def test_another_objects_trace_is_refused():
    with pytest.raises(UsageError, match="carry it over"):
        packed(trace_of((0, 1), key="table of another image"))


# --- damaged -----------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_frame_is_seen():
    info, data = packed(trace_of((3, 2), (10, 1)))
    (frame,) = pack_format.parse_boot(data[: info.boot_length]).index().frames
    stored = data[info.boot_length :]
    unpack_frame(frame, stored)
    for at in range(0, len(stored), 7):
        bad = bytearray(stored)
        bad[at] ^= 1
        with pytest.raises(CorruptDataError):
            unpack_frame(frame, bad)
    for cut in (stored[:-1], stored + b"x", b""):
        with pytest.raises(CorruptDataError):
            unpack_frame(frame, cut)


def test_a_frame_that_unpacks_to_another_size_than_its_extents_have_is_refused():
    stored = zstandard.ZstdCompressor().compress(bytes(2 * PAGE_BYTES))
    digest = hashlib.sha256(stored).digest()
    frame = Frame(0, len(stored), digest, (Extent(0, PAGE_BYTES),), ())
    with pytest.raises(CorruptDataError, match="size"):
        unpack_frame(frame, stored)


def test_every_cut_of_a_boot_is_an_error_of_ours():
    info, data = packed(trace_of((3, 2)))
    boot = data[: info.boot_length]
    for end in range(len(boot)):
        with pytest.raises(CorruptDataError):
            pack_format.parse_boot(boot[:end])
    with pytest.raises(CorruptDataError):
        pack_format.parse_boot(boot + b"\0")


@given(st.data())
def test_no_damage_to_the_raw_boot_raises_anything_but_our_error(data):
    index = _sample()
    raw = bytearray(zstandard.decompress(pack_format.serialise_boot(b"m", b"t", len(DATA), index)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[len(raw) - data.draw(st.integers(0, 3)) :]
    try:
        read = pack_format.parse_boot(zstandard.compress(bytes(raw))).index()
    except CorruptDataError:
        return
    _sensible(read, len(DATA) + (1 << 63))


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_our_error(junk):
    for data in (junk, zstandard.compress(junk), zstandard.compress(pack_format.MAGIC + junk)):
        with pytest.raises(CorruptDataError):
            pack_format.parse_boot(data).index()


def _sensible(index: Index, size: int) -> None:
    for frame in index.frames:
        assert frame.stored_length > 0
        assert len(frame.digest) == 32
        assert all(e.length > 0 and e.end <= size for e in frame.extents)
        assert all(w.path < len(index.paths) for w in frame.warm)
    for path in index.paths:
        assert not {b"", b".", b".."} & set(path.split(b"/"))


# --- forged ------------------------------------------------------------------------------------


def _sample() -> Index:
    frame = Frame(0, 100, b"d" * 32, (Extent(0, 8192), Extent(40960, 4096)), (Warm(0, 0, 8192),))
    return Index((frame,), (b"usr/lib/a", b"opt/\xff"), (Extent(65536, 65536),))


def _read(index: Index, size: int = len(DATA), **limits: int) -> Index:
    boot = pack_format.parse_boot(pack_format.serialise_boot(b"", b"", size, index))
    return boot.index(limits=Limits(**limits))


def test_a_sample_comes_back():
    assert _read(_sample()) == _sample()


@pytest.mark.parametrize(
    "change",
    [
        {"paths": (b"../etc/shadow", b"b")},
        {"paths": (b"/etc/shadow", b"b")},
        {"paths": (b"a//b", b"b")},
        {"paths": (b"a\0b", b"b")},
        {"paths": (b"", b"b")},
        {"paths": (b"x" * 5000, b"b")},
        {"paths": ()},
        {"fetch": (Extent(len(DATA), 4096),)},
        {"fetch": (Extent(0, 4096), Extent(0, 4096))},
        {"fetch": (Extent(0, 0),)},
        {"fetch": (Extent(0, (1 << 64) - 1),)},
    ],
)
def test_an_index_that_lies_is_refused(change):
    with pytest.raises(CorruptDataError):
        _read(dataclasses.replace(_sample(), **change))


@pytest.mark.parametrize(
    "change",
    [
        {"extents": (Extent(len(DATA), 4096),)},
        {"extents": (Extent(0, 4096), Extent(0, 4096))},
        {"extents": (Extent(1, 4096),)},
        {"extents": (Extent(0, 4095),)},
        {"extents": (Extent(0, 0),)},
        {"extents": ()},
        {"extents": (Extent(0, 20 << 20),)},
        {"warm": (Warm(2, 0, 1),)},
        {"warm": (Warm(0, 0, 0),)},
        {"warm": (Warm(0, 1 << 63, 1),)},
        {"stored_length": 0},
        {"stored_length": 1 << 31},
    ],
)
def test_a_frame_that_lies_is_refused(change):
    frame = dataclasses.replace(_sample().frames[0], **change)
    with pytest.raises(CorruptDataError):
        _read(dataclasses.replace(_sample(), frames=(frame,)), size=max(len(DATA), 2 << 20))


@pytest.mark.parametrize("what", ["frames", "extents", "paths"])
def test_an_index_that_asks_for_more_than_is_allowed_is_refused(what):
    with pytest.raises(CorruptDataError, match="more than is allowed"):
        _read(_sample(), **{what: 0})


def test_a_boot_that_is_a_bomb_is_refused_before_it_is_unpacked():
    bomb = zstandard.compress(bytes(64 << 20))
    with pytest.raises(CorruptDataError, match="more than is allowed"):
        pack_format.parse_boot(bomb, limits=Limits(raw_boot_bytes=1 << 20))
    # A stream that does not say its size could be of any.
    open_ended = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(CorruptDataError, match="more than is allowed"):
        pack_format.parse_boot(open_ended)
    with pytest.raises(CorruptDataError, match="more than is allowed"):
        pack_format.parse_boot(bytes(100), limits=Limits(boot_bytes=99))


def test_counts_without_the_bytes_to_match_take_no_memory():
    counts = struct.pack("<IIIIII", 1 << 20, 1 << 22, 1 << 22, 1 << 20, 0xFFFFFFFF, 0)
    header = struct.pack("<8sIIQQQQ", pack_format.MAGIC, 4096, 0, 1 << 40, 0, 0, len(counts))
    boot = pack_format.parse_boot(zstandard.compress(header + counts))
    with pytest.raises(CorruptDataError, match="truncated"):
        boot.index()


def test_what_fits_no_column_is_an_error_of_ours():
    frame = dataclasses.replace(_sample().frames[0], stored_length=1 << 32)
    with pytest.raises(BootseerError):
        pack_format.serialise_index(Index((frame,), ()))
