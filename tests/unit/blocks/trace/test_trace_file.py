"""Traces: recorded, written, read, merged over starts, carried to another version."""

from __future__ import annotations

import json
import random
import threading

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.extents import Extent
from bootseer.blocks.trace import trace_file
from bootseer.blocks.trace.recorder import Recorder
from bootseer.blocks.trace.trace_file import FilePlace, Limits, Move, Touched, Trace
from bootseer.errors import CorruptDataError, UsageError

PAGE = 4096
PAGES = 64
SIZE = PAGES * PAGE - 100


def of(starts: int, *rows: tuple[int, int, int, int], size: int = SIZE) -> Trace:
    """A trace of (first page, pages, milliseconds, starts seen); no full start is one replayed."""
    extents = []
    for page, count, at_ms, seen in rows:
        length = min(count * PAGE, size - page * PAGE)
        counts = (seen, 0) if starts else (0, seen)
        extents.append(Touched(page * PAGE, length, at_ms, *counts))
    return Trace("object", size, "train", starts, tuple(extents), replays=0 if starts else 1)


def pages(some: Trace) -> dict[int, tuple[int, int]]:
    """Page → (milliseconds, starts seen)."""
    found: dict[int, tuple[int, int]] = {}
    for e in some.extents:
        for page in range(e.offset // PAGE, -(-(e.offset + e.length) // PAGE)):
            assert page not in found
            found[page] = (e.first_touch_ms, e.starts_seen)
    return found


@st.composite
def starts(draw: st.DrawFn, full: bool | None = None) -> Trace:
    """What one start touched: random pages at random moments."""
    count = int(draw(st.booleans()) if full is None else full)
    taken = draw(st.sets(st.integers(0, PAGES - 1), max_size=20))
    rows = [(page, 1, draw(st.integers(0, 5)) * 100, 1) for page in sorted(taken)]
    rows.sort(key=lambda row: row[2])
    return of(count, *rows)


# --- the file --------------------------------------------------------------------------------


@given(starts())
def test_a_trace_comes_back(some: Trace):
    assert trace_file.parse(trace_file.serialise(some)) == some


def packed(**changed: object) -> bytes:
    document = json.loads(
        zstandard.decompress(trace_file.serialise(of(2, (0, 1, 5, 1), (2, 3, 9, 2))))
    )
    for name, value in changed.items():
        if value is None:
            del document[name]
        else:
            document[name] = value
    return zstandard.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"extents": None},
        {"extents": 7},
        {"extents": {}},
        {"extents": [7]},
        {"extents": [[0, 4096, 0]]},
        {"extents": [[0, 4096, 0, 1, 2]]},
        {"extents": [[0, 4096, 0, 0, 0]]},
        {"extents": [[0, 4096, 0, 1, -1]]},
        {"extents": [[0, 4096, 0, 1, 1, 1]]},
        {"replays": -1},
        {"replays": "1"},
        {"extents": [[-4096, 4096, 0, 1]]},
        {"extents": [[0, 0, 0, 1]]},
        {"extents": [[0, 100, 0, 1]]},
        {"extents": [[1, 4095, 0, 1]]},
        {"extents": [[0, 1 << 40, 0, 1]]},
        {"extents": [[1 << 40, 4096, 0, 1]]},
        {"extents": [[0, 4096, -1, 1]]},
        {"extents": [[0, 4096, 0, 0]]},
        {"extents": [[0, 4096, 0, 3]]},
        {"extents": [[0, 4096, 0, True]]},
        {"extents": [[0, 4096.0, 0, 1]]},
        {"extents": [[0, "4096", 0, 1]]},
        {"extents": [[0, 8192, 0, 1], [4096, 4096, 0, 1]]},
        {"size": -1},
        {"size": "1"},
        {"page": 0},
        {"page": 3},
        {"starts": -1},
        {"starts": 1 << 40},
        {"object": 7},
        {"workload": "x" * 1000},
    ],
    ids=str,
)
def test_implausible_files_are_refused(change: dict[str, object]):
    assert trace_file.parse(packed()).starts == 2
    with pytest.raises(CorruptDataError):
        trace_file.parse(packed(**change))


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes):
    with pytest.raises(CorruptDataError):
        trace_file.parse(noise)
    with pytest.raises(CorruptDataError):
        trace_file.parse(zstandard.compress(noise))


