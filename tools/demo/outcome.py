"""From the starts' events to the reports of the demonstration."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from rich.console import Console
from rich.table import Table

from bootseer.errors import CorruptDataError
from bootseer.profiler.render import html as render_html
from bootseer.profiler.render import terminal as render_terminal
from bootseer.profiler.report import analysis
from bootseer.profiler.report.before_after import Comparison
from bootseer.profiler.report.load import load
from bootseer.profiler.report.model import PartUse, Report, StartKind

PLAIN, FRESH = "plain", "fresh"


class Ran(Protocol):
    """A start that ended: `wall_s` from its launch to its first step, `events` its folder."""

    @property
    def kind(self) -> str: ...
    @property
    def events(self) -> Path: ...
    @property
    def wall_s(self) -> float | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What was found: the report (candidate: fresh nodes), and the other kinds' comparisons.

    `labels` has the kinds of starts in the order in which they are shown.
    """

    report: Report
    others: Mapping[str, Comparison]
    starts: tuple[Ran, ...]
    faults: tuple[str, ...]
    labels: Mapping[str, str]


def evaluate(
    starts: Sequence[Ran],
    parts: Mapping[str, PartUse],
    faults: Sequence[str],
    emulated: Sequence[str],
    labels: Mapping[str, str],
    only: Mapping[str, StartKind] = MappingProxyType({}),
) -> Result:
    """Analyse all starts; the counted candidate is the start on a fresh node.

    Where the events of a kind hold more starts than the one, `only` says which counts.
    """
    baseline = _events(starts, PLAIN)
    report = _compare(_events(starts, FRESH), baseline)
    report = dataclasses.replace(report, parts=dict(parts), emulated=tuple(emulated))
    others, faults = {}, list(faults)
    for kind in labels:
        mine = _events(starts, kind)
        if kind in (PLAIN, FRESH) or len(mine) < 2:
            continue
        try:
            comparison = _compare(mine, baseline, only.get(kind)).comparison
        except CorruptDataError as error:
            faults.append(f"{kind}: {error}")
            continue
        if comparison is not None:
            others[labels[kind]] = comparison
    return Result(report, others, tuple(starts), tuple(faults), labels)


def _compare(
    candidate: Sequence[str], baseline: Sequence[str], only: StartKind | None = None
) -> Report:
    """Compare the starts of some folders, or of these the ones of one kind."""
    loaded = load.load(candidate)
    if only is not None:
        mine = [s for s in loaded.starts if s.sources[0].identity.kind == only]
        if not mine:
            raise CorruptDataError(f"the report found no start of the kind {only}: a fault of ours")
        loaded = dataclasses.replace(loaded, starts=tuple(mine))
    return analysis.analyse(loaded, baseline=load.load(baseline))


def write(result: Result, out: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.json`, each by rename; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    page, data = out / "report.html", out / "report.json"
    _publish(page, render_html.render(result.report))
    _publish(data, json.dumps(result.report.to_json(), indent=1) + "\n")
    return page, data


def show(result: Result, console: Console) -> None:
    """Print the report, then one line a kind of start, then the verdicts."""
    render_terminal.render(result.report, console)
    table = Table(title="Every start, from launch to the end of its first step (seconds)")
    for heading in ("start", "count", "median", "each"):
        table.add_column(heading, justify="left" if heading in ("start", "each") else "right")
    for kind, label in result.labels.items():
        seconds = [s.wall_s for s in result.starts if s.kind == kind and s.wall_s is not None]
        if seconds:
            each = "  ".join(f"{value:.2f}" for value in seconds)
            table.add_row(label, str(len(seconds)), f"{statistics.median(seconds):.2f}", each)
    console.print(table)
    for line in result.report.emulated:
        console.print(f"emulated: {line}", style="dim")
    comparisons = {result.labels[FRESH]: result.report.comparison, **result.others}
    for label, comparison in comparisons.items():
        if comparison is not None:
            console.print(f"{label}: {comparison.statement}")


def _events(starts: Sequence[Ran], kind: str) -> list[str]:
    return [str(start.events) for start in starts if start.kind == kind]


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
