"""A writer's spans by columns: the same as its records, in this process and in another."""

from __future__ import annotations

import marshal
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from bootseer.profiler.report.load.clock_skew import find_passages, is_barrier
from bootseer.profiler.report.load.columns import Spans, columns_of, extent_of
from bootseer.profiler.report.load.spans import Span

MOMENTS = st.integers(-(1 << 64), 1 << 64) | st.integers(0, 9)
TEXTS = st.sampled_from(["queue", "rendezvous", "barrier", "deps.install", "é", ""])
IDS = st.none() | st.text(max_size=3) | st.sampled_from(["0" * 16, "1" * 16])
TIMES = st.tuples(MOMENTS, MOMENTS) | st.tuples(st.none(), MOMENTS) | st.tuples(MOMENTS, st.none())
ATTRIBUTES = st.none() | st.just({"bootseer.bytes": 7})


@st.composite
def spans(draw: st.DrawFn) -> Span:
    begin_ns, end_ns = draw(TIMES)
    return Span(
        draw(TEXTS),
        begin_ns,
        end_ns,
        draw(st.booleans()),
        draw(st.sampled_from(["ok", "error"])),
        draw(st.booleans()),
        draw(IDS),
        draw(IDS),
        draw(ATTRIBUTES),
    )


ROWS = st.lists(spans(), max_size=6).map(tuple)


@given(ROWS)
def test_columns_are_the_records(rows: tuple[Span, ...]) -> None:
    columns = columns_of(rows)
    assert columns == rows
    assert repr(columns) == repr(rows)
    assert len(columns) == len(rows)
    assert [columns[place] for place in range(len(rows))] == list(rows)
    assert columns[1:] == rows[1:]
    assert columns != (*rows, Span("x", 0, 0, False, "ok", False, None, None, None))
    assert columns_of(columns) is columns
    assert Spans.from_plain(marshal.loads(marshal.dumps(columns.to_plain()))) == rows


@given(ROWS.filter(bool))
def test_the_extent_is_that_of_all_known_moments(rows: tuple[Span, ...]) -> None:
    known = [m for span in rows for m in (span.begin_ns, span.end_ns) if m is not None]
    assert extent_of(columns_of(rows)) == extent_of(rows) == (min(known), max(known))


@given(ROWS)
def test_barriers_are_numbered_in_time_order(rows: tuple[Span, ...]) -> None:
    def moment(span: Span) -> int:
        return (span.end_ns if span.begin_ns is None else span.begin_ns) or 0

    waits = sorted([span for span in rows if is_barrier(span.name, span.wait)], key=moment)
    expected = []
    for place, span in enumerate(waits):
        before = [each.name for each in waits[:place]]
        key = (span.name, before.count(span.name))
        expected.append((key, span.begin_ns, span.end_ns, span.status))
    assert find_passages(rows) == expected


def test_equal_forms_are_one_object() -> None:
    made = [
        columns_of([Span("job", n, n + 1, False, "ok", False, None, None, None)]) for n in (1, 2)
    ]
    assert len(list(groupby(made, key=lambda columns: id(columns.form)))) == 1