def test_damage_bombs_and_depth_are_refused():
    whole = trace_file.serialise(of(1, (0, 1, 5, 1)))
    for length in range(len(whole)):
        with pytest.raises(CorruptDataError):
            trace_file.parse(whole[:length])
    with pytest.raises(CorruptDataError, match="more than"):
        trace_file.parse(zstandard.compress(bytes(9 << 20)), limits=Limits(raw_bytes=1 << 20))
    with pytest.raises(CorruptDataError):
        trace_file.parse(zstandard.compress(b"[" * 500_000))
    with pytest.raises(CorruptDataError):
        trace_file.parse(zstandard.compress(b'{"version":1,"size":' + b"9" * 100_000 + b"}"))
    with pytest.raises(CorruptDataError):
        trace_file.parse(whole, limits=Limits(packed_bytes=10))
    with pytest.raises(CorruptDataError):
        trace_file.parse(packed(), limits=Limits(extents=1))


# --- recording -------------------------------------------------------------------------------


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_first_touches_are_kept_in_order():
    clock = Clock()
    recorder = Recorder("object", SIZE, "train", clock=clock)
    for at_s, offset, length in [
        (0.0, 40 * PAGE + 5, 10),
        (0.1, 10 * PAGE, PAGE + 1),
        (0.2, 9 * PAGE, 4 * PAGE),  # pages 10 and 11 are known
        (0.3, 40 * PAGE, PAGE),
        (0.4, SIZE - 1, 500),
        (0.5, SIZE, 10),
        (0.5, 0, 0),
    ]:
        clock.now_s = 1000.0 + at_s
        recorder.touch(offset, length)
    found = recorder.trace(full=True)
    assert found.starts == 1
    assert [(e.offset // PAGE, e.length, round(e.first_touch_ms / 100)) for e in found.extents] == [
        (40, PAGE, 0),
        (10, 2 * PAGE, 1),
        (9, PAGE, 2),
        (12, PAGE, 2),
        (63, PAGE - 100, 4),
    ]
    assert trace_file.parse(trace_file.serialise(found)) == found


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), max_size=30))
def test_a_recorder_knows_every_page_once(touches: list[tuple[int, int]]):
    recorder = Recorder("object", 10_000, page_bytes=1)
    expected: set[int] = set()
    for offset, length in touches:
        recorder.touch(offset, length)
        expected |= set(range(offset, min(offset + length, 10_000)))
    extents = recorder.trace(full=True).extents
    found = [n for e in extents for n in range(e.offset, e.offset + e.length)]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_recording_ends_with_its_window_with_end_and_with_its_limit():
    clock = Clock()
    recorder = Recorder("object", SIZE, window_s=120.0, clock=clock)
    recorder.touch(0, 1)
    clock.now_s += 121
    recorder.touch(PAGE, 1)
    assert not recorder.recording
    assert list(pages(recorder.trace(full=True))) == [0]

    recorder = Recorder("object", SIZE, window_s=120.0, clock=clock)
    clock.now_s += 130  # nobody came yet
    recorder.touch(0, 1)
    clock.now_s += 120
    assert recorder.left_s() == 0
    recorder.touch(2 * PAGE, 1)
    clock.now_s += 1
    recorder.touch(4 * PAGE, 1)
    assert list(pages(recorder.trace(full=True))) == [0, 2]

    recorder = Recorder("object", SIZE)
    recorder.touch(0, 1)
    recorder.end()
    recorder.touch(PAGE, 1)
    assert list(pages(recorder.trace(full=True))) == [0]

    recorder = Recorder("object", SIZE, most_extents=2)
    for page in (0, 2, 4, 6):
        recorder.touch(page * PAGE, 1)
    assert list(pages(recorder.trace(full=True))) == [0, 2]


