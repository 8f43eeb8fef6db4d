"""Text of figures, groups and scales, as the terminal and the HTML report show it (pure)."""

from __future__ import annotations

import datetime
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from bootseer.profiler.report.model import (
    ImageUse,
    Killed,
    Report,
    StartSummary,
    Unreached,
)

GAP = "not described"
"""Name shown for time that no event describes."""

NEGLIGIBLE_SHARE = 0.01
"""The verdict leaves out pieces below this share of the start."""

PHASE_FACTORS = (
    "A phase has a factor where it shows a difference at 95% over all phases together; "
    "the more phases, the more starts that takes."
)
"""The explanation below a comparison's table of phases."""

_TICK_STEPS_S = (
    *(digit * 10.0**power for power in (-3, -2, -1) for digit in (1, 2, 5)),
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0),
    *(1800.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0),
)

KIND_WORDS = {
    "first": "first start",
    "restart": "restart",
    "restart_in_place": "restart in place",
    "standby": "start from stand-by",
    "unknown": "kind not observed",
}


def seconds(value: float | None) -> str:
    """A duration for tables, at most seven characters: `4ms`, `0.35s`, `41.2s`, `3m42s`, `2h05m`.

    None reads as a dash.
    """
    if value is None:
        return "-"
    sign, value = ("-", -value) if value < 0 else ("", value)
    value += 1e-9  # ties go up, as in the page's script
    if value < 0.0005:
        return "0s"
    if value < 0.0995:
        return f"{sign}{value * 1000:.0f}ms"
    if value < 9.95:
        return f"{sign}{value:.2f}s"
    if value < 99.95:
        return f"{sign}{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{sign}{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{sign}{hours}h{minutes:02d}m" if hours < 100 else f"{sign}{hours:,}h"


def long_seconds(value: float) -> str:
    """A duration for sentences: `350 ms`, `41.2 s`, `3 min 42 s`, `2 h 5 min`."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def ratio(value: float | None) -> str:
    """A factor: `1.52x`; None (or beyond all bounds) reads as a dash."""
    if value is None or value == float("inf"):
        return "-"
    return f"{value:.2f}x" if value < 99.995 else f"{value:,.0f}x"


def percent(value: float | None) -> str:
    """A share in percent; None reads as a dash."""
    if value is None:
        return "-"
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{value * 100:.1f}%" if 0 < value < 0.0995 else f"{value * 100:.0f}%"


def size(value: int | None) -> str:
    """Bytes in decimal units; None reads as a dash."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            return (
                f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.95 else f"{amount:.1f} {unit}"
            )
        amount /= 1000
    raise AssertionError


def gpu_hours(value: float | None) -> str:
    """GPU-hours with about three digits; None reads as a dash."""
    if value is None:
        return "-"
    if value < 0.095:
        return f"{value:.3f}" if value else "0"
    return f"{value:.2f}" if value < 9.95 else f"{value:,.1f}"


