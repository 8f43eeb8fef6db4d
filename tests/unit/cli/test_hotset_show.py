"""A hot set drawn: on a terminal, and as a page that needs nothing else."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bootseer.cli.image.hotset.html import render
from bootseer.cli.image.hotset.show import render_lines
from bootseer.imageprefetch.hotset.summary import Summary, summarise
from tests.support.trees.hotsets import PAGE, Tree

FILES = {
    "usr/lib/python3/site-packages/numpy/core.so": random.Random(1).randbytes(50 * PAGE),
    'etc/<script>alert("1")</script>': random.Random(2).randbytes(3 * PAGE),
    "opt/\x1b[31mred\u202ename": random.Random(3).randbytes(2 * PAGE),
    "opt/cold": random.Random(4).randbytes(2 * PAGE),
}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    tree = Tree(tmp_path_factory.mktemp("trees") / "tree", FILES)
    reads = [(path, 0, 50) for path in FILES if path != "opt/cold"]
    return summarise(tree.touched(*reads), tree.files)


def test_the_terminal_shows_time_packages_directories_and_files(summary: Summary):
    lines = render_lines(summary, "registry/app:1")
    text = "\n".join(lines)
    assert "220.0 KiB of 228.0 KiB" in text
    assert "3 of 4 files" in text
    assert re.search(r"200\.0 KiB +200\.0 KiB +1 +0\.00 s +█+ +numpy", text)
    assert "over time" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert any(line.endswith("1 more") for line in render_lines(summary, "x", rows=2))


def test_nothing_hot_is_one_line(tmp_path: Path):
    tree = Tree(tmp_path / "tree", FILES)
    nothing = summarise(tree.touched(), tree.files)
    assert len(render_lines(nothing, "x")) == 1
    assert "nothing is hot" in render(nothing, "x")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_stands_alone_and_no_name_breaks_out_of_it(summary: Summary):
    text = render(summary, "registry/<b>app</b>:1")
    page = _Page()
    page.feed(text)
    assert not {"script", "b", "img", "iframe"} & set(page.tags)
    assert page.links == ["data:,"]
    assert "default-src &#x27;none&#x27;" in text
    assert page.tags.count("table") == 3
    assert page.tags.count("polyline") == 1
    assert "\x1b" not in text
    shown = "".join(page.cells)
    assert 'alert("1")' in shown
    assert "numpy" in shown
    assert "96.5%" in shown  # of the image's bytes