def test_a_trace_is_in_the_order_that_merging_keeps():
    """Threads take the time first and note it then, so one may be overtaken."""
    clock = Clock()
    recorder = Recorder("object", SIZE, clock=clock)
    for at_ms, page in ((5, 40), (2, 30), (9, 8), (9, 3)):
        clock.now_s = 1000.0 + at_ms / 1000
        recorder.touch(page * PAGE, 1)
    found = recorder.trace(full=True)
    assert [e.offset // PAGE for e in found.extents] == [30, 40, 3, 8]
    assert trace_file.merge([found]) == found


def test_threads_record_together():
    recorder = Recorder("object", SIZE)
    order = list(range(PAGES))

    def read(seed: int) -> None:
        mine = order.copy()
        random.Random(seed).shuffle(mine)
        for page in mine:
            recorder.touch(page * PAGE, PAGE)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pages(recorder.trace(full=True))) == order


# --- merging ---------------------------------------------------------------------------------


@given(st.lists(starts(), min_size=1, max_size=6))
def test_merging_is_the_union_with_counts(some: list[Trace]):
    merged = trace_file.merge(some)
    full = sum(t.starts for t in some)
    assert merged.starts == full
    counts: dict[int, list[int]] = {}
    for one in some:
        for page in pages(one):
            counts.setdefault(page, [0, 0])[0 if one.starts else 1] += 1
    assert merged.replays == len(some) - full
    assert {page: list(seen) for page, seen in told(merged).items()} == counts
    assert trace_file.parse(trace_file.serialise(merged)) == merged
    times = [e.first_touch_ms for e in merged.extents]
    assert times == sorted(times)


