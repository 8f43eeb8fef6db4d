"""What a stage's sums are by columns is what they are part by part."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.profiler.report import stages
from bootseer.profiler.report.lanes import Lane
from bootseer.profiler.report.overlap import Part

_NAMES = st.sampled_from(["imports", "deps.install", "deps.install.unpack", "compile", "job"])
_PARTS = st.lists(st.tuples(_NAMES, st.booleans(), st.integers(0, 2), st.integers(1, 3)))
_TOPS = {"deps.install.unpack": "deps.install"}


def lane_of(parts: list[tuple[str, bool, int, int]]) -> Lane:
    """A lane of parts, each so long after the one before it, and of such a length."""
    times = array("d")
    now_s = 0.0
    for _, _, gap, length in parts:
        times.extend((now_s + gap / 7, now_s + gap / 7 + length / 3))
        now_s = times[-1]
    course = tuple(Part(name, wait, False) for name, wait, *_ in parts)
    return Lane("node", 0, 0, True, -0.5, now_s + 0.25, True, course, times, (), ())


@given(_PARTS, st.data())
def test_sums_by_columns_are_those_part_by_part(
    parts: list[tuple[str, bool, int, int]], data: st.DataObject
) -> None:
    lane = lane_of(parts)
    tops = {part.name: _TOPS.get(part.name, part.name) for part in lane.parts}
    moments = st.sampled_from([*lane.times, lane.begin_s, lane.end_s, 0.1, 1.7, lane.end_s + 1])
    plans: stages._Plans = {}
    for place in range(len(parts) + 1):
        stage = lane, place, data.draw(moments), data.draw(moments), data.draw(moments), tops
        own, gap_s, after = stages._sum_parts(*stage)
        found = stages._sum_columns(*stage, plans)
        if found is not None:
            assert list(found[0].items()) == list(own.items())
            assert found[1:] == (pytest.approx(gap_s, abs=1e-12), after)


def test_parts_between_two_barriers_are_summed_by_columns() -> None:
    lane = lane_of([("imports", False, 0, 1), ("compile", False, 1, 2), ("rendezvous", True, 1, 3)])
    tops = {part.name: part.name for part in lane.parts}
    arrival_s = lane.times[4]
    found = stages._sum_columns(lane, 0, float("-inf"), 0.0, arrival_s, tops, {})
    assert found is not None
    assert found == stages._sum_parts(lane, 0, float("-inf"), 0.0, arrival_s, tops)
    assert list(found[0]) == ["imports", "compile"]
    assert found[2] == 2
