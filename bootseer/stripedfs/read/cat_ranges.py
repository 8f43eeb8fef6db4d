"""Many ranges of many files at once, for fsspec's `cat_ranges`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import BootseerError
from bootseer.stripedfs.new_bytes import NewBytes
from bootseer.stripedfs.read.sources import FileSource, as_damage
from bootseer.stripedfs.shared_fetcher import shared_fetcher
from bootseer.stripedfs.workers import call_in_parallel

PathRange = tuple[str, int | None, int | None]
Bounds = Callable[[int | None, int | None, int], tuple[int, int]]


def read_ranges(
    open_path: Callable[[str], FileSource | Exception],
    path_ranges: Sequence[PathRange],
    *,
    bounds: Bounds,
    fetcher: Fetcher | None,
) -> list[bytes | Exception]:
    """The bytes of each (path, start, end), or its error; no block is fetched twice.

    `bounds` makes offsets of a start, an end and a size.
    """
    paths = list(dict.fromkeys(path for path, _, _ in path_ranges))
    opened = dict(zip(paths, call_in_parallel(open_path, paths), strict=True))
    fetcher = fetcher if fetcher is not None else shared_fetcher()
    results: list[bytes | Exception] = [b""] * len(path_ranges)
    ranges: list[_Range] = []
    for number, (path, start, end) in enumerate(path_ranges):
        source = opened[path]
        if isinstance(source, Exception):
            results[number] = source
            continue
        first, last = bounds(start, end, source.size_bytes)
        if last > first:
            ranges.append(_Range(number, source, first, last - first))
    try:
        fetcher.read_many([(r.source, r.offset, r.view) for r in ranges])
        for each in {id(r.source): r for r in ranges}.values():
            each.source.confirm()
    except BootseerError:
        # One failed, and the others are in memory or quickly read again: find out which it was.
        for each in ranges:
            results[each.number] = each.read(fetcher)
        return results
    for each in ranges:
        results[each.number] = each.take()
    return results


class _Range:
    """One range and its memory, which becomes the result without a copy."""

    __slots__ = ("_new", "number", "offset", "source", "view")

    def __init__(self, number: int, source: FileSource, offset: int, length: int) -> None:
        self.number, self.source, self.offset = number, source, offset
        self._new = NewBytes(length)
        self.view = self._new.view

    def take(self) -> bytes:
        return self._new.take(len(self.view))

    def read(self, fetcher: Fetcher) -> bytes | Exception:
        try:
            fetcher.read_into(self.source, self.offset, self.view)
            self.source.confirm()
        except BootseerError as error:
            return as_damage(error, self.source)
        return self.take()
