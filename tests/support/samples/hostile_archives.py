"""Archives no archiver of ours would make: each attack as a real, well-digested archive."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import zstandard

from bootseer.depsnap.format import index
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.types import Digest

ROOT = "/recorded/root"


def entry(path: str, kind: str = "f", **more: Any) -> dict[str, Any]:
    """One entry; `data` is a file's content, `link` a link's text, `size` may lie."""
    return {"path": path, "kind": kind, "mode": 0o755 if kind == "d" else 0o644, **more}


def build(path: Path, entries: list[dict[str, Any]], **document: Any) -> Digest:
    """Write an archive of these entries below one root, its directory added; its digest.

    `document` overrides parts of the index, `frame` one field of the only frame.
    """
    rows = [entry("", "d"), *entries]
    raw = b""
    units: list[int] = []
    for number, row in enumerate(rows):
        if row["kind"] == "f":
            units += [number, 0, len(raw)]
            raw += row.get("data", b"")
    frame = document.pop("frame", {})
    stored = frame.get("bytes") or zstandard.ZstdCompressor().compress(raw)
    digest = hashlib.sha256(stored).hexdigest()
    table = {
        "version": 1,
        "block": BLOCK,
        "tree": "0" * 64,
        "roots": [{"root": ROOT, "count": len(rows), "deleted": []}],
        "path": [r["path"] for r in rows],
        "kind": "".join(r["kind"] for r in rows),
        "mode": [r["mode"] for r in rows],
        "uid": [r.get("uid", 0) for r in rows],
        "gid": [r.get("gid", 0) for r in rows],
        "mtime_ns": [1_600_000_000_000_000_000] * len(rows),
        "size": [r.get("size", len(r.get("data", b""))) for r in rows],
        "link": {str(n): r["link"] for n, r in enumerate(rows) if "link" in r},
        "xattrs": {
            str(n): [[k, base64.b64encode(v).decode()] for k, v in r["xattrs"].items()]
            for n, r in enumerate(rows)
            if "xattrs" in r
        },
        "segments": {str(n): r["segments"] for n, r in enumerate(rows) if "segments" in r},
        "implied": [],
        "frames": [
            [
                len(stored),
                frame.get("raw", len(raw)),
                frame.get("digest", digest),
                len(rows),
                frame.get("units", units),
            ]
        ],
        "skipped": [],
        **document,
    }
    tail, index_digest = index.encode(table)
    path.write_bytes(stored + tail)
    return index_digest
