"""Checkpoints striped over many objects, and the faces through which programs read them.

`open(url)`, `open_tree(url)`, `put(path, url)`, `get(url, path)` and `verify(url)` load with their
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.stripedfs.file import StripedFile, open, open_tree  # noqa: A004 - its name
    from bootseer.stripedfs.read.get import get
    from bootseer.stripedfs.read.verify import verify
    from bootseer.stripedfs.write.put import put

__all__ = ["StripedFile", "get", "open", "open_tree", "put", "verify"]

_PLACES = {
    "StripedFile": "file",
    "open": "file",
    "open_tree": "file",
    "get": "read.get",
    "put": "write.put",
    "verify": "read.verify",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"bootseer.stripedfs.{place}"), name)
