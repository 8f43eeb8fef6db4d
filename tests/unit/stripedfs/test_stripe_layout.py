"""Where chunks lie: the arithmetic of layout v1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.storage.local import LocalStore
from bootseer.storage.store import WriteHints
from bootseer.stripedfs.format.stripe_layout import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Layout,
    stripe_name,
    trim_width,
)
from bootseer.stripedfs.write.write_settings import WriteSettings, plan_write

CHUNK = MIN_CHUNK_BYTES


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    chunk = CHUNK * draw(st.integers(1, 5))
    width = draw(st.integers(1, 7))
    whole = draw(st.integers(0, 40)) * chunk
    size = max(0, whole + draw(st.sampled_from([-1, 0, 1, chunk // 2])))
    return Layout(size, chunk, width)


@given(layouts())
def test_every_byte_has_one_place_and_every_place_one_byte(layout: Layout) -> None:
    file, stripes = [], [[] for _ in range(layout.width)]
    for index in range(layout.chunk_count):
        place = layout.chunk_location(index)
        assert place.offset // layout.chunk_bytes * layout.width + place.stripe == index
        assert place.offset == sum(layout.chunk_length(i) for i in stripes[place.stripe])
        stripes[place.stripe].append(index)
        file.append(layout.chunk_length(index))
    assert sum(file) == layout.size_bytes
    assert all(length == layout.chunk_bytes for length in file[:-1])
    for stripe, chunks in enumerate(stripes):
        assert list(layout.stripe_chunks(stripe)) == chunks
        assert layout.stripe_length(stripe) == sum(layout.chunk_length(i) for i in chunks)
    assert sum(layout.stripe_lengths()) == layout.size_bytes


@given(st.integers(1, 1 << 60), st.integers(1, 4096))
def test_huge_sizes_are_computed_not_walked(size: int, width: int) -> None:
    layout = Layout(size, 4 << 20, width)
    assert sum(layout.stripe_lengths()) == size
    last = layout.chunk_location(layout.chunk_count - 1)
    end = last.offset + layout.chunk_length(layout.chunk_count - 1)
    assert end == layout.stripe_length(last.stripe)


def test_known_places() -> None:
    layout = Layout(10 * CHUNK + 1, CHUNK, 3)
    assert layout.chunk_location(0) == (0, 0)
    assert layout.chunk_location(7) == (1, 2 * CHUNK)
    assert layout.chunk_location(10) == (1, 3 * CHUNK)
    assert layout.stripe_lengths() == (4 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK)
    assert stripe_name(7) == "stripe-00007"


@pytest.mark.parametrize(
    ("size", "width", "used"), [(0, 6, 1), (1, 6, 1), (CHUNK + 1, 6, 2), (99 * CHUNK, 6, 6)]
)
def test_no_stripe_stays_empty(size: int, width: int, used: int) -> None:
    assert trim_width(size, CHUNK, width) == used
    lengths = Layout(size, CHUNK, used).stripe_lengths()
    assert all(lengths) or size == 0


@pytest.mark.parametrize("index", [-1, 3])
def test_there_are_no_other_chunks(index: int) -> None:
    layout = Layout(2 * CHUNK + 1, CHUNK, 2)
    with pytest.raises(IndexError):
        layout.chunk_location(index)
    with pytest.raises(IndexError):
        layout.chunk_length(index)


@pytest.mark.parametrize(
    ("size", "chunk", "width"),
    [
        (-1, CHUNK, 1),
        (1, CHUNK - 1, 1),
        (1, CHUNK + 1, 1),
        (1, 2 * MAX_CHUNK_BYTES, 1),
        (1, CHUNK, 0),
        (1, CHUNK, 4097),
    ],
)
def test_impossible_layouts(size: int, chunk: int, width: int) -> None:
    with pytest.raises(UsageError):
        Layout(size, chunk, width)


class _Placing(LocalStore):
    """A store that offers places, without the servers behind them."""

    def write_nodes(self) -> list[str]:
        return ["a:1", "b:1", "c:1"]


def _plan(**wishes: object) -> tuple[int, tuple[str, ...], list[WriteHints]]:
    settings = WriteSettings(**wishes)  # type: ignore[arg-type]
    plan = plan_write(settings, _Placing("/nowhere"), shuffle=lambda _: None)
    return plan.width, plan.places, [plan.hints(n) for n in range(4)]


def test_stripes_walk_over_the_places_at_replication_1() -> None:
    width, places, hints = _plan(replication=1)
    assert width == 6
    assert places == ("a:1", "b:1", "c:1")
    assert [h.node for h in hints] == ["a:1", "b:1", "c:1", "a:1"]
    assert {h.replication for h in hints} == {1}


@pytest.mark.parametrize(
    "wishes", [{}, {"replication": 3}, {"replication": 1, "placement": "store"}]
)
def test_the_store_places_where_steering_does_not_pay(wishes: dict[str, object]) -> None:
    assert _plan(**wishes)[1] == ()


def test_steering_can_be_asked_for() -> None:
    assert _plan(replication=3, placement="steered", width=2)[:2] == (2, ("a:1", "b:1", "c:1"))


def test_no_chunk_crosses_a_block() -> None:
    odd = _plan(chunk_bytes=12 << 20)[2][0]
    assert odd.block_bytes % (12 << 20) == 0
    assert 0 < odd.block_bytes <= 128 << 20
    assert _plan()[2][0].block_bytes == 0


@pytest.mark.parametrize(
    "wishes",
    [{"jobs": 257}, {"replication": 513}, {"tries": 0}, {"width": 5000}, {"chunk_bytes": 1}],
)
def test_impossible_wishes(wishes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        WriteSettings(**wishes)  # type: ignore[arg-type]
