"""The renderers without a browser: hand-made reports at the terminal and as HTML text."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest
from rich.console import Console

from bootseer.profiler.render import html_build as h
from bootseer.profiler.render import html_details, html_heat, summary_sentences
from bootseer.profiler.render import wording as words
from bootseer.profiler.render.html import SECTIONS, render
from bootseer.profiler.render.terminal import render as render_terminal
from bootseer.profiler.report import model as m
from tests.support.samples import reports as samples

HOSTILE = '</script><img src=x onerror="alert(1)">\x1b[31m\u202e&amp;'


def terminal(report: m.Report, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=file, width=width, no_color=True, force_terminal=False)
    render_terminal(report, console)
    file.flush()
    return raw.getvalue().decode(encoding)


# Words for figures


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (0.0, "0s"), (0.0004, "0s"), (0.004, "4ms"), (0.0994, "99ms"), (0.35, "0.35s"),
        (7.125, "7.13s"), (9.949, "9.95s"), (9.951, "10.0s"), (41.2, "41.2s"), (99.94, "99.9s"),
        (99.96, "1m40s"), (119.6, "2m00s"), (222.0, "3m42s"), (3599.4, "59m59s"), (3599.6, "1h00m"),
        (7500.0, "2h05m"), (500_000.0, "138h"), (-3.0, "-3.00s"),
    ],
)  # fmt: skip
def test_seconds(value, shown):
    assert words.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.35, "350 ms"), (41.2, "41.2 s"), (120.0, "2 min"), (222.0, "3 min 42 s"),
     (7200.0, "2 h"), (7500.0, "2 h 5 min")],
)  # fmt: skip
def test_long_seconds(value, shown):
    assert words.long_seconds(value) == shown


def test_other_figures():
    assert [words.percent(v) for v in (None, 0.0, 0.0001, 0.031, 0.5)] == [
        "-", "0%", "<0.1%", "3.1%", "50%",
    ]  # fmt: skip
    assert [words.size(v) for v in (None, 0, 999, 1500, 1_440_000_000, 10**16)] == [
        "-", "0 B", "999 B", "1.5 kB", "1.4 GB", "10000 TB",
    ]  # fmt: skip
    assert [words.ratio(v) for v in (None, float("inf"), 1.518, 12_345.0)] == [
        "-", "-", "1.52x", "12,345x",
    ]  # fmt: skip
    assert words.ranks((12, 0, 1, 2, 3)) == "0-3, 12"
    assert words.ranks(()) == ""
    assert words.utc_time(float("1e30")).endswith("after 1970")


def test_what_could_act_on_a_terminal_becomes_visible():
    assert words.printable("plain-nöde 節点") == "plain-nöde 節点"
    assert words.printable("a\x1b[2Jb\n\u202ec\ud800") == "a\\x1b[2Jb\\n\\u202ec\\ud800"


@pytest.mark.parametrize("whole", [0.0, 0.004, 1.0, 59.0, 212.4, 86_400.0, 1e7])
def test_ticks_are_few_and_within(whole):
    ticks = words.ticks(whole)
    assert ticks[0] == 0
    assert ticks[-1] <= whole + 1e-9
    assert len(ticks) <= 8
    assert list(ticks) == sorted(set(ticks))


def test_shades_need_both_a_factor_and_a_cost():
    assert [words.shade(v, 10.0, 100.0) for v in (None, 9.0, 10.5, 11.2, 13.0, 16.0, 25.0, 50.0)] \
        == [0, 0, 0, 1, 2, 3, 4, 5]  # fmt: skip
    # Ten times next to nothing is next to nothing.
    assert words.shade(0.5, 0.05, 100.0) == 1
    assert words.shade(5.0, 0.0, 100.0) == 5


def test_the_path_joins_neighbours_and_keeps_waiting_apart():
    step = m.CriticalStep
    report = samples.empty(
        start=samples.start(duration_s=10.0),
        critical_path=(
            step(0, 2, "a", 0, "imports", False, 2, None),
            step(2, 3, "b", 1, "imports", False, 2, "r"),
            step(3, 5, "b", 1, "imports", True, 2, None),
            step(5, 6, "b", 1, None, False, None, None),
            step(6, 10, "b", 1, "compile", False, 4, None),
        ),
    )
    pieces = summary_sentences.path_pieces(report)
    assert [(p.phase, p.wait, p.gap, p.duration_s) for p in pieces] == [
        ("imports", False, False, 3), ("imports", True, False, 2),
        (words.GAP, False, True, 1), ("compile", False, False, 4),
    ]  # fmt: skip
    assert pieces[0].nodes == ("a", "b")
    assert sum(p.share for p in pieces) == pytest.approx(1)


def test_the_advice_names_the_slow_one_when_it_is_most_of_the_gain():
    report = samples.sample(16)
    slow = report.stragglers[0]
    assert (
        summary_sentences.verdict(report)
        .advice[0]
        .startswith(f"{slow.node}. Its {slow.phase} took")
    )
    # Of a node that does not stand out, or saves little beside the phase, the phase is said first.
    even = dataclasses.replace(report, stragglers=())
    assert summary_sentences.verdict(even).advice[0].startswith("deps.install. Without it")
    what_if = (
        m.WhatIf("phase", "deps.install", "removed", 200.0, 71.0),
        m.WhatIf("node", slow.node, "median", 206.0, 65.0),
    )
    advice = summary_sentences.verdict(dataclasses.replace(report, what_if=what_if)).advice
    assert advice[0].startswith(f"{slow.node}. Its {slow.phase} took")
    assert advice[1].startswith("deps.install. Without it")
    # A gain below one per cent is not worth a word.
    tiny = (m.WhatIf("phase", "imports", "removed", 270.0, 0.5),)
    assert summary_sentences.verdict(dataclasses.replace(report, what_if=tiny)).advice == ()


# The terminal


def all_reports() -> dict[str, m.Report]:
    long = "node-" + "x" * 120
    return {
        "empty": samples.empty(),
        "one": samples.sample(1),
        "many": samples.sample(64),
        "compared": samples.sample(8, comparison=samples.comparison()),
        "refused": samples.sample(8, comparison=samples.comparison(claim=False)),
        "unicode": samples.sample(3, prefix="ノード-ü"),
        "long": samples.sample(3, prefix=long),
        "hostile": samples.sample(3, prefix=HOSTILE),
        "no path": samples.sample(3, critical_path=(), what_if=(), barriers=()),
    }


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", all_reports())
def test_the_terminal_keeps_to_its_width(name, width):
    shown = terminal(all_reports()[name], width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "\x1b" not in shown


def test_the_verdict_comes_first_and_everything_follows():
    shown = terminal(samples.sample(16, comparison=samples.comparison()), 120)
    lines = shown.splitlines()
    assert lines[0].startswith("The start took ")
    assert lines[0].endswith("on 16 nodes, 128 ranks, 128 GPUs.")
    assert lines[1].startswith("Critical path: ")
    assert "Fix first: node-0005. Its deps.install took" in shown
    for part in (
        "Before and after", "speed-up 1.40x", "max/med", "not observed: schedule, compile",
        "Critical path (", "Slowest nodes", "Stragglers (2)", "clocks: skew up to 47ms",
        "GPU-hours held before the first step", "waiting for others", "What if", "Fallbacks",
        "the snapshot did not match its digest", "Errors", "Began and never ended (1)",
        "Parts", "Starts (2, newest first)", "Problems in the input (1)", "Emulated: the link",
    ):  # fmt: skip
        assert part in shown, part


def test_an_empty_start_says_what_it_knows():
    shown = terminal(samples.empty())
    assert shown.startswith("The start did not reach a first step")
    assert "not observed: queue, schedule" in " ".join(shown.split())
    for part in ("What if", "Stragglers", "GPU-hours", "Problems", "Fallbacks"):
        assert part not in shown


@pytest.mark.parametrize("width", [80, 120])
def test_one_process_has_one_figure_a_phase(width):
    phases = tuple(dataclasses.replace(p, nodes=1, processes=1) for p in samples.sample(1).phases)
    shown = terminal(samples.sample(1, phases=phases), width)
    assert "p99" not in shown
    row = next(line for line in shown.splitlines() if line.startswith("  deps.install "))
    deps = next(phase for phase in phases if phase.name == "deps.install")
    assert row.split()[1:3] == [words.seconds(deps.p50_s), words.seconds(deps.wait_p50_s)]
    assert ("1.4 GB" in row) == (width == 120)


def test_writers_of_events_are_not_taken_for_the_job():
    start = samples.sample(2).start
    shown = words.scale(dataclasses.replace(start, ranks=0, gpus=None, processes=9))
    assert shown == "2 nodes"


def test_slow_processes_within_the_noise_are_counted():
    phases = samples.sample(1).phases
    noisy = (dataclasses.replace(phases[0], within_noise=5), *phases[1:])
    for nodes in (1, 4):
        shown = terminal(samples.sample(nodes, phases=noisy, stragglers=()), 120)
        assert "Stragglers: none" in shown
        assert "not named, as within its phase's own spread: 5 times a slow process" in shown
    assert "own spread" not in terminal(samples.sample(4), 120)


def test_a_refused_comparison_makes_no_claim():
    shown = terminal(samples.sample(8, comparison=samples.comparison(claim=False)))
    assert "No claim: the candidate side has 1 complete start" in shown
    assert "speed-up" not in shown
    assert "over all phases together" not in shown


def test_a_comparison_says_what_its_phases_factors_take():
    shown = terminal(samples.sample(8, comparison=samples.comparison()), 120)
    assert "A phase has a factor where it shows a difference at 95% over all phases" in shown


def test_a_terminal_without_unicode_gets_ascii():
    shown = terminal(samples.sample(3, prefix="ノード"), encoding="ascii")
    assert "Critical path (# own work, = waiting, . not described)" in shown
    assert "\\u30ce" in shown


def test_faults_are_grouped():
    problems = tuple(
        m.Problem(f"e/{i}.jsonl", "torn-line" if i % 3 else "empty-file", 2, "cut")
        for i in range(9)
    )
    killed = tuple(m.Killed(f"n{i // 8}", i, "imports", 9.0 - i / 10, "f") for i in range(16))
    report = samples.sample(
        2, problems=problems, killed=(*killed, m.Killed("n0", None, "x", 3, "f"))
    )
    groups = words.problem_groups(report)
    assert [(g.kind, g.times, len(g.files)) for g in groups] == [
        ("empty-file", 6, 3), ("torn-line", 12, 6),
    ]  # fmt: skip
    assert [(g.node, g.phase, g.ranks, g.began_s) for g in words.killed_groups(report)] == [
        ("n0", "x", (), 3), ("n1", "imports", tuple(range(8, 16)), 7.5),
        ("n0", "imports", tuple(range(8)), pytest.approx(8.3)),
    ]  # fmt: skip
    shown = terminal(report, 120)
    assert "Problems in the input (9)" in shown
    assert "torn-line: cut; in e/1.jsonl and 5 more" in shown
    assert "imports on n1 ranks 8-15, from 7.50s on" in shown


def test_long_lists_are_cut_and_counted():
    straggler = samples.sample(2).stragglers[0]
    shown = terminal(samples.sample(2, stragglers=(straggler,) * 37))
    assert "Stragglers (37)" in shown
    assert "and 27 more stragglers" in shown


# HTML


class Checker(HTMLParser):
    """Well-formed, unique ids, no link that leads nowhere, no inline handler or style."""

    VOID = frozenset(("meta", "link", "input", "wbr", "img", "br"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.headings: list[int] = []
        self.data: dict[str, str] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            assert not key.startswith("on"), (tag, key)
            assert key not in ("style", "src"), (tag, key)
            if key == "id":
                self.ids.append(value)
            if tag == "a" and key == "href":
                self.links.append(value)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"stray </{tag}>"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.data[self.open[-1]] = data


def test_a_section_without_content_is_a_line_of_the_last_one():
    page = render(samples.empty())
    menu = page[page.index("<nav") : page.index("</nav>")]
    assert 'href="#starts"' in menu
    assert '<section id="starts"' in page
    for absent in ("phases", "heat", "images", "stragglers", "comparison", "problems"):
        assert f'href="#{absent}"' not in menu
        assert f'<section id="{absent}"' not in page
        assert page.index(f'<div id="{absent}"') > page.index('<section id="nothing"')


@pytest.mark.parametrize("name", all_reports())
def test_the_page_is_well_formed_and_whole(name):
    page = render(all_reports()[name])
    page.encode("utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert {link.removeprefix("#") for link in checker.links} <= set(checker.ids)
    assert checker.headings[0] == 1
    assert all(b <= a + 1 for a, b in zip(checker.headings, checker.headings[1:], strict=False))
    assert {"verdict", *(section for section, _, _ in SECTIONS)} <= set(checker.ids)
    assert "img" not in checker.tags
    assert checker.tags.count("script") == 2
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_page_asks_for_nothing():
    page = render(samples.sample(4))
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page) == []
    assert "@import" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src &#x27;none&#x27;; style-src &#x27;sha256-")
    assert "unsafe" not in policy[1]


def test_data_cannot_close_its_script():
    block = h.script_json({"a": "</script><!--<script>&\u2028"})
    assert not re.search("[<>&\u2028]", block)
    assert json.loads(block) == {"a": "</script><!--<script>&\u2028"}


def test_text_is_escaped_unless_it_is_markup():
    assert h.tag("p", "<b>", h.tag("i", "&")) == "<p>&lt;b&gt;<i>&amp;</i></p>"
    assert h.tag("a", "x", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;">x</a>'
    assert h.tag("input", hidden=True, value=None, data_x=False) == "<input hidden>"
    # What markup gives back when it is cut or joined is text again.
    assert h.join([h.tag("i", "x")[:3]]) == "&lt;i&gt;"


def test_bars_stay_inside_and_can_be_seen():
    for begin, end in ((0.0, 0.0), (0.999, 1.0), (1.0, 1.0), (-0.5, 2.0)):
        x, width = (
            float(re.search(rf' {key}="([-\d.]+)%"', h.bar(begin, end, "own"))[1])
            for key in ("x", "width")
        )
        assert width >= 0.25
        assert x >= 0
        assert x + width <= 100.01


def test_long_names_may_break():
    assert "<wbr>" not in h.name("node-17.example")
    assert h.name("a-long.name-of-a/node_in:some.place").count("<wbr>") == 8
    assert 'class="name long"' in h.name("x" * 90)


def test_the_data_block_points_at_its_stragglers():
    report = samples.sample(8)
    data = html_heat.data(report)
    named = {(data["nodes"][i], data["phases"][j]) for i, j in data["slow"]}
    assert named == {(s.node, s.phase) for s in report.stragglers}
    assert len(data["own"]) == len(data["nodes"]) == 8
    assert all(len(row) == len(data["phases"]) for row in data["own"] + data["wait"])


def test_a_thousand_nodes_by_twenty_phases_stay_small():
    small = samples.sample(1024)
    heat = small.heat_map
    wide = m.HeatMap(
        heat.nodes,
        tuple(f"phase-{j}" for j in range(20)),
        tuple(tuple(row[j % 9] for j in range(20)) for row in heat.own_s),
        tuple(tuple(row[3] for _ in range(20)) for row in heat.own_s),
    )
    straggler = small.stragglers[0]
    report = dataclasses.replace(small, heat_map=wide, stragglers=(straggler,) * 5000,
                                 killed=small.killed * 5000,
                                 problems=small.problems * 8192)  # fmt: skip
    page = render(report)
    assert len(page.encode()) < 1_000_000
    assert "4,975 more" in page


def test_what_was_not_observed_is_said_and_never_zero():
    page = render(samples.empty())
    for phase in m.STANDARD_PHASES:
        assert f"<code>{phase}</code>" in page
    assert "No phase was observed." in page
    assert "No node had a phase." in page


def test_comparisons_in_html():
    none = render(samples.sample(2))
    assert "bootseer report --baseline" in none
    claimed = render(samples.sample(2, comparison=samples.comparison()))
    assert '<strong class="figure">1.40x</strong>' in claimed
    refused = render(samples.sample(2, comparison=samples.comparison(claim=False)))
    assert "No claim: the candidate side" in refused
    assert 'class="speedup"' not in refused
    criterion = "at 95% over all phases together"
    assert criterion in claimed
    assert criterion not in refused


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_every_pair_of_colours_can_be_read(theme):
    """WCAG 2 AA: 4.5 for text, 3 for what is drawn."""
    style = resources.files("bootseer.profiler.render").joinpath("assets/report.css").read_text()
    blocks = re.findall(r":root \{([^}]*)\}", style)
    colour: dict[str, str] = {}
    for block in blocks[: theme + 1]:
        colour |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    text = [(a, b) for a in ("ink", "soft", "link", "bad", "warn") for b in ("ground", "panel")]
    text += [("h0-ink", f"h{level}") for level in range(5)]
    text += [("h5-ink", "h5"), ("own-ink", "own"), ("ink", "flag")]
    for a, b in text:
        assert contrast(colour[a], colour[b]) >= 4.5, (a, b)
    drawn = [(a, "ground") for a in ("own", "wait", "gap", "strong-line", "focus")]
    for a, b in [*drawn, ("focus", "panel"), ("wait", "wait-pale")]:
        assert contrast(colour[a], colour[b]) >= 3, (a, b)


@pytest.mark.parametrize(
    ("nodes", "count", "shown"), [(1, 2, "n0"), (10, 10, "n9"), (10, 30, "n9, ...")]
)
def test_dots_stand_only_where_nodes_may_be_left_out(nodes, count, shown):
    note = m.Note("imports", "x", count, tuple(f"n{i}" for i in range(nodes)), 0.0)
    assert html_details._nodes(note).endswith(shown)
