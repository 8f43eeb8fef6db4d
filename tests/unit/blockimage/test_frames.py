"""Hot frames in memory: what a range is made of, who waits, what is let go."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blockimage.pack_format import Frame, Index
from bootseer.blockimage.serve.byte_source import Cold, Coming, Frames, Hot
from bootseer.blocks.extents import Extent

PAGE = 4096
PAGES = 64


def frame(number: int, pages: list[tuple[int, int]]) -> Frame:
    extents = tuple(Extent(first * PAGE, count * PAGE) for first, count in pages)
    return Frame(number * 1000, 1000, b"", extents, ())


def content(one: Frame) -> bytes:
    """Each page of a frame holds its own number."""
    return b"".join(
        bytes([(offset + at) // PAGE]) * PAGE
        for offset, length in one.extents
        for at in range(0, length, PAGE)
    )


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    cuts = sorted(draw(st.sets(st.integers(0, PAGES), min_size=2, max_size=16)))
    runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    runs = draw(st.permutations(runs))
    at = draw(st.integers(0, len(runs)))
    parts = [part for part in (runs[:at], runs[at:]) if part]
    return Index(tuple(frame(n, part) for n, part in enumerate(parts)), ())


@given(indexes(), st.integers(0, PAGES * PAGE - 1), st.integers(1, 9 * PAGE), st.data())
def test_pieces_are_the_range_in_order(
    index: Index, offset: int, length: int, data: st.DataObject
) -> None:
    length = min(length, PAGES * PAGE - offset)
    frames = Frames(index, memory_bytes=1 << 30)
    hot = {
        p for f in index.frames for e in f.extents for p in range(e.offset // PAGE, e.end // PAGE)
    }
    gone = set()
    for number, one in enumerate(index.frames):
        if data.draw(st.booleans()):
            frames.add_frame(number, content(one))
        else:
            frames.drop(number)
            gone |= {p for e in one.extents for p in range(e.offset // PAGE, e.end // PAGE)}
    pieces = frames.pieces(offset, length)
    assert isinstance(pieces, list)
    at = offset
    for piece in pieces:
        if isinstance(piece, Cold):
            assert piece.offset == at
            at += piece.length
            pages = range(piece.offset // PAGE, (at - 1) // PAGE + 1)
            assert all(page not in hot or page in gone for page in pages)
            continue
        for byte in piece.view:
            assert byte == at // PAGE
            at += 1
    assert at == offset + length
    assert not any(
        isinstance(a, Cold) and isinstance(b, Cold) for a, b in itertools.pairwise(pieces)
    )


def test_who_waits_is_resumed_once_whatever_becomes_of_the_frame() -> None:
    index = Index((frame(0, [(0, 2)]), frame(1, [(2, 2)])), ())
    frames = Frames(index, memory_bytes=1 << 30)
    resumed: list[int] = []
    for number in (0, 1):
        found = frames.pieces(number * 2 * PAGE, PAGE)
        assert found == Coming(number)
        assert frames.wait(number, lambda number=number: resumed.append(number))
    frames.add_frame(0, content(index.frames[0]))
    assert resumed == [0]
    frames.give_up()
    assert resumed == [0, 1]
    assert not frames.wait(1, lambda: resumed.append(9))
    assert isinstance(frames.pieces(2 * PAGE, PAGE)[0], Cold)
    assert isinstance(frames.pieces(0, PAGE)[0], Hot)


def test_a_frame_far_down_the_stream_is_not_waited_for() -> None:
    index = Index((frame(0, [(0, 1)]), frame(1, [(1, 1)]), frame(2, [(2, 1)])), ())
    frames = Frames(index, memory_bytes=1 << 30, far_bytes=2000)
    assert isinstance(frames.pieces(PAGE, PAGE), Coming)
    assert frames.pieces(2 * PAGE, PAGE) == [Cold(2 * PAGE, PAGE)]
    frames.add_frame(0, content(index.frames[0]))
    assert isinstance(frames.pieces(2 * PAGE, PAGE), Coming)


def test_memory_for_frames_is_bounded() -> None:
    index = Index(tuple(frame(n, [(n, 1)]) for n in range(4)), ())
    frames = Frames(index, memory_bytes=2 * PAGE)
    frames.add_frame(0, content(index.frames[0]))
    assert frames.has_room(0)
    frames.add_frame(1, content(index.frames[1]))
    assert not frames.has_room(0)
    frames.note_warmed(0)
    assert frames.has_room(0)
    assert frames.covers(0, 2 * PAGE)
    assert not frames.covers(3 * PAGE, 2 * PAGE)
