"""Long silences that a wall clock alone measured (pure).

A clock that is set forward in the middle of a start makes a phase longer, by an hour as easily as
by a second. Writers with a monotonic clock are not misled. Logs, cluster records, shells and other
programs' writers have the wall clock alone, and a step of it looks like a phase in which nothing
else happened anywhere. The report therefore names each period of half an hour or more in which such
a writer claims to have worked, no other event of the start was seen, and no process's monotonic
clock confirms the time. Where any process says that it waited all that time, the time did pass.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Start
from bootseer.profiler.report.model import JOB, Problem

KIND = "wall-clock-alone"
_PULL = "k8s.image.wait_included"
"""Attribute that `import k8s` writes on a pull whose message states its duration: kubelet takes
that by a monotonic clock (kubernetes/kubernetes, pkg/kubelet/images/image_manager.go and puller.go,
time.Since)."""
LEAST_NS = 1800 * 10**9
"""A shorter silence is usual in a start: a compiler's, a checkpoint's."""


def find_unconfirmed(
    start: Start, shifts: Sequence[int], zero_ns: int, end_ns: int
) -> tuple[Problem, ...]:
    """Name each long silence, up to the start's end, that only wall clocks measured.

    Adding `shifts` brings each source's times to one wall clock, on which the start lasts from
    `zero_ns` to `end_ns`.
    """
    if end_ns - zero_ns < LEAST_NS:
        return ()
    silences = _find_silences(start, shifts, end_ns)
    if not silences:
        return ()
    moments_of = [_find_moments(s, shift) for s, shift in zip(start.sources, shifts, strict=True)]
    problems = []
    for low_ns, high_ns in silences:
        across = [
            (source, shift)
            for source, shift, moments in zip(start.sources, shifts, moments_of, strict=True)
            if moments and min(moments) <= low_ns and max(moments) >= high_ns
        ]
        if any(source.offset_ns for source, _ in across):  # its monotonic clock counted the time
            continue
        worked = [
            (phase, source)
            for source, shift in across
            if (phase := _find_phase(source, low_ns - shift, high_ns - shift)) is not None
        ]
        if worked and len(worked) == len(across):  # else one of them knows that the time passed
            phase, source = max(worked, key=lambda each: each[0] != "")
            problems.append(_make_problem(source, phase, low_ns - zero_ns, high_ns - low_ns))
    return tuple(problems)


def _find_silences(start: Start, shifts: Sequence[int], end_ns: int) -> list[tuple[int, int]]:
    """The pairs of moments between which nothing was seen for `LEAST_NS` or more.

    Moments are grouped by the half hour (`LEAST_NS`) in which they lie. Within one no silence has
    room, so its first and last moment are all that counts: a large start has millions to sort.
    """
    lows: dict[int, int] = {}
    highs: dict[int, int] = {}
    for source, shift in zip(start.sources, shifts, strict=True):
        moments = columns_of(source.spans).moments
        ordered = sorted([moment for moment in moments if moment is not None])
        stop, index = bisect_right(ordered, end_ns - shift), 0
        while index < stop:
            number = (ordered[index] + shift) // LEAST_NS
            following = bisect_left(ordered, (number + 1) * LEAST_NS - shift, index, stop)
            low, high = ordered[index] + shift, ordered[following - 1] + shift
            lows[number] = min(low, lows.get(number, low))
            highs[number] = max(high, highs.get(number, high))
            index = following
    return [
        (highs[before], lows[after])
        for before, after in pairwise(sorted(lows))
        if lows[after] - highs[before] >= LEAST_NS
    ]


def _find_moments(source: Source, shift: int) -> list[int]:
    return [moment + shift for span in source.spans for moment in span[1:3] if moment is not None]


def _find_phase(source: Source, low_ns: int, high_ns: int) -> str | None:
    """The innermost phase in which a source was from `low_ns` to `high_ns`; "" for none.

    None where it waited, or pulled an image: kubelet measures that by a monotonic clock.
    """
    spans = [
        span
        for span in source.spans
        if span.begin_ns is not None and span.begin_ns <= low_ns
        if span.end_ns is not None and span.end_ns >= high_ns
    ]
    if any(span.wait or _PULL in (span.attributes or {}) for span in spans):
        return None
    inner = max(spans, key=lambda span: (span.begin_ns or 0, span.name != JOB), default=None)
    return "" if inner is None else inner.name


def _make_problem(source: Source, phase: str, begin_ns: int, length_ns: int) -> Problem:
    identity = source.identity
    rank = f"rank {identity.rank} on " if identity.rank is not None else ""
    activity = f"in {phase}" if phase else "between two phases"
    detail = (
        f"{length_ns / 1e9:,.0f} s of {rank}{identity.node} {activity}, "
        f"from {begin_ns / 1e9:.1f} s on, "
        "were measured by its wall clock alone, and nothing else was seen of the start meanwhile: "
        "if that clock was set forward, these seconds never passed"
    )
    return Problem(source.file, KIND, 1, detail)
