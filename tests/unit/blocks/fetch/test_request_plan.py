"""Requests bring every wanted block once, and keep to ranges, stretches and turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch.planner import PlannedRequest, plan, request_bytes
from bootseer.blocks.fetch.records import Piece

MIB = 1 << 20


@st.composite
def layouts(draw: st.DrawFn) -> list[Piece]:
    """Blocks spread over parts, each part filled without gaps; some of them wanted."""
    parts = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=60))
    ends = [0] * parts
    pieces = []
    for block, length in enumerate(lengths):
        part = draw(st.integers(0, parts - 1))
        pieces.append(Piece(block, f"p{part}", ends[part], length))
        ends[part] += length
    wanted = draw(st.sets(st.sampled_from(range(len(pieces)))))
    chosen = [pieces[number] for number in wanted]
    return draw(st.permutations(chosen))


@given(layouts(), st.integers(1, 200), st.integers(1, 8), st.integers(0, 150))
def test_every_piece_once_in_requests_that_may_be_sent(
    pieces: list[Piece], range_bytes: int, streams: int, stretch: int
) -> None:
    def ends(part: str, offset: int) -> int:
        return (offset // stretch + 1) * stretch

    requests = plan(
        pieces, range_bytes=range_bytes, streams=streams, ends_stretch=ends if stretch else None
    )
    assert sorted(p for r in requests for p in r.pieces) == sorted(pieces)
    for request in requests:
        end = request.offset
        for piece in request.pieces:
            assert (piece.part, piece.offset) == (request.part, end)
            end += piece.length
        assert request.length == end - request.offset
        assert request.length <= range_bytes or len(request.pieces) == 1
        if stretch:
            assert request.pieces[-1].offset < ends(request.part, request.offset)


@given(layouts(), st.integers(1, 200))
def test_neighbours_are_merged_as_far_as_ranges_allow(
    pieces: list[Piece], range_bytes: int
) -> None:
    requests = plan(pieces, range_bytes=range_bytes)
    by_start = {(r.part, r.offset): r for r in requests}
    starts = [
        r
        for r in requests
        if not any((o.part, o.offset + o.length) == (r.part, r.offset) for o in requests)
    ]
    for request in starts:
        run = [request]
        while following := by_start.get((run[-1].part, run[-1].offset + run[-1].length)):
            run.append(following)
        total = sum(r.length for r in run)
        longest = max(p.length for r in run for p in r.pieces)
        assert len(run) <= -(-total // max(1, range_bytes - longest)) or longest * 2 > range_bytes


@given(st.integers(1, 300), st.integers(1, 40))
def test_equal_blocks_make_requests_of_equal_size(count: int, most: int) -> None:
    requests = plan([Piece(n, "p", 4 * n, 4) for n in range(count)], range_bytes=4 * most)
    sizes = [len(request.pieces) for request in requests]
    assert len(sizes) == -(-count // most)
    assert max(sizes) - min(sizes) <= 1


def test_requests_follow_the_position_of_their_first_block() -> None:
    pieces = [Piece(n, "p", 10 * n, 10) for n in range(99)]
    requests = plan(reversed(pieces), range_bytes=30)
    assert [r.pieces[0].block for r in requests] == list(range(0, 99, 3))


def test_stripes_are_read_side_by_side() -> None:
    """Chunk i lies in stripe i mod 3: the first three requests go to three stripes."""
    pieces = [Piece(n, f"s{n % 3}", n // 3 * 4, 4) for n in range(24)]
    requests = plan(pieces, range_bytes=16, streams=3)
    assert [r.part for r in requests] == ["s0", "s1", "s2"] * 2
    assert requests[0].pieces == tuple(pieces[0:12:3])


def test_stretches_take_turns_within_the_next_rounds() -> None:
    """A plain file of 4 stretches, each on a server of its own: two streams start on two."""
    pieces = [Piece(n, "f", n, 1) for n in range(16)]
    requests = plan(
        pieces, range_bytes=1, streams=4, ends_stretch=lambda part, offset: (offset // 4 + 1) * 4
    )
    first_round = [r.offset // 4 for r in requests[:8]]
    assert first_round == [0, 1] * 4
    assert {r.offset for r in requests[:8]} == set(range(8))  # nothing from afar overtakes


@given(
    st.integers(1, 1 << 40), st.integers(1, 64), st.integers(1, 128 * MIB), st.integers(1, 8 * MIB)
)
def test_request_sizes_are_whole_pieces_within_bounds(
    total: int, streams: int, range_bytes: int, piece: int
) -> None:
    size = request_bytes(total, streams=streams, range_bytes=range_bytes, piece_bytes=piece)
    assert size % piece == 0
    assert piece <= size <= max(piece, range_bytes)


def test_request_sizes_leave_no_stream_idle() -> None:
    def size(total: int, piece: int = 1) -> int:
        return request_bytes(total, streams=24, range_bytes=8 * MIB, piece_bytes=piece)

    assert size(1 << 30, 4 * MIB) == 8 * MIB
    assert size(24 * 4 * MIB, 4 * MIB) == 4 * MIB  # one round of 24, not 12 of twice the size
    assert size(48 * MIB) == 2 * MIB
    assert size(1 * MIB) == 1 * MIB  # cutting that up would cost more latency than it saves


def test_a_request_knows_its_range() -> None:
    request = PlannedRequest((Piece(7, "p", 100, 10), Piece(9, "p", 110, 5)))
    assert (request.part, request.offset, request.length) == ("p", 100, 15)
