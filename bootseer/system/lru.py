"""Dictionaries of limited size that drop their oldest entry."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")


def put_youngest(kept: dict[K, V], key: K, value: V, most: int) -> K | None:
    """Set an entry as the youngest; drop the oldest where there are more than `most`.

    Returns the key of the dropped entry.
    """
    kept.pop(key, None)
    kept[key] = value
    if len(kept) <= most:
        return None
    oldest = next(iter(kept))
    del kept[oldest]
    return oldest
