"""What a start reads: a trace summed up by time, directory, package and file. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bootseer.blockimage.filemap import FileMap
from bootseer.blockimage.pack_writer import owners
from bootseer.blocks.trace.trace_file import Trace

BUCKETS = 60
MIN_SHARE = 0.02  # a directory with less of the hot bytes is counted with its parent
PADDING = "(between files)"
_SITE = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)")
_STDLIB = re.compile(r"(?:^|/)lib(?:64)?/(?:python|pypy)[0-9.]+(?:/|$)")
_DIST_INFO = re.compile(r"(.+?)-[^-]*\.(?:dist|egg)-info$")
_LIBS = re.compile(r"(?:^|/)lib(?:32|64)?/(?:[^/]*-linux-[^/]*/)?([^/]+?)\.so(?:[.0-9]*)$")
_SHARE = re.compile(
    r"^(?:usr/)?(?:share|lib(?:exec|32|64)?|include)/(?:[^/]*-linux-[^/]*/)?([^/]+)/"
)


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A directory, package or file: its touched bytes, and its size."""

    name: str
    touched_bytes: int
    size_bytes: int
    files: int
    first_touch_ms: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was touched first within `[start_ms, end_ms)`."""

    start_ms: int
    end_ms: int
    touched_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace in figures. Rows are sorted by touched bytes, the most first."""

    workload: str
    starts: int
    image_bytes: int
    hot_bytes: int
    image_files: int
    hot_files: int
    buckets: tuple[Bucket, ...]
    directories: tuple[SummaryRow, ...]
    packages: tuple[SummaryRow, ...]
    files: tuple[SummaryRow, ...]

    @property
    def duration_ms(self) -> int:
        """From the beginning to the last first touch."""
        return self.buckets[-1].end_ms if self.buckets else 0

    def as_dict(self, most_files: int | None = None) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "workload": self.workload,
            "starts": self.starts,
            "image_bytes": self.image_bytes,
            "hot_bytes": self.hot_bytes,
            "image_files": self.image_files,
            "hot_files": self.hot_files,
            "over_time": [
                {"from_s": b.start_ms / 1000, "to_s": b.end_ms / 1000, "bytes": b.touched_bytes}
                for b in self.buckets
            ],
            "directories": [_row_as_dict(row) for row in self.directories],
            "packages": [_row_as_dict(row) for row in self.packages],
            "files": [_row_as_dict(row) for row in self.files[:most_files]],
        }


def _row_as_dict(row: SummaryRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "touched_bytes": row.touched_bytes,
        "size_bytes": row.size_bytes,
        "files": row.files,
        "first_touch_s": row.first_touch_ms / 1000,
    }


def package_of(path: str) -> str:
    """The package that a file belongs to, as far as its path says."""
    if match := _SITE.search(path):
        name = match[1]
        if dist_info := _DIST_INFO.fullmatch(name):
            return dist_info[1].replace("-", "_").lower()
        if path.endswith(f"/{name}"):
            return name.split(".", 1)[0].lower()  # a module of one file
        return name.removesuffix(".libs").replace("-", "_").lower()
    if _STDLIB.search(path):
        return "Python's standard library"
    if match := _LIBS.search(path):
        return match[1].split("-")[0] or match[1]
    if match := _SHARE.match(path):
        return match[1]
    head, slash, _ = path.rpartition("/")
    return f"{head}{slash}"


def summarise(trace: Trace, files: FileMap, *, buckets: int = BUCKETS) -> Summary:
    """The figures of a trace, from which what too few starts touched was dropped already."""
    spans = [(e.offset, e.length) for e in trace.extents]
    touched: Counter[str] = Counter()
    first: dict[str, int] = {}
    likely = owners(files, spans)
    for extent in trace.extents:
        left = extent.length
        for range_ in likely.ranges([(extent.offset, extent.length)]):
            if left <= 0:
                break  # further files share these bytes with those counted already
            counted = min(left, range_.length)
            path = _decode_path(range_.path)
            touched[path] += counted
            first.setdefault(path, extent.first_touch_ms)
            left -= counted
        if left > 0:
            touched[PADDING] += left
            first.setdefault(PADDING, extent.first_touch_ms)
    sizes = {_decode_path(file.path): file.size_bytes for file in files.files}
    rows = [
        SummaryRow(path, count, sizes.get(path, 0), 1, first[path])
        for path, count in touched.items()
    ]
    file_rows = [row for row in rows if row.name != PADDING]
    return Summary(
        trace.workload,
        trace.starts,
        trace.size_bytes,
        trace.touched_bytes(),
        len(files.files),
        len(file_rows),
        _by_time(trace, buckets),
        _by_directory(rows, sizes),
        _by_package(file_rows, sizes),
        _sort(rows),
    )


def _decode_path(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _sort(rows: Iterable[SummaryRow]) -> tuple[SummaryRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.touched_bytes, row.name)))


def _by_time(trace: Trace, count: int) -> tuple[Bucket, ...]:
    if not trace.extents:
        return ()
    last = max(extent.first_touch_ms for extent in trace.extents)
    width = max(1, -(-(last + 1) // count))
    sums: Counter[int] = Counter()
    for extent in trace.extents:
        sums[extent.first_touch_ms // width] += extent.length
    return tuple(Bucket(n * width, (n + 1) * width, sums[n]) for n in range(last // width + 1))


def _by_package(rows: Iterable[SummaryRow], sizes: Mapping[str, int]) -> tuple[SummaryRow, ...]:
    names = {path: package_of(path) for path in sizes}
    sizes_of: Counter[str] = Counter()
    for path, size in sizes.items():
        sizes_of[names[path]] += size
    groups: defaultdict[str, list[SummaryRow]] = defaultdict(list)
    for row in rows:
        groups[names.get(row.name) or package_of(row.name)].append(row)
    return _sort(_sum(name, members, sizes_of[name]) for name, members in groups.items())


def _sum(name: str, rows: list[SummaryRow], size_bytes: int) -> SummaryRow:
    return SummaryRow(
        name,
        sum(row.touched_bytes for row in rows),
        size_bytes,
        sum(row.files for row in rows),
        min(row.first_touch_ms for row in rows),
    )


def _by_directory(rows: list[SummaryRow], sizes: Mapping[str, int]) -> tuple[SummaryRow, ...]:
    """Directories with enough of the hot bytes for a row; others count for their parents."""
    least = MIN_SHARE * sum(row.touched_bytes for row in rows)
    groups: defaultdict[str, list[SummaryRow]] = defaultdict(list)
    for row in rows:
        groups[_parent(row.name) if row.name != PADDING else PADDING].append(row)
    for depth in range(max((name.count("/") for name in groups), default=0), 0, -1):
        for name in [name for name in groups if name.count("/") == depth]:
            if sum(row.touched_bytes for row in groups[name]) < least:
                groups[_parent(name)] += groups.pop(name)
    sizes_of: Counter[str] = Counter()
    for path, size in sizes.items():
        name = _parent(path)
        while name not in groups and name:
            name = _parent(name)
        sizes_of[name] += size
    return _sort(_sum(name or "/", members, sizes_of[name]) for name, members in groups.items())


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
