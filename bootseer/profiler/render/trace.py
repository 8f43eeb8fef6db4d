"""A start as a Chrome trace, to be opened in Perfetto or chrome://tracing (pure).

Format: "Trace Event Format" (JSON object form): `X` complete events with `ts` and `dur` in
microseconds, `i` instants, `B` without `E` for phases that were killed, `M` metadata naming
processes and threads. A node is a process, a rank a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from bootseer.profiler.report.analysis import Prepared
from bootseer.profiler.report.lanes import shifts_of
from bootseer.profiler.report.load.spans import Source, Span
from bootseer.profiler.report.model import Json
from bootseer.profiler.report.phase_totals import node_order


def render(prepared: Prepared) -> str:
    """The trace document; time zero is the start's first event, clock skew corrected."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(prepared))
    other = json.dumps({"trace_id": prepared.summary.trace_id, "tool": "bootseer"})
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'


def _events(prepared: Prepared) -> Iterator[Json]:
    start, zero_ns = prepared.start, prepared.lanes.zero_ns
    nodes = sorted({source.identity.node for source in start.sources}, key=node_order)
    process_of = {node: number for number, node in enumerate(nodes, start=1)}
    for node, number in process_of.items():
        yield _name_event("process_name", number, 0, node)
    named: set[tuple[int, int]] = set()
    for source, shift in zip(start.sources, shifts_of(start, prepared.skew), strict=True):
        identity = source.identity
        track = (process_of[identity.node], _thread_of(source))
        if track not in named:
            named.add(track)
            label = f"rank {identity.rank}" if identity.rank is not None else "node"
            yield _name_event("thread_name", *track, label)
        for span in source.spans:
            yield _span_event(span, shift - zero_ns, track)


def _thread_of(source: Source) -> int:
    """Ranks are threads 1 and up; files without a rank keep their process ids, well above."""
    identity = source.identity
    if identity.rank is not None:
        return identity.rank + 1
    return 10_000_000 + (identity.process_id or 0)


def _name_event(kind: str, process: int, thread: int, text: str) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _span_event(span: Span, shift_ns: int, track: tuple[int, int]) -> Json:
    began = span.begin_ns if span.begin_ns is not None else span.end_ns
    assert began is not None
    event: Json = {
        "name": span.name,
        "cat": "wait" if span.wait else "work",
        "pid": track[0],
        "tid": track[1],
        "ts": (began + shift_ns) / 1000,
    }
    arguments: Json = dict(span.attributes or {})
    if span.status != "ok":
        arguments["status"] = span.status
    if arguments:
        event["args"] = arguments
    if span.point or span.begin_ns is None:
        return {**event, "ph": "i", "s": "t"}
    if span.end_ns is None:
        return {**event, "ph": "B"}
    return {**event, "ph": "X", "dur": (span.end_ns - span.begin_ns) / 1000}
