"""The report as one self-contained HTML page: no network, strict content policy, both themes.

The page allows exactly its own inline style and script (by hash) and nothing else. All text from
events goes through `html_build`, which escapes it; the script builds its rows from a JSON data
block with textContent only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from bootseer.profiler.render import html_costs, html_details, html_heat, html_sections
from bootseer.profiler.render import wording as words
from bootseer.profiler.render.html_build import (
    Markup,
    Nothing,
    join,
    script_json,
    source_hash,
    tag,
)
from bootseer.profiler.report.model import Report

SECTIONS = (
    ("timeline", "Timeline", html_sections.timeline),
    ("phases", "Phases", html_sections.phases),
    ("images", "Images", html_details.images),
    ("heat", "Nodes and phases", html_heat.section),
    ("stragglers", "Stragglers", html_costs.stragglers),
    ("gpu-hours", "GPU-hours", html_costs.gpu_hours),
    ("what-if", "What if", html_costs.what_if),
    ("comparison", "Before and after", html_details.comparison),
    ("clocks", "Clocks", html_details.clocks),
    ("not-observed", "Not observed", html_details.not_observed),
    ("fallbacks", "Fallbacks and errors", html_details.incidents),
    ("problems", "Problems in the input", html_details.problems),
    ("starts", "Starts", html_details.starts),
)

EMPTY = "nothing"
EMPTY_TITLE = "Nothing to report"


def render(report: Report) -> str:
    """The whole page as text, to be written as UTF-8."""
    style = _asset("report.css")
    script = _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"bootseer {report.version}"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", _title(report)),
        tag("style", Markup(style)),
    )
    contents = _sections(report)
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        Markup(_PATTERNS),
        html_sections.header(report),
        tag(
            "div",
            _navigation(contents),
            tag(
                "main",
                html_sections.verdict(report),
                join(contents.values()),
                id="main",
                tabindex=-1,
            ),
            class_="columns",
        ),
        _footer(report),
        tag("script", script_json(html_heat.data(report)), type="application/json", id="heat-data"),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


# Waiting is distinguished by its hatch, not by its colour alone.
_PATTERNS = """<svg class="defs" width="0" height="0" aria-hidden="true" focusable="false"><defs>\
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="6" height="6" class="hatch-ground"/>\
<rect width="3" height="6" class="hatch-line"/></pattern></defs></svg>"""


def _asset(name: str) -> str:
    assets = resources.files("bootseer.profiler.render").joinpath("assets")
    return assets.joinpath(name).read_text(encoding="utf-8")


def _title(report: Report) -> str:
    job = report.start.job_uid or report.start.trace_id[:8]
    return f"{words.long_seconds(report.start.duration_s)} to start {job} - bootseer"


def _navigation(contents: Mapping[str, Markup]) -> Markup:
    titles = {
        "verdict": "Verdict",
        **{name: title for name, title, _ in SECTIONS},
        EMPTY: EMPTY_TITLE,
    }
    links = [
        tag("li", tag("a", title, href=f"#{name}"))
        for name, title in titles.items()
        if name == "verdict" or name in contents
    ]
    return tag("nav", tag("ul", links), aria_label="Sections")


def _sections(report: Report) -> dict[str, Markup]:
    """Markup by name, in order; the last section lists those with nothing to show, a line each."""
    sections: dict[str, Markup] = {}
    empty: list[Markup] = []
    for name, title, build in SECTIONS:
        content = build(report)
        if isinstance(content, Nothing):
            empty.append(tag("div", tag("dt", title), tag("dd", content.sentence), id=name))
        else:
            sections[name] = _section(name, title, content)
    if empty:
        sections[EMPTY] = _section(EMPTY, EMPTY_TITLE, tag("dl", empty, class_="facts"))
    return sections


def _section(name: str, title: str, content: Markup) -> Markup:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, content, id=name, aria_labelledby=f"{name}-title")


def _footer(report: Report) -> Markup:
    return tag(
        "footer",
        tag("p", f"bootseer {report.version}. All times in seconds of wall clock; a dash means "
            "not observed, never zero."),
    )  # fmt: skip
