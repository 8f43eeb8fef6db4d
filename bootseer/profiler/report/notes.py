"""What a phase that went well says besides: that an install's packages may be out of date (pure).

`deps run` writes it with its span. It is no fault and no fall-back, so no incident.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bootseer.profiler.report.load.columns import Spans, columns_of
from bootseer.profiler.report.load.spans import Start
from bootseer.profiler.report.model import NAMED_NODES, Note

_ATTRIBUTES = {"deps.install": "bootseer.deps.notes"}
"""By phase what it has notes in: `depsnap` may not be imported here."""


def find_notes(start: Start, shifts: Sequence[int], zero_ns: int) -> tuple[Note, ...]:
    """Notes of all processes, equal ones joined, in order of their first occurrence."""
    places: dict[int, list[int]] = {}
    found: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for source, shift in zip(start.sources, shifts, strict=True):
        spans = columns_of(source.spans)
        if spans.attributes is None:
            continue
        form = id(spans.form)  # many writers have it in common
        if form not in places:
            places[form] = [n for n, name in enumerate(spans.names) if name in _ATTRIBUTES]
        for place in places[form]:
            text = _text(spans, place)
            if text:
                at_ns = _moment(spans, place) + shift - zero_ns
                found[spans.names[place], text].append((at_ns / 1e9, source.identity.node))
    out = [
        Note(phase, text, len(seen), tuple(sorted({node for _, node in seen})[:NAMED_NODES]),
             min(seen)[0])
        for (phase, text), seen in found.items()
    ]  # fmt: skip
    return tuple(sorted(out, key=lambda note: (note.first_s, note.phase, note.text)))


def _text(spans: Spans, place: int) -> str:
    about = spans.attributes[place] if spans.attributes is not None else None
    value = about.get(_ATTRIBUTES[spans.names[place]]) if about else None
    return value if isinstance(value, str) else ""


def _moment(spans: Spans, place: int) -> int:
    began, ended = spans.moments[2 * place : 2 * place + 2]
    return (began if ended is None else ended) or 0
