"""The HTML report in a real headless browser: no faults, no network, usable by everybody."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from bootseer.profiler.render.html import render
from bootseer.profiler.report import model as m
from tests.support.samples import reports as samples

pytestmark = pytest.mark.debian("chromium")

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
HOSTILE = '</script><img src=x onerror="window.broken=1">'


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=list(ARGUMENTS)
        )
        yield running
        running.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a report; afterwards nothing may have been logged or asked of a network."""

    @contextmanager
    def show(report: m.Report, *, scheme="light", width=1400, script=True):
        path = tmp_path / "report.html"
        path.write_text(render(report), encoding="utf-8")
        context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": 900},
            java_script_enabled=script,
            reduced_motion="reduce",
        )
        faults: list[str] = []
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        url = path.as_uri()
        page.on("request", lambda r: r.url == url or faults.append(f"request {r.url}"))
        page.goto(url)
        try:
            yield page
            assert faults == []
        finally:
            context.close()

    return show


@functools.cache
def large() -> m.Report:
    return samples.sample(1024)


def hostile() -> m.Report:
    """Names and texts from events that try to leave their place."""
    report = samples.sample(4, prefix=HOSTILE)
    incident = m.Incident("fallback", HOSTILE, HOSTILE, 1, (HOSTILE,), 1.0)
    return dataclasses.replace(
        report,
        start=dataclasses.replace(report.start, job_uid=HOSTILE, trace_id=HOSTILE),
        incidents=(incident,),
        problems=(m.Problem(HOSTILE, HOSTILE, 1, HOSTILE),),
        not_observed=(HOSTILE,),
        emulated=(HOSTILE,),
        parts={HOSTILE: m.PartUse(False, HOSTILE)},
        what_if=(m.WhatIf("phase", HOSTILE, "removed", 1.0, 200.0),),
    )


REPORTS = {
    "empty": samples.empty,
    "one node": lambda: samples.sample(1),
    "compared": lambda: samples.sample(16, comparison=samples.comparison()),
    "refused": lambda: samples.sample(16, comparison=samples.comparison(claim=False)),
    "large": large,
    "hostile": hostile,
}


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_stands_in_anybodys_way(shown, name):
    with shown(REPORTS[name](), width=1400) as page:
        check_width(page, 1400)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            dark = sum(int(v) for v in ground.strip("rgb()").split(",")[:3]) < 3 * 128
            assert dark == (scheme == "dark")
            # Nothing but colours differs, so the second time only they are looked at.
            check_access(page, COLOUR_RULES if dark else ())


@pytest.mark.parametrize("name", REPORTS)
def test_a_telephone_shows_all_of_it(shown, name):
    with shown(REPORTS[name](), width=360) as page:
        check_width(page, 360)
        if name in ("compared", "hostile"):
            check_access(page)