def told(some: Trace) -> dict[int, tuple[int, int]]:
    """Page → (full starts, others)."""
    found = {}
    for e in some.extents:
        for page in range(e.offset // PAGE, -(-(e.offset + e.length) // PAGE)):
            found[page] = (e.starts_seen, e.replays_seen)
    return found


@given(st.lists(starts(full=True), min_size=1, max_size=4), st.lists(starts(full=False)))
def test_partial_starts_never_lower_a_share_nor_change_the_order(
    full: list[Trace], partial: list[Trace]
):
    before, after = trace_file.merge(full), trace_file.merge([*full, *partial])
    assert after.starts == before.starts
    known, found = pages(before), pages(after)
    for page, (at_ms, seen) in known.items():
        assert found[page][1] >= seen
        assert abs(found[page][0] - at_ms) <= trace_file.NEAR_MS
    assert set(pages(before.select_hot(0.5))) <= set(pages(after.select_hot(0.5)))


def test_what_no_full_start_touched_gets_hot_by_half_of_the_others_and_two_at_least():
    some = trace_file.merge([of(1, (0, 4, 0, 1)), of(0, (9, 1, 5, 1))])
    assert set(pages(some.select_hot(0.5))) == {0, 1, 2, 3}  # one start may touch anything
    some = trace_file.merge([some, of(0, (9, 1, 5, 1), (2, 1, 0, 1))])
    assert set(pages(some.select_hot(0.5))) == {0, 1, 2, 3, 9}
    for number in range(20):
        some = trace_file.merge([some, of(0, (20 + number, 1, 5, 1))])
    assert (some.starts, some.replays) == (1, 22)
    assert set(pages(some.select_hot(0.5))) == {0, 1, 2, 3}
    assert set(pages(some.select_hot(0.0))) == {0, 1, 2, 3, 9, *range(20, 40)}
    again = trace_file.parse(trace_file.serialise(some))
    assert again == some


def test_a_trace_of_no_full_start_is_as_good_as_what_it_has():
    some = trace_file.merge([of(0, (1, 2, 0, 1))])
    assert set(pages(some.select_hot(0.5))) == {1, 2}
    assert told(some) == {1: (0, 1), 2: (0, 1)}


def test_files_that_count_no_replays_are_read_still():
    rows = [[0, PAGE, 5, 1]]
    document = json.loads(zstandard.decompress(packed(starts=0, extents=rows)))
    del document["replays"]
    old = trace_file.parse(zstandard.compress(json.dumps(document).encode()))
    assert (old.starts, old.replays, told(old)) == (0, 1, {0: (0, 1)})


@given(st.lists(starts(), min_size=1, max_size=4), st.lists(starts(), min_size=1, max_size=4))
def test_what_was_merged_in_can_be_taken_out_again(some: list[Trace], more: list[Trace]):
    before, since = trace_file.merge(some), trace_file.merge(more)
    both = trace_file.merge([before, since])
    assert trace_file.covers(both, before)
    assert trace_file.covers(both, since)
    left = trace_file.without(both, before)
    assert (left.starts, left.replays) == (since.starts, since.replays)
    assert told(left) == told(since)
    assert not trace_file.without(before, both).extents
    assert not trace_file.covers(before, both)


def test_twenty_warm_starts_leave_the_hot_set_as_it_was():
    cold = trace_file.merge([of(1, (0, 4, 0, 1), (10, 2, 50, 1), (5, 1, 90, 1))] * 5)
    warm = [of(0, (10, 1, 3, 1)), of(0), of(0, (5, 1, 1, 1), (0, 4, 2, 1))]
    merged = cold
    for number in range(20):
        merged = trace_file.merge([merged, warm[number % 3]])
    assert pages(merged.select_hot(0.5)) == pages(cold.select_hot(0.5))


def test_the_share_drops_what_few_starts_touched_and_the_median_orders():
    merged = trace_file.merge(
        [
            of(1, (0, 1, 900, 1), (1, 1, 100, 1)),
            of(1, (0, 1, 100, 1), (1, 1, 300, 1)),
            of(1, (0, 1, 200, 1), (1, 1, 300, 1), (9, 1, 0, 1)),
        ],
        share=0.5,
    )
    assert pages(merged) == {0: (200, 3), 1: (300, 3)}


def test_merging_at_once_or_step_by_step_gives_the_same_counts():
    some = [of(1, (n, 3, 100, 1)) for n in range(6)]
    at_once, steps = trace_file.merge(some), some[0]
    for one in some[1:]:
        steps = trace_file.merge([steps, one])
    assert pages(at_once) == pages(steps)


def test_other_objects_are_not_merged():
    with pytest.raises(UsageError):
        trace_file.merge([])
    with pytest.raises(UsageError):
        trace_file.merge([of(1), of(1, size=SIZE + 1)])


def test_a_count_of_a_million_starts_costs_nothing():
    some = of(1 << 20, (0, PAGES, 5, 1 << 20))
    assert pages(trace_file.merge([some, some]))[0] == (5, 1 << 21)


# --- carrying over ---------------------------------------------------------------------------


def test_what_moved_is_found_where_it_lies_now():
    old = {
        "lib/a": FilePlace("A", (Extent(0, 3 * PAGE), Extent(10 * PAGE, PAGE))),
        "lib/b": FilePlace("B", (Extent(20 * PAGE, 2 * PAGE),)),
        "lib/c": FilePlace("C", (Extent(30 * PAGE, 2 * PAGE),)),
    }
    new = {
        "lib/a": FilePlace("A", (Extent(5 * PAGE, PAGE), Extent(40 * PAGE, 3 * PAGE))),
        "lib/b": FilePlace("changed", (Extent(0, 2 * PAGE),)),
        "elsewhere/c": FilePlace("C", (Extent(50 * PAGE, 2 * PAGE),)),
        "new": FilePlace("N", (Extent(60 * PAGE, PAGE),)),
    }
    some = of(4, (0, 1, 7, 4), (2, 1, 9, 3), (10, 1, 5, 2), (20, 1, 1, 4), (31, 1, 20, 1))
    found = trace_file.carry_over(some, trace_file.moves(old, new), "new object", SIZE)
    assert (found.object, found.starts, found.workload) == ("new object", 4, "train")
    assert pages(found) == {5: (7, 4), 41: (9, 3), 42: (5, 2), 51: (20, 1)}
    assert trace_file.parse(trace_file.serialise(found)) == found


@given(
    starts(full=True),
    st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), st.integers(1, 9 * PAGE)),
        max_size=8,
    ),
)
def test_carrying_over_finds_exactly_the_pages_that_moved(
    some: Trace, chosen: list[tuple[int, int, int]]
):
    moved = [Move(o, n, min(length, SIZE - o, SIZE - n)) for o, n, length in chosen]
    found = trace_file.carry_over(some, moved, "new", SIZE)
    touched = {b for e in some.extents for b in range(e.offset, e.offset + e.length, 1)}
    expected = {
        (m.new + b - m.old) // PAGE
        for m in moved
        for b in range(m.old, m.old + m.length)
        if b in touched
    }
    assert set(pages(found)) == expected
    assert trace_file.parse(trace_file.serialise(found)) == found
