"""Generated documents are current, and links in hand-written ones lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """In a process of its own: click remembers the help options of whoever asked first."""
    script = "import json; from tools import docs; print(json.dumps(docs.pages()))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["cli.md", "configuration.md"])
def test_generated_page_is_current(generated: dict[str, str], name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written.rstrip() == generated[name].rstrip(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
