"""A package index as files: what pip reads of one, for a folder of wheels (PEP 503)."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import defaultdict
from pathlib import Path

_PAGE = "<!DOCTYPE html><html><body>{links}</body></html>\n"


def write_index(wheels: Path, root: Path) -> int:
    """Write `root`/simple and `root`/wheels; returns the bytes of all wheels."""
    shutil.rmtree(root, ignore_errors=True)
    files = root / "wheels"
    files.mkdir(parents=True)
    pages: dict[str, list[str]] = defaultdict(list)
    size_bytes = 0
    for wheel in sorted(wheels.glob("*.whl")):
        shutil.copyfile(wheel, files / wheel.name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        project = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        link = f'<a href="../../wheels/{wheel.name}#sha256={digest}">{wheel.name}</a>'
        pages[project].append(link)
        size_bytes += wheel.stat().st_size
    for project, links in pages.items():
        folder = root / "simple" / project
        folder.mkdir(parents=True)
        page = _PAGE.format(links="<br>".join(links))
        (folder / "index.html").write_text(page, encoding="utf-8")
    (root / "index.html").write_text(_PAGE.format(links=""), encoding="utf-8")
    return size_bytes
