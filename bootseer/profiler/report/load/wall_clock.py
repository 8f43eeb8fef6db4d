"""Long silences that a wall clock alone measured (pure).

A clock that is set forward in the middle of a start makes a phase longer, by an hour as easily as
by a second. Writers with a monotonic clock are not misled. What logs, cluster records, shells and
others' writers tell is by the wall clock alone, and a step of it looks like a phase in which
nothing else happened anywhere. So where nothing was seen of a start for half an hour or more while
such a writer says that it worked, and no monotonic clock of any process counted that time, the
report says that it may be none. Where anybody says that it waited all that time, the start did.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Start
from bootseer.profiler.report.model import Problem
from bootseer.profiler.report.overlap import WHOLE

KIND = "wall-clock-alone"
_PULL = "k8s.image.wait_included"
"""What `import k8s` writes on a pull whose message said how long it took (kubernetes/kubernetes,
pkg/kubelet/images/image_manager.go and puller.go, time.Since)."""
LEAST_NS = 1800 * 10**9
"""A silence of less is usual in a start: a compiler's, a checkpoint's."""


def find_unconfirmed(
    start: Start, shifts: Sequence[int], zero_ns: int, end_ns: int
) -> tuple[Problem, ...]:
    """A line for each long silence up to the start's end that nothing but wall clocks measured.

    `shifts` brings each source's times to one wall clock, on which the start lasts from `zero_ns`
    to `end_ns`.
    """
    if end_ns - zero_ns < LEAST_NS:
        return ()
    silences = _find_silences(start, shifts, end_ns)
    if not silences:
        return ()
    times = [_times(s, shift) for s, shift in zip(start.sources, shifts, strict=True)]
    out = []
    for low_ns, high_ns in silences:
        across = [
            (source, shift)
            for source, shift, each in zip(start.sources, shifts, times, strict=True)
            if each and min(each) <= low_ns and max(each) >= high_ns
        ]
        if any(source.offset_ns for source, _ in across):  # its monotonic clock counted the time
            continue
        worked = [
            (phase, source)
            for source, shift in across
            if (phase := _phase_within(source, low_ns - shift, high_ns - shift)) is not None
        ]
        if worked and len(worked) == len(across):  # else somebody knows what it was
            phase, source = max(worked, key=lambda each: each[0] != "")
            out.append(_problem(source, phase, low_ns - zero_ns, high_ns - low_ns))
    return tuple(out)


def _find_silences(start: Start, shifts: Sequence[int], end_ns: int) -> list[tuple[int, int]]:
    """Between which two moments nothing was seen for `LEAST_NS` or more.

    Moments are grouped by the half hour (`LEAST_NS`) in which they lie. Within one no silence has
    room, so its first and last moment are all that counts: a large start has millions to sort.
    """
    lows: dict[int, int] = {}
    highs: dict[int, int] = {}
    for source, shift in zip(start.sources, shifts, strict=True):
        moments = columns_of(source.spans).moments
        ordered = sorted([moment for moment in moments if moment is not None])
        stop, place = bisect_right(ordered, end_ns - shift), 0
        while place < stop:
            number = (ordered[place] + shift) // LEAST_NS
            behind = bisect_left(ordered, (number + 1) * LEAST_NS - shift, place, stop)
            low, high = ordered[place] + shift, ordered[behind - 1] + shift
            lows[number] = min(low, lows.get(number, low))
            highs[number] = max(high, highs.get(number, high))
            place = behind
    return [
        (highs[before], lows[after])
        for before, after in pairwise(sorted(lows))
        if lows[after] - highs[before] >= LEAST_NS
    ]


def _times(source: Source, shift: int) -> list[int]:
    return [moment + shift for span in source.spans for moment in span[1:3] if moment is not None]


def _phase_within(source: Source, low_ns: int, high_ns: int) -> str | None:
    """What a source says that it did all that time, "" for nothing; None where it waited, or
    pulled an image, whose time kubelet takes by a monotonic clock and states."""
    spans = [
        span
        for span in source.spans
        if span.begin_ns is not None and span.begin_ns <= low_ns
        if span.end_ns is not None and span.end_ns >= high_ns
    ]
    if any(span.wait or _PULL in (span.attributes or {}) for span in spans):
        return None
    inner = max(spans, key=lambda span: (span.begin_ns or 0, span.name != WHOLE), default=None)
    return "" if inner is None else inner.name


def _problem(source: Source, phase: str, begin_ns: int, length_ns: int) -> Problem:
    who = source.identity
    rank = f"rank {who.rank} on " if who.rank is not None else ""
    what = f"in {phase}" if phase else "between two phases"
    detail = (
        f"{length_ns / 1e9:,.0f} s of {rank}{who.node} {what}, from {begin_ns / 1e9:.1f} s on, "
        "were measured by its wall clock alone, and nothing else was seen of the start meanwhile: "
        "if that clock was set forward, these seconds never passed"
    )
    return Problem(source.file, KIND, 1, detail)
