"""Dictionaries that keep what was put into them last."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")


def put_youngest(kept: dict[K, V], key: K, value: V, most: int) -> K | None:
    """Set a value; returns the key set longest ago, which goes where there are more than `most`."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) <= most:
        return None
    oldest = next(iter(kept))
    del kept[oldest]
    return oldest
