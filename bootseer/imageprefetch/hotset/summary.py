"""What a start really reads: a hot set by time, directory, package and file (pure)."""

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
class Part:
    """A directory, package or file: its touched bytes, and all that it has."""

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
    """A hot set in figures. Parts are sorted by touched bytes, the most first."""

    workload: str
    starts: int
    image_bytes: int
    hot_bytes: int
    image_files: int
    hot_files: int
    buckets: tuple[Bucket, ...]
    directories: tuple[Part, ...]
    packages: tuple[Part, ...]
    files: tuple[Part, ...]

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
            "directories": [_as_dict(part) for part in self.directories],
            "packages": [_as_dict(part) for part in self.packages],
            "files": [_as_dict(part) for part in self.files[:most_files]],
        }


def _as_dict(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "touched_bytes": part.touched_bytes,
        "size_bytes": part.size_bytes,
        "files": part.files,
        "first_touch_s": part.first_touch_ms / 1000,
    }


def package_of(path: str) -> str:
    """What a file belongs to, as far as its path tells."""
    if found := _SITE.search(path):
        name = found[1]
        if about := _DIST_INFO.fullmatch(name):
            return about[1].replace("-", "_").lower()
        if path.endswith(f"/{name}"):
            return name.split(".", 1)[0].lower()  # a module of one file
        return name.removesuffix(".libs").replace("-", "_").lower()
    if _STDLIB.search(path):
        return "Python's standard library"
    if found := _LIBS.search(path):
        return found[1].split("-")[0] or found[1]
    if found := _SHARE.match(path):
        return found[1]
    head, slash, _ = path.rpartition("/")
    return f"{head}{slash}"


def summarise(trace: Trace, files: FileMap, *, buckets: int = BUCKETS) -> Summary:
    """The figures of a trace (with what too few starts touched already dropped)."""
    spans = [(e.offset, e.length) for e in trace.extents]
    touched: Counter[str] = Counter()
    first: dict[str, int] = {}
    likely = owners(files, spans)
    for extent in trace.extents:
        left = extent.length
        for one in likely.ranges([(extent.offset, extent.length)]):
            if left <= 0:
                break  # what further files share with those named already
            counted = min(left, one.length)
            path = _shown(one.path)
            touched[path] += counted
            first.setdefault(path, extent.first_touch_ms)
            left -= counted
        if left > 0:
            touched[PADDING] += left
            first.setdefault(PADDING, extent.first_touch_ms)
    sizes = {_shown(file.path): file.size_bytes for file in files.files}
    rows = [
        Part(path, count, sizes.get(path, 0), 1, first[path]) for path, count in touched.items()
    ]
    shown = [row for row in rows if row.name != PADDING]
    return Summary(
        trace.workload,
        trace.starts,
        trace.size_bytes,
        trace.touched_bytes(),
        len(files.files),
        len(shown),
        _over_time(trace, buckets),
        _directories(rows, sizes),
        _grouped(shown, sizes),
        _sorted(rows),
    )


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _sorted(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.touched_bytes, part.name)))


def _over_time(trace: Trace, count: int) -> tuple[Bucket, ...]:
    if not trace.extents:
        return ()
    last = max(extent.first_touch_ms for extent in trace.extents)
    width = max(1, -(-(last + 1) // count))
    sums: Counter[int] = Counter()
    for extent in trace.extents:
        sums[extent.first_touch_ms // width] += extent.length
    return tuple(Bucket(n * width, (n + 1) * width, sums[n]) for n in range(last // width + 1))


def _grouped(rows: Iterable[Part], sizes: Mapping[str, int]) -> tuple[Part, ...]:
    names = {path: package_of(path) for path in sizes}
    whole: Counter[str] = Counter()
    for path, size in sizes.items():
        whole[names[path]] += size
    groups: defaultdict[str, list[Part]] = defaultdict(list)
    for row in rows:
        groups[names.get(row.name) or package_of(row.name)].append(row)
    return _sorted(_sum(name, parts, whole[name]) for name, parts in groups.items())


def _sum(name: str, parts: list[Part], size_bytes: int) -> Part:
    return Part(
        name,
        sum(part.touched_bytes for part in parts),
        size_bytes,
        sum(part.files for part in parts),
        min(part.first_touch_ms for part in parts),
    )


def _directories(rows: list[Part], sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """Directories that have enough of the hot bytes to stand alone; the rest in their parents."""
    least = MIN_SHARE * sum(row.touched_bytes for row in rows)
    groups: defaultdict[str, list[Part]] = defaultdict(list)
    for row in rows:
        groups[_parent(row.name) if row.name != PADDING else PADDING].append(row)
    for depth in range(max((name.count("/") for name in groups), default=0), 0, -1):
        for name in [name for name in groups if name.count("/") == depth]:
            if sum(part.touched_bytes for part in groups[name]) < least:
                groups[_parent(name)] += groups.pop(name)
    whole: Counter[str] = Counter()
    for path, size in sizes.items():
        name = _parent(path)
        while name not in groups and name:
            name = _parent(name)
        whole[name] += size
    return _sorted(_sum(name or "/", parts, whole[name]) for name, parts in groups.items())


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
