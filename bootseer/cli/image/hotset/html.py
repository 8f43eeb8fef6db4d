"""A hot set as one self-contained HTML page: bytes over time, by directory, package and file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bootseer.cli.shared.sizes import format_size
from bootseer.imageprefetch.hotset.summary import Summary, SummaryRow
from bootseer.profiler.render.html_build import Child, Markup, pct, source_hash, table, tag

MOST_FILES = 200
_WIDTH, _HEIGHT = 1000, 220

_STYLE = """
:root { color-scheme: light dark; --ground: #faf9f6; --ink: #1c2126; --soft: #525b65;
  --line: #dcd8d0; --own: #1d6a83; --pale: #cfe3e9; --focus: #b3420c; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161a; --ink: #e8ebee; --soft: #a8b2bc;
  --line: #313a43; --own: #5fb4d0; --pale: #21404c; --focus: #ffb27d; } }
body { background: var(--ground); color: var(--ink); max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { max-width: 60rem; } .hint, figcaption, caption { color: var(--soft); }
figure { margin: 1rem 0; } .chart { width: 100%; height: 220px;
  border-bottom: 1px solid var(--line); border-left: 1px solid var(--line); }
.chart rect { fill: var(--pale); }
.chart polyline { fill: none; stroke: var(--own); stroke-width: 2;
  vector-effect: non-scaling-stroke; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid var(--focus); }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; padding: .25rem 0; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
  font-weight: normal; vertical-align: top; } thead th { color: var(--soft); font-size: .875rem; }
tbody th { overflow-wrap: anywhere; } .n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } .g { width: 25%; min-width: 6rem; }
.track rect { fill: var(--own); }
@media print { .scroll { overflow: visible; } }
"""


def render(summary: Summary, ref: str) -> str:
    """Return the page as text, to be written as UTF-8."""
    policy = (
        f"default-src 'none'; style-src {source_hash(_STYLE)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"What starts of {ref} read"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    )
    body = tag("body", tag("main", tag("h1", title), *_render_sections(summary)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _render_sections(summary: Summary) -> list[Child]:
    image_bytes = summary.image_bytes or 1
    starts = f"{summary.starts} full start" + ("" if summary.starts == 1 else "s")
    workload = f"workload {summary.workload}" if summary.workload else "default workload"
    if not summary.hot_bytes:
        return [tag("p", f"{workload}, {starts}: nothing is hot.")]
    return [
        tag(
            "p",
            f"{workload}, {starts}: ",
            tag("strong", format_size(summary.hot_bytes)),
            f" of {format_size(summary.image_bytes)} ({summary.hot_bytes / image_bytes:.1%}) in "
            f"{summary.hot_files:,} of {summary.image_files:,} files, touched within "
            f"{summary.duration_ms / 1000:.2f} s.",
        ),
        tag("h2", "Over time"),
        _render_figure(summary),
        tag("h2", "By package"),
        _render_table("By package, as far as paths tell", "package", summary.packages, summary),
        tag("h2", "By directory"),
        _render_table("By directory", "directory", summary.directories, summary),
        tag("h2", "By file"),
        _render_table("By file", "file", summary.files, summary),
    ]


def _render_figure(summary: Summary) -> Markup:
    """Return a chart of the bytes touched in each interval, and of their running total."""
    buckets = summary.buckets
    most_bytes = max(bucket.touched_bytes for bucket in buckets)
    totals = itertools.accumulate(bucket.touched_bytes for bucket in buckets)
    half_ms = next(
        bucket.end_ms
        for bucket, total_bytes in zip(buckets, totals, strict=True)
        if total_bytes * 2 >= summary.hot_bytes
    )
    return tag(
        "figure",
        _draw_chart(summary, most_bytes),
        tag(
            "div",
            tag("span", "0 s"),
            tag("span", f"{summary.duration_ms / 1000:.2f} s"),
            class_="axis",
        ),
        tag(
            "figcaption",
            f"Bars: first touches in {buckets[0].end_ms} ms each, {format_size(most_bytes)} at "
            f"most. Line: all so far, up to {format_size(summary.hot_bytes)}; half of it after "
            f"{half_ms / 1000:.2f} s.",
        ),
    )


def _draw_chart(summary: Summary, most_bytes: int) -> Markup:
    buckets = summary.buckets
    bar_width = _WIDTH / len(buckets)
    bars = [
        tag(
            "rect",
            x=f"{number * bar_width:.2f}",
            y=f"{_HEIGHT * (1 - bucket.touched_bytes / most_bytes):.2f}",
            width=f"{bar_width:.2f}",
            height=f"{_HEIGHT * bucket.touched_bytes / most_bytes:.2f}",
        )
        for number, bucket in enumerate(buckets)
    ]
    totals = itertools.accumulate((b.touched_bytes for b in buckets), initial=0)
    points = " ".join(
        f"{number * bar_width:.2f},{_HEIGHT * (1 - total_bytes / summary.hot_bytes):.2f}"
        for number, total_bytes in enumerate(totals)
    )
    return tag(
        "svg",
        *bars,
        tag("polyline", points=points),
        class_="chart",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{format_size(summary.hot_bytes)} touched over {summary.duration_ms} ms",
    )


def _render_table(
    caption: str, heading: str, parts: Sequence[SummaryRow], summary: Summary
) -> Markup:
    columns = [
        (heading, ""),
        ("hot", "n"),
        ("of", "n"),
        ("files", "n"),
        ("first", "n"),
        ("share", "g"),
    ]
    rows = []
    for part in parts[:MOST_FILES]:
        share = tag("rect", x=0, y=4, width=pct(part.touched_bytes / summary.hot_bytes), height=12)
        rows.append(
            (
                part.name or "/",
                format_size(part.touched_bytes),
                format_size(part.size_bytes),
                f"{part.files:,}",
                f"{part.first_touch_ms / 1000:.2f} s",
                tag("svg", share, class_="track", width="100%", height=20, aria_hidden="true"),
            )
        )
    left_out = len(parts) - len(rows)
    more = tag("p", f"{left_out:,} more are in the JSON (--json).", class_="hint")
    return tag("div", table(caption, columns, rows), more if left_out else None)
