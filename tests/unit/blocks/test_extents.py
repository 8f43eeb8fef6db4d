"""Sets of ranges, compared with sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import extents as extent
from bootseer.blocks.extents import Extent

SPAN = 60
EXTENTS = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, 12)), max_size=12)


def numbers(extents: list[tuple[int, int]]) -> set[int]:
    return {n for offset, length in extents for n in range(offset, offset + length)}


def is_set(extents: list[Extent]) -> bool:
    return all(e.length > 0 for e in extents) and all(
        a.end < b.offset for a, b in itertools.pairwise(extents)
    )


@given(EXTENTS)
def test_union(some: list[tuple[int, int]]):
    found = extent.union(some)
    assert is_set(found)
    assert numbers(found) == numbers(some)
    assert extent.covered_bytes(some) == len(numbers(some))


@given(EXTENTS, EXTENTS)
def test_subtract(some: list[tuple[int, int]], others: list[tuple[int, int]]):
    rest = extent.subtract(some, others)
    assert is_set(rest)
    assert numbers(rest) == numbers(some) - numbers(others)


@given(EXTENTS, st.integers(0, SPAN), st.integers(1, 9))
def test_aligned(some: list[tuple[int, int]], size: int, grain: int):
    found = extent.align(some, size, grain)
    touched = {n // grain for n in numbers(some) if n < size // grain * grain + grain}
    wanted = {n for t in touched for n in range(t * grain, (t + 1) * grain) if n < size}
    assert is_set(found)
    assert numbers(found) >= {n for n in numbers(some) if n < size}
    assert numbers(found) <= wanted
    assert all(e.offset % grain == 0 and (e.end % grain == 0 or e.end == size) for e in found)


def test_an_extent_knows_its_end():
    assert Extent(3, 4).end == 7
