"""Clock skew between nodes, estimated at barrier exits and corrected (pure).

All processes leave a barrier at the same true moment, so the difference between two nodes'
clocks there is their skew, plus some noise of waking up. With e(b, n) the median exit from
barrier b over node n's processes, skew s(n) and the barriers' true moments t(b) are fitted to
e(b, n) = t(b) + s(n) by medians in turn, which neither a late process nor a node that missed
some barriers moves. A "barrier" whose residuals are far worse than the others' was none (its
waiters left one by one) and is left out.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bootseer.profiler.report.load.columns import Form, columns_of
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import SkewSummary

# These wait for one holder, a scheduler or a registry, not for each other: no common exit.
NO_BARRIERS = ("queue", "schedule", "image.pull", "container.start", "deps.install", "deps")

_ROUNDS = 4
_BAD_NS = 50_000_000
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Skew:
    """`ahead_ns` is how far each node's clock is ahead of the reference's; nodes that could not
    be compared are absent. `uncertainty_ns` is half the range of a node's residuals, or of its
    processes' exits if that is wider; absent where one exit of one process is all there is."""

    ahead_ns: Mapping[str, int]
    uncertainty_ns: Mapping[str, int]
    summary: SkewSummary


def is_barrier(name: str, wait: bool) -> bool:
    """Whether a span is a wait that may end for all at the same moment."""
    return wait and _for_all(name)


@functools.lru_cache(maxsize=1024)
def _for_all(name: str) -> bool:
    return not any(name == n or name.startswith(n + ".") for n in NO_BARRIERS)


class Passage(NamedTuple):
    """A barrier span: its name with how often it came before, its times and its status."""

    key: _Key
    begin_ns: int | None
    end_ns: int | None
    status: str


_new = tuple.__new__  # a quarter of the time of Passage(...), hundreds of thousands of times


def passages(rows: Sequence[Span]) -> list[Passage]:
    """A process's barrier spans in time order."""
    spans = columns_of(rows)
    names, _, states, _ = spans.form
    _, places, keys = _barriers(spans.form)
    begins = [spans.moments[2 * place] for place in places]
    ends = [spans.moments[2 * place + 1] for place in places]
    order: Sequence[int] = begins  # type: ignore[assignment]
    if not spans.is_timed:
        order = [begin or 0 for begin in map(_first_known, begins, ends)]
    if order != sorted(order):
        turn = sorted(range(len(order)), key=order.__getitem__)
        places = tuple([places[n] for n in turn])
        begins, ends = [begins[n] for n in turn], [ends[n] for n in turn]
        keys = _numbered([names[place] for place in places])
    found = zip(keys, begins, ends, [states[place] for place in places], strict=True)
    return [_new(Passage, each) for each in found]


def _first_known(begin_ns: int | None, end_ns: int | None) -> int | None:
    return end_ns if begin_ns is None else begin_ns


_MOST_FORMS = 4096
_Known = tuple[Form, tuple[int, ...], tuple[_Key, ...]]
_KNOWN: dict[int, _Known] = {}
"""By the `id` of forms, each kept here: to hash one takes as long as all the rest."""


def _barriers(form: Form) -> _Known:
    """Places of the barrier spans in a form, and their keys where they are in time order."""
    known = _KNOWN.get(id(form))
    if known is None:
        if len(_KNOWN) >= _MOST_FORMS:
            _KNOWN.clear()
        known = _KNOWN[id(form)] = (form, *_find_barriers(form))
    return known


def _find_barriers(form: Form) -> tuple[tuple[int, ...], tuple[_Key, ...]]:
    names, waits, _, _ = form
    places = tuple(
        [
            n
            for n, (name, wait) in enumerate(zip(names, waits, strict=True))
            if is_barrier(name, wait)
        ]
    )
    return places, _numbered([names[place] for place in places])


def _numbered(names: Sequence[str]) -> tuple[_Key, ...]:
    count: dict[str, int] = {}
    out = []
    for name in names:
        number = count.get(name, 0)
        count[name] = number + 1
        out.append((name, number))
    return tuple(out)


