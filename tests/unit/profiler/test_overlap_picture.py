"""The picture of what ran at once."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bootseer.profiler.render import terminal
from bootseer.profiler.render.overlap_picture import Bar, draw_bars
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Report
from tests.support.samples.event_files import EventFile, two_nodes


def report_of(folder: Path) -> Report:
    return analysis.analyse(load([str(folder)]))


def overlapped(folder: Path) -> Report:
    EventFile("a").span("deps.install", 0, 4).write(folder)
    EventFile("a").span("checkpoint.prefetch", 1, 9).write(folder)
    EventFile("a").span("imports", 4, 8).point("first_step", 10).write(folder)
    return report_of(folder)


def test_a_bar_lies_where_its_phase_ran(tmp_path: Path) -> None:
    assert draw_bars(overlapped(tmp_path), 10) == (
        Bar("deps.install", 0, pytest.approx(4), "████      "),
        Bar("checkpoint.prefetch", pytest.approx(1), pytest.approx(9), " ████████ "),
        Bar("imports", pytest.approx(4), pytest.approx(8), "    ████  "),
    )


def test_a_phase_that_outlasts_the_start_is_cut_there(tmp_path: Path) -> None:
    EventFile("a").span("image.fill", 5, 60).write(tmp_path)
    EventFile("a").span("imports", 0, 8).point("first_step", 10).write(tmp_path)
    bars = {bar.phase: bar for bar in draw_bars(report_of(tmp_path), 10)}
    assert (bars["image.fill"].end_s, bars["image.fill"].drawn) == (
        pytest.approx(10),
        "     █████",
    )


def test_phases_one_after_the_other_have_no_picture(tmp_path: Path) -> None:
    """Nor has a part within its phase, or what overlaps for a moment."""
    file = EventFile("a").span("deps.install", 0, 4).span("deps.install.unpack", 1, 4)
    file.span("imports", 3.9, 8).point("first_step", 10).write(tmp_path)
    assert draw_bars(report_of(tmp_path), 10) == ()


def test_starts_of_several_nodes_have_no_picture(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    assert draw_bars(report_of(tmp_path), 10) == ()


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_it_within_its_columns(tmp_path: Path, width: int) -> None:
    file = io.StringIO()
    terminal.render(overlapped(tmp_path), Console(file=file, width=width, color_system=None))
    lines = file.getvalue().splitlines()
    begin = lines.index("At once: when each phase ran")
    assert [line.split()[0] for line in lines[begin + 2 : begin + 5]] == [
        "deps.install",
        "checkpoint.prefetch",
        "imports",
    ]
    assert max(map(len, lines)) <= width
