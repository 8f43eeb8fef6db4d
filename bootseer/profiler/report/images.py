"""The image phase: what each image that was mounted lazily, or read ahead, cost (pure).

Its events are `image.mount`, `image.replay`, `image.reads`, `image.record` and `image.fault`, and
`fetch.stats` of source class `image`; docs/images.md says what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootseer.profiler.report.model import ImageUse
from bootseer.profiler.report.records import Source, Span, Start

_NAMES = frozenset(("image.mount", "image.replay", "image.reads", "image.record", "image.fault"))
_STATS = "fetch.stats"
_CLASS = "bootseer.source_class"
_PREFIX = "bootseer.image."


def images(start: Start) -> tuple[ImageUse, ...]:
    """Every image of a start, a row for each process that served it or read it ahead."""
    found = (_used(source) for source in start.sources)
    rows = [use for use in found if use is not None]
    return tuple(sorted(rows, key=lambda use: (use.node, use.ref or "")))


def _used(source: Source) -> ImageUse | None:
    mine = [span for span in source.spans if span.name in _NAMES and span.attributes is not None]
    if not mine or not any(span.name != "image.fault" for span in mine):
        return None
    mount = _first(mine, "image.mount")
    replay = _first(mine, "image.replay")
    reads = _first(mine, "image.reads") or replay
    record = _first(mine, "image.record")
    about = {**_plain(record), **_plain(replay), **_plain(mount)}
    fetched = [
        span.attributes
        for span in source.spans
        if span.name == _STATS and span.attributes and span.attributes.get(_CLASS) == "image"
    ]
    files = about.get("mode") == "files"
    hot_set = about.get("hot_set")
    return ImageUse(
        node=source.identity.node,
        ref=_text(about.get("ref")),
        workload=_text(about.get("workload")) or "",
        mode="files" if files else "mounted",
        hot_set=bool(hot_set) if isinstance(hot_set, str) else (replay is not None or None),
        offline=about.get("offline") is True,
        ready_s=_seconds(mount),
        replay_s=_seconds(replay),
        replay_bytes=_number(replay, "bootseer.bytes" if files else f"{_PREFIX}replayed_bytes"),
        reads=_number(reads, f"{_PREFIX}reads"),
        read_bytes=_number(reads, f"{_PREFIX}bytes"),
        waits=_number(reads, f"{_PREFIX}waits"),
        blocked_s=_scaled(_number(reads, f"{_PREFIX}blocked_ns")),
        demand_bytes=_sum(fetched, "bootseer.demand_bytes"),
        hot_bytes=_sum(fetched, "bootseer.hot_bytes"),
        fill_bytes=_sum(fetched, "bootseer.background_bytes"),
        cache_bytes=_sum(fetched, "bootseer.cache_bytes"),
        recorded_bytes=_number(record, "bootseer.bytes"),
        faults=sum(span.name == "image.fault" for span in mine),
    )


def _first(spans: list[Span], name: str) -> Span | None:
    """The last of a name that tells something: counters only grow."""
    return next((span for span in reversed(spans) if span.name == name), None)


def _plain(span: Span | None) -> Mapping[str, Any]:
    """A span's attributes of the image, without their prefix."""
    attributes = (span.attributes if span is not None else None) or {}
    return {k.removeprefix(_PREFIX): v for k, v in attributes.items() if k.startswith(_PREFIX)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(span: Span | None, name: str) -> int | None:
    value = (span.attributes or {}).get(name) if span is not None else None
    return value if type(value) is int and value >= 0 else None


def _scaled(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def _seconds(span: Span | None) -> float | None:
    """How long it took: its own length, or what a point says of it."""
    if span is None:
        return None
    if not span.point and span.begin_ns is not None and span.end_ns is not None:
        return max(0, span.end_ns - span.begin_ns) / 1e9
    milliseconds = _number(span, "bootseer.duration_ms")
    if milliseconds is not None:
        return milliseconds / 1e3
    return _scaled(_number(span, "bootseer.duration_ns"))


def _sum(found: list[Mapping[str, object]], name: str) -> int | None:
    """What all events say together; None when there are none."""
    values = [value for one in found if type(value := one.get(name, 0)) is int and value >= 0]
    return sum(values) if found else None
