"""What each image that was mounted lazily, or whose files were read ahead, cost (pure).

Its events are `image.mount`, `image.replay`, `image.reads`, `image.record` and `image.fault`;
docs/images.md describes their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import ImageUse

_NAMES = frozenset(("image.mount", "image.replay", "image.reads", "image.record", "image.fault"))
_PREFIX = "bootseer.image."


def find_image_uses(start: Start) -> tuple[ImageUse, ...]:
    """Every image of a start, once for each process that served it or read it ahead."""
    uses = (_find_image_use(source) for source in start.sources)
    known = [use for use in uses if use is not None]
    return tuple(sorted(known, key=lambda use: (use.node, use.ref or "")))


def _find_image_use(source: Source) -> ImageUse | None:
    if _NAMES.isdisjoint(columns_of(source.spans).names):
        return None
    mine = [span for span in source.spans if span.name in _NAMES and span.attributes is not None]
    if not mine or not any(span.name != "image.fault" for span in mine):
        return None
    mount, replay = _find_last(mine, "image.mount"), _find_last(mine, "image.replay")
    reads, record = _find_last(mine, "image.reads"), _find_last(mine, "image.record")
    image = {**_image_attributes(record), **_image_attributes(replay), **_image_attributes(mount)}
    counts = _image_attributes(reads)
    mode = _text(image.get("mode")) or "lazy"
    hot_set = _text(image.get("hot_set"))
    if hot_set is None and replay is not None:
        hot_set = "used" if replay.status == "ok" else "damaged"
    return ImageUse(
        node=source.identity.node,
        ref=_text(image.get("ref")),
        workload=_text(image.get("workload")) or "",
        mode=mode,
        hot_set=hot_set,
        ready_s=_duration_s(mount),
        replay_s=_duration_s(replay),
        replay_bytes=_count(_all_attributes(replay), "bootseer.bytes"),
        reads=_count(counts, "demand_reads"),
        read_bytes=_count(counts, "demand_bytes"),
        missed_reads=_count(counts, "demand_misses"),
        blocked_s=_seconds(counts.get("blocked_s")),
        boot_bytes=_count(counts, "bytes.boot"),
        hot_bytes=_count(counts, "bytes.hot"),
        cold_bytes=_count(counts, "bytes.cold"),
        fill_bytes=_count(counts, "bytes.fill"),
        cache_bytes=_count(counts, "bytes.cache"),
        recorded_bytes=_count(_all_attributes(record), "bootseer.bytes"),
        faults=sum(span.name == "image.fault" for span in mine),
    )


def _find_last(spans: list[Span], name: str) -> Span | None:
    """The last span of a name: counters only grow."""
    return next((span for span in reversed(spans) if span.name == name), None)


def _all_attributes(span: Span | None) -> Mapping[str, Any]:
    return (span.attributes if span is not None else None) or {}


def _image_attributes(span: Span | None) -> Mapping[str, Any]:
    """A span's attributes that describe the image, without their prefix."""
    attributes = _all_attributes(span).items()
    return {k.removeprefix(_PREFIX): v for k, v in attributes if k.startswith(_PREFIX)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(attributes: Mapping[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    return value if type(value) is int and value >= 0 else None


def _seconds(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and value >= 0 else None  # type: ignore


def _duration_s(span: Span | None) -> float | None:
    """How long a span took: its own length, or the duration that a point states."""
    if span is None:
        return None
    if not span.point and span.begin_ns is not None and span.end_ns is not None:
        return max(0, span.end_ns - span.begin_ns) / 1e9
    milliseconds = _count(_all_attributes(span), "bootseer.duration_ms")
    return None if milliseconds is None else milliseconds / 1e3