def printable(text: str) -> str:
    """Text from events with characters that could have an effect as escapes: control and format
    (bidirectional) characters, and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text
    )


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 node`, `1,024 nodes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as ranges: `0-7, 12`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def utc_time(unix_s: float) -> str:
    """A Unix time in UTC, to the second: `2026-03-01 10:00:00 UTC`."""
    try:
        moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:.0f} s after 1970"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def kind_word(start: StartSummary) -> str:
    """The kind of a start in words."""
    return KIND_WORDS.get(start.kind, start.kind)


def scale(start: StartSummary) -> str:
    """`128 nodes, 1,024 ranks, 1,024 GPUs` (what is not known is left out).

    The number of event writers is no measure of a job: each `bootseer event` of a script is one.
    """
    parts = [count(start.nodes, "node")]
    if start.ranks:
        parts.append(count(start.ranks, "rank"))
    if start.gpus is not None:
        parts.append(count(start.gpus, "GPU"))
    return ", ".join(parts)


def ticks(whole_s: float, wanted: int = 6) -> tuple[float, ...]:
    """Round points in time from 0 up to at most `whole_s`, about `wanted` of them."""
    if whole_s <= 0:
        return (0.0,)
    step = next((s for s in _TICK_STEPS_S if whole_s / s <= wanted), whole_s / wanted)
    return tuple(i * step for i in range(int(whole_s / step + 1e-9) + 1))


def shade(value: float | None, median: float | None, whole_s: float) -> int:
    """Heat-map shade 0 (at the median or below) to 5, by how far a cell exceeds its median.

    A cell that costs less than one per cent of the start stays at 1 at most, however large the
    factor.
    """
    if value is None or median is None or value <= median:
        return 0
    factor = value / median if median > 0 else float("inf")
    bounds = (1.1, 1.25, 1.5, 2.0, 4.0)
    level = sum(factor >= bound for bound in bounds)
    small = value - median < whole_s * NEGLIGIBLE_SHARE
    return min(level, 1) if small else level


def column_medians(rows: Sequence[Sequence[float | None]], columns: int) -> list[float | None]:
    """Median of each column over the rows that have a value there."""
    medians: list[float | None] = []
    for column in range(columns):
        values = sorted(v for row in rows if (v := row[column]) is not None)
        if not values:
            medians.append(None)
            continue
        middle = len(values) // 2
        odd = len(values) % 2
        medians.append(values[middle] if odd else (values[middle - 1] + values[middle]) / 2)
    return medians


@dataclass(frozen=True, slots=True)
class ProblemGroup:
    """One kind of fault of the input over all files that had it; `times` over all of them."""

    kind: str
    detail: str
    times: int
    files: tuple[str, ...]


def problem_groups(report: Report) -> tuple[ProblemGroup, ...]:
    """Problems by kind, in the order in which each kind first occurs."""
    files: dict[tuple[str, str], list[str]] = {}
    times: dict[tuple[str, str], int] = {}
    for problem in report.problems:
        key = (problem.kind, problem.detail)
        files.setdefault(key, []).append(problem.file)
        times[key] = times.get(key, 0) + problem.count
    return tuple(ProblemGroup(*key, times[key], tuple(files[key])) for key in files)


@dataclass(frozen=True, slots=True)
class KilledGroup:
    """Ranks of one node that began a phase and never ended it; `began_s` is the first begin."""

    node: str
    phase: str
    ranks: tuple[int, ...]
    processes: int
    began_s: float
    file: str


def killed_groups(report: Report) -> tuple[KilledGroup, ...]:
    """What never ended, by node and phase, in the order of the first begin."""
    members: dict[tuple[str, str], list[Killed]] = {}
    for each in sorted(report.killed, key=lambda k: k.began_s):
        members.setdefault((each.node, each.phase), []).append(each)
    return tuple(
        KilledGroup(
            node=node,
            phase=phase,
            ranks=tuple(sorted(k.rank for k in group if k.rank is not None)),
            processes=len(group),
            began_s=group[0].began_s,
            file=group[0].file,
        )
        for (node, phase), group in members.items()
    )


RAW_CLOCKS = "clocks: no barrier to compare them at; each node's times are its own clock's"


def last_seen(rank: Unreached) -> str:
    """Where a rank that missed its first step was last."""
    if rank.phase is None:
        return "it described nothing"
    if rank.inside:
        return f"in {rank.phase} since {seconds(rank.since_s)}"
    return f"last in {rank.phase}, which ended at {seconds(rank.since_s)}"


def missing_steps(start: StartSummary) -> str:
    """Why a start is incomplete; empty for a complete one."""
    if start.complete:
        return ""
    if start.unreached:
        return f"{count(start.unreached, 'rank')} without a first step"
    return "no first step"


def first_files(files: Sequence[str], shown: int = 1) -> str:
    """The first file, and how many more."""
    more = len(files) - shown
    return ", ".join(files[:shown]) + (f" and {more:,} more" if more > 0 else "")


def image_name(use: ImageUse) -> str:
    """An image and its workload, as far as they are known."""
    name = use.ref or ("files read ahead" if use.mode == "files" else "an image")
    return f"{name} ({use.workload})" if use.workload else name


def image_cells(use: ImageUse) -> tuple[str, ...]:
    """Hot set, ready, replayed, missed reads, blocked, on demand and filled, for tables."""
    hot = use.hot_set or "-"
    missed = "-"
    if use.missed_reads is not None and use.reads is not None:
        missed = f"{use.missed_reads:,} of {use.reads:,}"
    return (
        hot if use.mode in ("lazy", "files") else f"{hot}, {use.mode}",
        seconds(use.ready_s),
        size(use.replay_bytes),
        missed,
        seconds(use.blocked_s),
        size(use.cold_bytes),
        size(use.fill_bytes),
    )