def check_width(page: Page, width: int) -> None:
    """The page never scrolls sideways."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width


COLOUR_RULES = ("color-contrast", "link-in-text-block")


def check_access(page: Page, rules: tuple[str, ...] = ()) -> None:
    """No violation of these rules of axe; without any, of all that are on by themselves."""
    only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    result = Axe().run(page, options={"resultTypes": ["violations"], **only})
    assert result.violations_count == 0, result.generate_report()
    assert result.response["passes"]


def test_hostile_names_stay_text(shown):
    with shown(hostile()) as page:
        assert page.evaluate("window.broken") is None
        assert page.locator("img").count() == 0
        assert page.locator("#heat-table tbody tr").count() == 4
        assert HOSTILE in page.locator("#heat-table tbody th").first.inner_text()
        assert HOSTILE in page.locator("#problems th[scope=row]").first.inner_text()


def test_the_policy_stops_what_might_slip_through(browser, tmp_path):
    # The same page with a script and a style injected: neither may act.
    text = render(samples.sample(2))
    bad = "<script>window.broken=1</script><style>body{visibility:hidden}</style>"
    path = tmp_path / "injected.html"
    path.write_text(text.replace("</main>", bad + "</main>"), encoding="utf-8")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(path.as_uri())
        assert page.evaluate("window.broken") is None
        assert page.evaluate("getComputedStyle(document.body).visibility") == "visible"
        refused = page.evaluate(
            """() => new Promise((done) => {
                 document.addEventListener("securitypolicyviolation", (e) => done(e.blockedURI));
                 new Image().src = "http://127.0.0.1:9/leak";
                 setTimeout(() => done("not refused"), 5000);
               })"""
        )
        assert refused.startswith("http://127.0.0.1:9")
    finally:
        context.close()


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.textContent.trim().slice(0, 60)")


def focus_is_visible(page: Page) -> bool:
    return page.evaluate(
        """() => {
          const style = getComputedStyle(document.activeElement);
          return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
        }"""
    )


def test_the_skip_link_comes_first_and_leads_to_the_report(shown):
    with shown(samples.sample(4)) as page:
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to the report"
        assert focus_is_visible(page)
        box = page.locator(".skip").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main') !== null")


def test_every_stop_of_the_keyboard_can_be_seen(shown):
    with shown(samples.sample(30)) as page:
        stops = 0
        while True:
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            assert focus_is_visible(page), focused(page)
            stops += 1
            assert stops < 200
        assert stops > 20


def test_rows_of_the_heat_map_by_keyboard(shown):
    with shown(large()) as page:
        rows = page.locator("#heat-table tbody tr")
        assert rows.count() == 25
        rows.first.focus()
        first = focused(page)
        page.keyboard.press("ArrowDown")
        second = focused(page)
        assert second != first
        page.keyboard.press("ArrowUp")
        assert focused(page) == first
        page.keyboard.press("End")
        page.keyboard.press("ArrowDown")
        assert page.locator("#heat-range").inner_text() == "26 to 50"
        page.keyboard.press("ArrowUp")
        assert page.locator("#heat-range").inner_text() == "1 to 25"
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        said = page.locator("#heat-detail").inner_text()
        assert said.startswith("node-0341:")
        assert "deps.install" in said
        assert "(straggler)" in said
        # One row at a time is a stop of Tab, not all of them.
        assert page.locator("#heat-table tbody tr[tabindex='0']").count() == 1


def test_sorting_filtering_and_paging(shown):
    with shown(large()) as page:
        first = page.locator("#heat-table tbody th").first
        assert first.inner_text() == "node-0341"
        page.get_by_role("button", name="Node", exact=True).click()
        assert first.inner_text() == "node-0000"
        assert page.locator("th[aria-sort='ascending']").count() == 1
        page.get_by_role("button", name="Node", exact=True).click()
        assert first.inner_text() == "node-1023"
        page.get_by_role("button", name="checkpoint.load").click()
        assert first.inner_text() == "node-0682"
        page.get_by_role("button", name="Next").click()
        assert page.locator("#heat-range").inner_text() == "26 to 50"
        page.get_by_label("Node", exact=True).fill("node-06")
        assert page.locator("#heat-status").inner_text() == "100 of 1,024 nodes"
        page.get_by_label("only stragglers").check()
        assert page.locator("#heat-table tbody tr").count() == 1
        page.get_by_label("Node", exact=True).fill("no such node")
        assert page.locator("#heat-table tbody tr").count() == 0
        page.get_by_label("Node", exact=True).fill("")
        page.get_by_label("only stragglers").uncheck()
        page.get_by_label("Show").select_option("waiting")
        assert "Waiting" in page.locator("#heat-caption").inner_text()
        visible = page.locator("#heat-table thead th:not([hidden])")
        assert visible.all_inner_texts() == ["Node", "Above medians", "rendezvous"]


def test_what_the_script_draws_is_what_the_server_wrote(shown):
    with shown(large(), script=False) as page:
        written = page.locator("#heat-table tbody").inner_text()
        # Controls that cannot work are not shown.
        assert not page.locator("#heat-controls").is_visible()
        assert not page.locator(".pager").is_visible()
    with shown(large()) as page:
        assert page.locator("#heat-table tbody").inner_text() == written
        assert page.locator("#heat-controls").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_overview_shows_the_slow_ones(shown, scheme):
    with shown(large(), scheme=scheme) as page:
        # Sorted by excess, the two stragglers stand at the left edge in the strongest shade there.
        strong = page.evaluate(
            """() => {
              const canvas = document.getElementById("heat-canvas");
              const context = canvas.getContext("2d");
              const all = context.getImageData(0, 0, canvas.width, canvas.height).data;
              const at = (x, row) => {
                const first = ((row * 14 + 5) * canvas.width + x) * 4;
                return all.slice(first, first + 3).join();
              };
              const end = canvas.width - 1;
              return [at(0, 3) !== at(end, 3), at(0, 3) !== at(0, 8), at(end, 3) === at(end, 8)];
            }"""
        )
        assert strong == [True, True, True]
        page.locator("#heat-canvas").click(position={"x": 1, "y": 5})
        assert "node-" in page.locator("#heat-detail").inner_text()


def test_a_thousand_nodes_stay_small(shown):
    report = large()
    assert len(render(report).encode()) < 3_000_000
    with shown(report) as page:
        assert "1,024 of 1,024 nodes" in page.locator("#heat-status").inner_text()
        headings = page.locator("h2").all_inner_texts()
        assert headings[:3] == ["Timeline", "Phases", "Nodes and phases"]
        assert page.locator("h1").count() == 1


def test_print_leaves_out_what_paper_cannot_do(shown):
    with shown(samples.sample(30), scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 33, 38)"
        assert not page.locator("nav").is_visible()
        assert not page.locator("#heat-controls").is_visible()
        assert page.locator("#heat-table").is_visible()
