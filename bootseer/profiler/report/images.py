"""The image phase: what each image that was mounted lazily, or read ahead, cost (pure).

Its events are `image.mount`, `image.replay`, `image.reads`, `image.record` and `image.fault`;
docs/images.md says what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import ImageUse

_NAMES = frozenset(("image.mount", "image.replay", "image.reads", "image.record", "image.fault"))
_PREFIX = "bootseer.image."


def images(start: Start) -> tuple[ImageUse, ...]:
    """Every image of a start, a row for each process that served it or read it ahead."""
    found = (_used(source) for source in start.sources)
    rows = [use for use in found if use is not None]
    return tuple(sorted(rows, key=lambda use: (use.node, use.ref or "")))


def _used(source: Source) -> ImageUse | None:
    if _NAMES.isdisjoint(columns_of(source.spans).names):
        return None
    mine = [span for span in source.spans if span.name in _NAMES and span.attributes is not None]
    if not mine or not any(span.name != "image.fault" for span in mine):
        return None
    mount, replay = _last(mine, "image.mount"), _last(mine, "image.replay")
    reads, record = _last(mine, "image.reads"), _last(mine, "image.record")
    about = {**_plain(record), **_plain(replay), **_plain(mount)}
    counted = _plain(reads)
    mode = _text(about.get("mode")) or "lazy"
    hot_set = _text(about.get("hot_set"))
    if hot_set is None and replay is not None:
        hot_set = "used" if replay.status == "ok" else "damaged"
    return ImageUse(
        node=source.identity.node,
        ref=_text(about.get("ref")),
        workload=_text(about.get("workload")) or "",
        mode=mode,
        hot_set=hot_set,
        ready_s=_seconds(mount),
        replay_s=_seconds(replay),
        replay_bytes=_number(_all(replay), "bootseer.bytes"),
        reads=_number(counted, "demand_reads"),
        read_bytes=_number(counted, "demand_bytes"),
        missed_reads=_number(counted, "demand_misses"),
        blocked_s=_float(counted.get("blocked_s")),
        boot_bytes=_number(counted, "bytes.boot"),
        hot_bytes=_number(counted, "bytes.hot"),
        cold_bytes=_number(counted, "bytes.cold"),
        fill_bytes=_number(counted, "bytes.fill"),
        cache_bytes=_number(counted, "bytes.cache"),
        recorded_bytes=_number(_all(record), "bootseer.bytes"),
        faults=sum(span.name == "image.fault" for span in mine),
    )


def _last(spans: list[Span], name: str) -> Span | None:
    """The last of a name: counters only grow."""
    return next((span for span in reversed(spans) if span.name == name), None)


def _all(span: Span | None) -> Mapping[str, Any]:
    return (span.attributes if span is not None else None) or {}


def _plain(span: Span | None) -> Mapping[str, Any]:
    """A span's attributes of the image, without their prefix."""
    found = _all(span).items()
    return {k.removeprefix(_PREFIX): v for k, v in found if k.startswith(_PREFIX)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(attributes: Mapping[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    return value if type(value) is int and value >= 0 else None


def _float(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and value >= 0 else None  # type: ignore


def _seconds(span: Span | None) -> float | None:
    """How long it took: its own length, or what a point says of it."""
    if span is None:
        return None
    if not span.point and span.begin_ns is not None and span.end_ns is not None:
        return max(0, span.end_ns - span.begin_ns) / 1e9
    milliseconds = _number(_all(span), "bootseer.duration_ms")
    return None if milliseconds is None else milliseconds / 1e3
