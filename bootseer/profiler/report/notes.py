"""Notes of phases that went well, such as that an install's packages may be out of date (pure).

`deps run` writes them with its span. They are neither faults nor fall-backs, so no incidents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bootseer.profiler.report.load.columns import Spans, columns_of
from bootseer.profiler.report.load.spans import Start
from bootseer.profiler.report.model import NAMED_NODES, Note

_ATTRIBUTES = {"deps.install": "bootseer.deps.notes"}
"""The attribute that holds each phase's notes: `depsnap` may not be imported here."""


def find_notes(start: Start, shifts: Sequence[int], zero_ns: int) -> tuple[Note, ...]:
    """Notes of all processes, equal ones joined, in order of their first occurrence."""
    indices_by_form: dict[int, list[int]] = {}
    seen_by_note: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for source, shift in zip(start.sources, shifts, strict=True):
        spans = columns_of(source.spans)
        if spans.attributes is None:
            continue
        form = id(spans.form)  # many writers have it in common
        if form not in indices_by_form:
            indices_by_form[form] = [n for n, name in enumerate(spans.names) if name in _ATTRIBUTES]
        for index in indices_by_form[form]:
            text = _find_text(spans, index)
            if text:
                at_ns = _find_moment_ns(spans, index) + shift - zero_ns
                seen_by_note[spans.names[index], text].append((at_ns / 1e9, source.identity.node))
    notes = [
        Note(phase, text, len(seen), tuple(sorted({node for _, node in seen})[:NAMED_NODES]),
             min(seen)[0])
        for (phase, text), seen in seen_by_note.items()
    ]  # fmt: skip
    return tuple(sorted(notes, key=lambda note: (note.first_s, note.phase, note.text)))


def _find_text(spans: Spans, index: int) -> str:
    attributes = spans.attributes[index] if spans.attributes is not None else None
    value = attributes.get(_ATTRIBUTES[spans.names[index]]) if attributes else None
    return value if isinstance(value, str) else ""


def _find_moment_ns(spans: Spans, index: int) -> int:
    began, ended = spans.moments[2 * index : 2 * index + 2]
    return (began if ended is None else ended) or 0