def estimate(start: Start) -> Skew:
    """Estimate the skew of every node of a start from its barriers."""
    nodes = {source.identity.node for source in start.sources}
    exits = _exits(start.sources) if len(nodes) > 1 else {}
    middle = {
        key: {node: int(median(values)) for node, values in by_node.items()}
        for key, by_node in exits.items()
        if len(by_node) > 1
    }
    ahead, moments = _fit(middle)
    good = _good(middle, ahead, moments)
    if len(good) < len(middle):
        middle = {key: middle[key] for key in good}
        ahead, moments = _fit(middle)
    if not ahead:
        return Skew({}, {}, SkewSummary(None, 0, 0.0, 0.0, len(nodes) if len(nodes) > 1 else 0))
    reference = sorted(ahead, key=lambda node: (ahead[node], node))[len(ahead) // 2]
    uncertainty = _uncertainty(middle, exits, ahead, moments)
    zero = ahead[reference]
    ahead = {node: value - zero for node, value in ahead.items()}
    summary = SkewSummary(
        reference=reference,
        barriers=len(middle),
        max_abs_s=max(abs(value) for value in ahead.values()) / 1e9,
        max_uncertainty_s=max(uncertainty.values(), default=0) / 1e9,
        unknown_nodes=len(nodes) - len(ahead),
    )
    return Skew(ahead, uncertainty, summary)


def _exits(sources: Sequence[Source]) -> dict[_Key, dict[str, list[int]]]:
    """Barrier -> node -> wall times at which its processes left it."""
    exits: dict[_Key, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source in sources:
        for key, _, end_ns, status in passages(source.spans):
            if end_ns is not None and status == "ok":
                exits[key][source.identity.node].append(end_ns + source.offset_ns)
    return exits


def _fit(middle: Mapping[_Key, Mapping[str, int]]) -> tuple[dict[str, int], dict[_Key, int]]:
    ahead: dict[str, int] = {node: 0 for by_node in middle.values() for node in by_node}
    moments: dict[_Key, int] = {}
    by_node: dict[str, list[tuple[_Key, int]]] = defaultdict(list)
    for key, exits in middle.items():
        for node, moment in exits.items():
            by_node[node].append((key, moment))
    for _ in range(_ROUNDS):
        moments = {
            key: int(median([moment - ahead[node] for node, moment in exits.items()]))
            for key, exits in middle.items()
        }
        ahead = {
            node: int(median([moment - moments[key] for key, moment in seen]))
            for node, seen in by_node.items()
        }
    return ahead, moments


def _good(
    middle: Mapping[_Key, Mapping[str, int]],
    ahead: Mapping[str, int],
    moments: Mapping[_Key, int],
) -> list[_Key]:
    """The barriers whose exits agree; all of them when none is clearly better."""
    spread = {
        key: median([abs(moment - ahead[node] - moments[key]) for node, moment in exits.items()])
        for key, exits in middle.items()
    }
    good = [key for key, value in spread.items() if value <= _BAD_NS]
    return good or list(middle)


def _uncertainty(
    middle: Mapping[_Key, Mapping[str, int]],
    exits: Mapping[_Key, Mapping[str, list[int]]],
    ahead: Mapping[str, int],
    moments: Mapping[_Key, int],
) -> dict[str, int]:
    residuals: dict[str, list[int]] = defaultdict(list)
    ranges: dict[str, list[int]] = defaultdict(list)
    for key, by_node in middle.items():
        for node, moment in by_node.items():
            residuals[node].append(moment - ahead[node] - moments[key])
            values = exits[key][node]
            if len(values) > 1:
                ranges[node].append(max(values) - min(values))
    out = {}
    for node, values in residuals.items():
        widths = [max(values) - min(values)] if len(values) > 1 else []
        if ranges[node]:
            widths.append(int(median(ranges[node])))
        if widths:
            out[node] = max(widths) // 2
    return out
