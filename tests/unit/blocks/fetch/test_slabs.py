"""Memory for blocks: never two owners, never above the budget, used again."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch.slabs import (
    PAGE_BYTES,
    Pool,
    Slot,
    address_of,
    copy,
    looks_warm,
    slot_bytes,
)

MIB = 1 << 20


@given(st.integers(0, 1 << 34))
def test_slots_are_whole_pages_and_waste_little(size: int) -> None:
    slot = slot_bytes(size)
    assert slot >= size
    assert slot % PAGE_BYTES == 0
    assert slot - max(size, PAGE_BYTES) < max(PAGE_BYTES, size / 4 + 1)
    assert slot_bytes(slot) == slot


def overlaps(slots: list[Slot]) -> bool:
    spans = sorted((address_of(s.view), address_of(s.view) + s.size_bytes) for s in slots)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


@given(
    st.lists(st.tuples(st.sampled_from([1, 4096, 100_000, 300_000, 2 * MIB]), st.booleans())),
    st.integers(1, 8),
)
def test_slots_never_overlap_nor_pass_the_budget(
    steps: list[tuple[int, bool]], budget_mib: int
) -> None:
    pool, held = Pool(budget_mib * MIB), []
    for size, give_back in steps:
        if give_back and held:
            pool.give(held.pop(size % len(held)))
            continue
        slot = pool.take(size)
        if slot is None:
            assert pool.mapped_bytes + slot_bytes(size) > pool.budget_bytes
            continue
        assert len(slot.view) == slot.size_bytes >= size
        assert address_of(slot.view) % PAGE_BYTES == 0
        held.append(slot)
        assert pool.mapped_bytes <= pool.budget_bytes
        assert pool.used_bytes == sum(s.size_bytes for s in held)
    assert not overlaps(held)
    for slot in held:
        pool.give(slot)
    pool.clear()
    assert (pool.used_bytes, pool.mapped_bytes) == (0, 0)


def test_memory_is_used_again() -> None:
    pool = Pool(64 * MIB)
    slot = pool.take(MIB)
    assert slot is not None
    address = address_of(slot.view)
    pool.give(slot)
    again = pool.take(MIB)
    assert again is not None
    assert address_of(again.view) == address
    assert looks_warm(again.view)


def test_an_empty_slab_of_another_size_makes_room() -> None:
    pool = Pool(4 * MIB)
    small = [pool.take(64 << 10) for _ in range(64)]
    assert None not in small
    assert pool.take(4 * MIB) is None
    for slot in small:
        assert slot is not None
        pool.give(slot)
    assert pool.take(4 * MIB) is not None
    assert pool.mapped_bytes == 4 * MIB


def test_a_view_outlives_its_slab() -> None:
    """Whoever still looks at memory that the pool let go sees it unchanged."""
    pool = Pool(4 * MIB)
    slot = pool.take(MIB)
    assert slot is not None
    view = slot.view[:5]
    view[:] = b"hello"
    pool.give(slot)
    del slot
    pool.clear()
    assert pool.mapped_bytes == 0
    assert bytes(view) == b"hello"


def test_what_goes_beyond_the_budget_is_given_back() -> None:
    pool = Pool(2 * MIB)
    assert pool.take(2 * MIB) is not None
    extra = pool.take(MIB, beyond=True)
    assert extra is not None
    assert pool.mapped_bytes == 3 * MIB
    pool.give(extra)
    assert pool.mapped_bytes == 2 * MIB


@pytest.mark.parametrize("size", [0, 1, 4096, 32 << 10, (32 << 10) + 1, 3 * MIB + 7])
def test_copies_are_exact(size: int) -> None:
    data = random.Random(size).randbytes(size)
    target = bytearray(size + 2)
    copy(memoryview(target)[1 : size + 1], memoryview(bytearray(data)))
    assert target == b"\0" + data + b"\0"


def test_copies_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy"):
        copy(memoryview(bytearray(2 * MIB)), memoryview(bytearray(MIB)))
