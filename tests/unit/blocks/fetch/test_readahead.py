"""Reads that go on are fetched ahead, random ones are not, and all handles share one budget."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch.readahead import ReadAhead, Share, Span

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TOTAL = 256 * MIB


def follow(ahead: ReadAhead, reads: list[Span]) -> list[Span]:
    return [span for offset, length in reads for span in ahead.note(offset, length)]


def forward(start: int, count: int, length: int = MIB) -> list[Span]:
    return [(start + n * length, length) for n in range(count)]


def test_a_forward_reader_is_soon_far_ahead() -> None:
    ahead = ReadAhead(4 * GIB, Share(TOTAL), block_bytes=4 * MIB)
    spans = follow(ahead, forward(0, 64))
    assert spans[0][0] <= 4 * MIB
    for (start, length), (following, _) in itertools.pairwise(spans):
        assert start + length == following  # without gaps, nothing twice
        assert following % (4 * MIB) == 0
    end = spans[-1][0] + spans[-1][1]
    assert end - 64 * MIB >= 64 * MIB
    assert end - 64 * MIB <= TOTAL + 4 * MIB


def test_the_end_of_the_object_is_the_end() -> None:
    ahead = ReadAhead(10 * MIB + 7, Share(TOTAL), block_bytes=4 * MIB)
    spans = follow(ahead, [*forward(0, 10), (10 * MIB, MIB), (11 * MIB, MIB)])
    assert spans[-1][0] + spans[-1][1] == 10 * MIB + 7


def test_random_small_reads_fetch_nothing_ahead() -> None:
    chance = random.Random(1)
    ahead = ReadAhead(GIB, Share(TOTAL), block_bytes=256 * KIB)
    reads = [(chance.randrange(GIB // 4096) * 4096, 4096) for _ in range(5000)]
    assert sum(length for _, length in follow(ahead, reads)) <= 4 * MIB


def test_small_sequential_reads_begin_with_little() -> None:
    ahead = ReadAhead(GIB, Share(TOTAL), block_bytes=4096)
    (span,) = follow(ahead, forward(0, 2, 4096))
    assert span[1] <= 256 * KIB


def test_head_and_tail_visits_do_not_end_a_stream() -> None:
    """Items one after the other; of each the tail is read, then the head, then all of it."""
    ahead = ReadAhead(4 * GIB, Share(TOTAL), block_bytes=4 * MIB)
    fetched: list[Span] = []
    item = 24 * MIB
    for number in range(12):
        start = number * item
        visits = [(start + item - 4096, 4096), (start, 4096), (start + item - 64 * KIB, 4096)]
        fetched += follow(ahead, [*visits, *forward(start, 24)])
    covered = sum(length for _, length in fetched)
    read_to = 12 * item
    inside = sum(max(0, min(read_to, s + n) - s) for s, n in fetched)
    assert inside >= 0.8 * read_to  # most of it was on its way before it was read
    assert covered <= read_to + 2 * TOTAL
    assert inside <= 1.3 * read_to


def test_several_streams_are_followed_at_once() -> None:
    ahead = ReadAhead(16 * GIB, Share(TOTAL), block_bytes=MIB)
    streams = [forward(n * 4 * GIB, 32) for n in range(4)]
    spans = follow(ahead, [read for turn in zip(*streams, strict=True) for read in turn])
    for number in range(4):
        own = [s for s in spans if s[0] // (4 * GIB) == number]
        assert own[-1][0] + own[-1][1] - number * 4 * GIB >= 64 * MIB
        far = own[-1][0] + own[-1][1] - number * 4 * GIB - 32 * MIB
        assert far <= TOTAL // 4 + 2 * MIB


def test_a_stream_outlives_a_storm_of_random_reads() -> None:
    chance = random.Random(2)
    ahead = ReadAhead(64 * GIB, Share(TOTAL), block_bytes=MIB)
    spans = follow(ahead, forward(0, 16))
    for position in range(16, 32):
        follow(ahead, [(chance.randrange(60 * GIB), 4096) for _ in range(12)])
        spans += follow(ahead, [(position * MIB, MIB)])
    assert spans[-1][0] + spans[-1][1] > 64 * MIB


def test_reads_slightly_out_of_order_are_one_stream() -> None:
    reads = forward(0, 64, 128 * KIB)
    shuffled = [reads[n ^ 1] for n in range(64)]
    ahead = ReadAhead(GIB, Share(TOTAL), block_bytes=256 * KIB)
    spans = follow(ahead, shuffled)
    assert spans[-1][0] + spans[-1][1] >= 16 * MIB


def test_handles_share_and_give_back() -> None:
    share = Share(TOTAL)
    handles = [ReadAhead(4 * GIB, share) for _ in range(8)]
    for handle in handles:
        follow(handle, forward(0, 2))
    assert share.each_bytes == TOTAL // 8
    spans = follow(handles[0], forward(2 * MIB, 200))
    assert spans[-1][0] + spans[-1][1] - 202 * MIB <= TOTAL // 8
    for handle in handles:
        handle.close()
        handle.close()
    assert share.each_bytes == TOTAL


@given(st.lists(st.tuples(st.integers(-5, 200), st.integers(0, 60))), st.integers(1, 16))
def test_whatever_is_read_spans_stay_inside_and_whole(reads: list[Span], block: int) -> None:
    ahead = ReadAhead(173, Share(100), block_bytes=block)
    for start, length in follow(ahead, reads):
        assert 0 <= start < start + length <= 173
        assert start % block == 0
        assert (start + length) % block == 0 or start + length == 173
    ahead.close()


def test_a_long_first_read_at_the_head_reads_ahead_at_once() -> None:
    ahead = ReadAhead(1 << 30, Share(256 * MIB))
    [(begin, length)] = ahead.note(0, 16 * MIB)
    assert begin == 16 * MIB
    assert length >= 32 * MIB
    assert ahead.note(0, 16 * MIB) == []  # again: it is on its way
    [(begin, length)] = ReadAhead(1 << 30, Share(256 * MIB)).note(0, MIB)  # dd's and many others'
    assert begin == MIB
    assert 2 * MIB <= length <= 4 * MIB
    for offset, size in ((0, MIB - 1), (64 * MIB, 16 * MIB)):
        assert ReadAhead(1 << 30, Share(256 * MIB)).note(offset, size) == []
