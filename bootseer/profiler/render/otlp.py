"""A start as OTLP/JSON traces, for any OpenTelemetry backend (pure).

Format: `ExportTraceServiceRequest` of opentelemetry-proto 1.x in OTLP's JSON encoding: ids in
hexadecimal, 64-bit integers as strings, enumerations as numbers. Times are corrected for skew.
Points become spans of no length. A begin without an end, which OTLP cannot express, becomes a span
up to its process's last event, with status error and `bootseer.killed`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import bootseer
from bootseer.profiler.report.analysis import Prepared
from bootseer.profiler.report.lanes import shifts_of
from bootseer.profiler.report.load.columns import extent_of
from bootseer.profiler.report.load.spans import Identity, Source, Span
from bootseer.profiler.report.model import Json

_INTERNAL, _OK, _ERROR = 1, 1, 2


def render(prepared: Prepared) -> str:
    """The request as one JSON document."""
    trace_id = _hex_id(prepared.summary.trace_id, 32)
    scope = {"name": "bootseer", "version": bootseer.__version__}
    resources = []
    for source, shift in zip(
        prepared.start.sources, shifts_of(prepared.start, prepared.skew), strict=True
    ):
        _, last_ns = extent_of(source.spans)
        spans = [
            _span(span, source, number, trace_id, shift, last_ns)
            for number, span in enumerate(source.spans)
        ]
        resources.append(
            {
                "resource": {"attributes": _attributes(_resource_attributes(source.identity))},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
        )
    return json.dumps({"resourceSpans": resources}, separators=(",", ":")) + "\n"


def _hex_id(text: str, digits: int) -> str:
    """The id itself where it is valid, else a hash of it: OTLP allows only full-length ids."""
    if len(text) == digits and not text.strip("0123456789abcdef") and text.strip("0"):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:digits]


def _resource_attributes(identity: Identity) -> dict[str, object]:
    attributes: dict[str, object] = {
        "service.name": "bootseer",
        "k8s.node.name": identity.node,
        "k8s.pod.name": identity.pod,
        "process.pid": identity.process_id,
        "bootseer.rank": identity.rank,
        "bootseer.attempt": identity.attempt,
        "bootseer.job_uid": identity.job_uid,
        "bootseer.boot_id": identity.boot_id,
        "bootseer.gpu.count": identity.gpus,
    }
    return {key: value for key, value in attributes.items() if value is not None}


def _span(
    span: Span, source: Source, number: int, trace_id: str, shift_ns: int, last_ns: int
) -> Json:
    began = span.begin_ns if span.begin_ns is not None else span.end_ns
    ended = span.end_ns if span.end_ns is not None else max(last_ns, began or 0)
    assert began is not None
    attributes: dict[str, object] = dict(span.attributes or {})
    if span.wait:
        attributes["bootseer.wait"] = True
    if span.end_ns is None:
        attributes["bootseer.killed"] = True
    if span.status == "fallback":
        attributes["bootseer.status"] = "fallback"
    failed = span.status == "error" or span.end_ns is None
    out: Json = {
        "traceId": trace_id,
        "spanId": _hex_id(span.span_id or f"{source.file}:{number}", 16),
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(max(0, began + shift_ns)),
        "endTimeUnixNano": str(max(0, ended + shift_ns)),
        "attributes": _attributes(attributes),
        "status": {"code": _ERROR if failed else _OK},
    }
    if span.parent_id:
        out["parentSpanId"] = _hex_id(span.parent_id, 16)
    return out


def _attributes(values: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        # Wider integers than OTLP's 64 bits are kept as text.
        return {"intValue": str(value)} if abs(value) < 1 << 63 else {"stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value.encode("utf-8", "replace").decode("utf-8")}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _attributes(value)}}
    return {}
