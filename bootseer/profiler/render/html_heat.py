"""The node x phase heat map of the HTML report: its data block and its first rows (pure).

The script draws an overview of all nodes and fills, sorts and filters the table from the data
block; a browser without scripts shows the rows made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.profiler.render import wording as words
from bootseer.profiler.render.html_build import (
    Child,
    Markup,
    Nothing,
    join,
    name,
    screen_reader_text,
    tag,
)
from bootseer.profiler.report.model import Report

PAGE_ROWS = 25


def data(report: Report) -> dict[str, object]:
    """The script's data block: names, seconds by node and phase, stragglers by index."""
    heat = report.heat_map
    index = {name: i for i, name in enumerate(heat.nodes)}
    column = {name: j for j, name in enumerate(heat.phases)}
    slow = sorted(
        {
            (index[s.node], column[s.phase])
            for s in report.stragglers
            if s.node in index and s.phase in column
        }
    )
    return {
        "whole": _round(report.start.duration_s),
        "page": PAGE_ROWS,
        "nodes": [words.printable(name) for name in heat.nodes],
        "phases": [words.printable(name) for name in heat.phases],
        "medians": {
            "own": [_round(v) for v in words.column_medians(heat.own_s, len(heat.phases))],
            "wait": [_round(v) for v in words.column_medians(heat.wait_s, len(heat.phases))],
        },
        "own": [[_round(v) for v in row] for row in heat.own_s],
        "wait": [[_round(v) for v in row] for row in heat.wait_s],
        "slow": slow,
    }


def _round(value: float | None) -> float | int | None:
    """Milliseconds are enough for the eye and keep a thousand nodes small."""
    if value is None:
        return None
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def section(report: Report) -> Markup | Nothing:
    """Controls, overview, table, and a paragraph for the description of a chosen node."""
    heat = report.heat_map
    if not heat.nodes or not heat.phases:
        return Nothing("No node had a phase.")
    hint = (
        "Shade: how far a node stands above the phase's median (1.1, 1.25, 1.5, 2 and 4 times); "
        "cells that cost less than 1% of the start stay pale. A triangle marks a straggler. "
        "In the table, arrow keys move and Enter describes a node."
    )
    return join(
        (
            tag("p", hint, class_="hint"),
            _controls(len(heat.nodes)),
            _overview(report),
            _table(report),
            tag("p", id="heat-detail", aria_live="polite", class_="detail"),
            _pager(),
        )
    )


def _controls(nodes: int) -> Markup:
    return tag(
        "div",
        tag("label", "Node ", tag("input", type="search", id="heat-filter", autocomplete="off")),
        tag(
            "label",
            "Show ",
            tag(
                "select",
                tag("option", "own work", value="own"),
                tag("option", "waiting", value="wait"),
                id="heat-metric",
            ),
        ),
        tag(
            "label",
            tag("input", type="checkbox", id="heat-slow"),
            " only stragglers",
            class_="check",
        ),
        tag("p", words.count(nodes, "node"), id="heat-status", role="status"),
        class_="controls js",
        id="heat-controls",
        hidden=True,
    )


def _overview(report: Report) -> Markup | None:
    """All nodes in one picture, where the table shows a page of them."""
    heat = report.heat_map
    if len(heat.nodes) <= PAGE_ROWS:
        return None
    label = "Overview of all nodes by phase; the table below has the same figures"
    return tag(
        "figure",
        tag(
            "div",
            tag("ul", [tag("li", phase) for phase in heat.phases], aria_hidden="true"),
            tag("canvas", id="heat-canvas", role="img", aria_label=label),
            class_="raster",
        ),
        tag(
            "figcaption",
            "All nodes in the table's order, left to right; one line a phase. Where nodes share "
            "a pixel the slowest shows.",
        ),
        class_="overview js",
        hidden=True,
    )


def _table(report: Report) -> Markup:
    """The first page of rows, from the same rounded figures as the script's."""
    heat = report.heat_map
    medians = [_round(v) for v in words.column_medians(heat.own_s, len(heat.phases))]
    rows = _rows(report, medians)
    heads, foot = _head_and_foot(report, medians)
    return tag(
        "div",
        tag(
            "table",
            tag(
                "caption", "Own work by node and phase, the slowest nodes first", id="heat-caption"
            ),
            tag("thead", tag("tr", heads)),
            tag("tbody", rows),
            tag("tfoot", tag("tr", foot)),
            class_="heat",
            id="heat-table",
        ),
        class_="scroll",
        role="region",
        tabindex=0,
        aria_label="Nodes by phase",
    )


def _rows(report: Report, medians: Sequence[float | int | None]) -> list[Markup]:
    heat = report.heat_map
    own = [[_round(v) for v in row] for row in heat.own_s]
    whole_s = report.start.duration_s
    slow = {(s.node, s.phase) for s in report.stragglers}

    def excess(i: int) -> float:
        row = zip(own[i], medians, strict=True)
        return sum(max(0.0, v - (m or 0.0)) for v, m in row if v is not None)

    order = sorted(range(len(heat.nodes)), key=lambda i: -excess(i))[:PAGE_ROWS]
    rows = []
    for i in order:
        cells: list[Child] = [tag("th", name(heat.nodes[i]), scope="row")]
        cells.append(tag("td", words.seconds(excess(i)), class_="n"))
        for j, phase in enumerate(heat.phases):
            mark = None
            if (heat.nodes[i], phase) in slow:
                mark = join((" \u25b2", screen_reader_text(" straggler")))
            css = f"n h{words.shade(own[i][j], medians[j], whole_s)}"
            shown = words.seconds(own[i][j])
            cells.append(tag("td", shown, mark, class_=css, hidden=medians[j] is None))
        rows.append(tag("tr", cells))
    return rows


def _head_and_foot(
    report: Report, medians: Sequence[float | int | None]
) -> tuple[list[Child], list[Child]]:
    """The headers that the script makes sortable, and the medians below."""
    heat = report.heat_map
    heads: list[Child] = [tag("th", "Node", scope="col", data_sort="name")]
    heads.append(
        tag("th", "Above medians", scope="col", class_="n", data_sort="excess",
            aria_sort="descending")
    )  # fmt: skip
    heads += [
        tag(
            "th",
            name(phase, keep=0),
            scope="col",
            class_="n",
            data_sort=str(j),
            hidden=medians[j] is None,
        )
        for j, phase in enumerate(heat.phases)
    ]
    foot: list[Child] = [tag("th", "Median", scope="row"), tag("td", "", class_="n")]
    foot += [tag("td", words.seconds(m), class_="n", hidden=m is None) for m in medians]
    return heads, foot


def _pager() -> Markup:
    return tag(
        "div",
        tag("button", "Previous", type="button", id="heat-previous"),
        tag("span", "", id="heat-range"),
        tag("button", "Next", type="button", id="heat-next"),
        class_="pager js",
        hidden=True,
    )
