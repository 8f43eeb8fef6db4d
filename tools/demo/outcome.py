"""From the starts' events to the reports of the demonstration."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bootseer.profiler.render import html as render_html
from bootseer.profiler.render import terminal as render_terminal
from bootseer.profiler.report import analysis
from bootseer.profiler.report.before_after import Comparison
from bootseer.profiler.report.load import load
from bootseer.profiler.report.model import Report
from tools.demo.stages import Stage
from tools.demo.starts import LABELS, Kind, Start


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What was found: the report (candidate: fresh nodes), and the second starts' comparison."""

    report: Report
    second: Comparison | None
    starts: tuple[Start, ...]
    faults: tuple[str, ...]


def evaluate(
    starts: Sequence[Start], stages: Sequence[Stage], faults: Sequence[str], emulated: Sequence[str]
) -> Result:
    """Analyse all starts; the counted candidate is the start on a fresh node."""
    baseline, fresh = _events(starts, "plain"), _events(starts, "fresh")
    report = analysis.analyse(load.load(fresh), baseline=load.load(baseline))
    second = _events(starts, "second")
    again = (
        analysis.analyse(load.load(second), baseline=load.load(baseline)).comparison
        if second
        else None
    )
    ours = [start for start in starts if start.restores]
    report = dataclasses.replace(
        report,
        parts={stage.name: stage.use(ours) for stage in stages},
        emulated=(*emulated, *(line for stage in stages for line in stage.emulated())),
    )
    return Result(report, again, tuple(starts), tuple(faults))


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
    for kind, label in LABELS.items():
        seconds = [s.wall_s for s in result.starts if s.kind == kind and s.wall_s is not None]
        if seconds:
            each = "  ".join(f"{value:.2f}" for value in seconds)
            table.add_row(label, str(len(seconds)), f"{statistics.median(seconds):.2f}", each)
    console.print(table)
    for line in result.report.emulated:
        console.print(f"emulated: {line}", style="dim")
    for label, comparison in (("fresh node", result.report.comparison), ("second", result.second)):
        if comparison is not None:
            console.print(f"{label}: {comparison.statement}")


def _events(starts: Sequence[Start], kind: Kind) -> list[str]:
    return [str(start.events) for start in starts if start.kind == kind]


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
