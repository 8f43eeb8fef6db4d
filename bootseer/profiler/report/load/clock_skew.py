"""Clock skew between nodes, estimated at barrier exits and corrected (pure).

All processes leave a barrier at the same true moment, so the difference between two nodes'
clocks there is their skew, plus some noise of waking up. With e(b, n) the median exit from
barrier b over node n's processes, skew s(n) and the barriers' true moments t(b) are fitted to
e(b, n) = t(b) + s(n) by medians in turn, which neither a late process nor a node that missed
some barriers moves. A "barrier" whose residuals are far worse than the others' is none (its
waiters left one by one) and is left out.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bootseer.profiler.report.load.columns import Form, columns_of
from bootseer.profiler.report.load.spans import Source, Span, Start
from bootseer.profiler.report.model import SkewSummary

NO_BARRIERS = ("queue", "schedule", "image.pull", "container.start", "deps.install", "deps")
"""Waits for something that one process holds, a scheduler or a registry: no common exit."""

_ROUNDS = 4
_MAX_SPREAD_NS = 50_000_000
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
    """Whether a span is a wait that may end for all processes at the same moment."""
    return wait and _may_end_for_all(name)


@functools.lru_cache(maxsize=1024)
def _may_end_for_all(name: str) -> bool:
    return not any(name == n or name.startswith(n + ".") for n in NO_BARRIERS)


class Passage(NamedTuple):
    """A barrier span: its name with how often it came before, its times and its status."""

    key: _Key
    begin_ns: int | None
    end_ns: int | None
    status: str


_new = tuple.__new__  # a quarter of the time of Passage(...), hundreds of thousands of times


def find_passages(rows: Sequence[Span]) -> list[Passage]:
    """A process's barrier spans in time order."""
    spans = columns_of(rows)
    names, _, statuses, _ = spans.form
    _, indices, keys = _find_barriers_of_form(spans.form)
    begins = [spans.moments[2 * index] for index in indices]
    ends = [spans.moments[2 * index + 1] for index in indices]
    order: Sequence[int] = begins  # type: ignore[assignment]
    if not spans.is_timed:
        order = [begin or 0 for begin in map(_first_known, begins, ends)]
    if order != sorted(order):
        turn = sorted(range(len(order)), key=order.__getitem__)
        indices = tuple([indices[n] for n in turn])
        begins, ends = [begins[n] for n in turn], [ends[n] for n in turn]
        keys = number_names([names[index] for index in indices])
    rows_of_passages = zip(keys, begins, ends, [statuses[index] for index in indices], strict=True)
    return [_new(Passage, row) for row in rows_of_passages]


def _first_known(begin_ns: int | None, end_ns: int | None) -> int | None:
    return end_ns if begin_ns is None else begin_ns


_MAX_FORMS = 4096
_FormBarriers = tuple[Form, tuple[int, ...], tuple[_Key, ...]]
_BARRIERS_BY_FORM: dict[int, _FormBarriers] = {}
"""By the `id` of a form, which is kept here: hashing a form takes as long as all the rest."""


def _find_barriers_of_form(form: Form) -> _FormBarriers:
    """Indices of the barrier spans in a form, and their keys where they are in time order."""
    barriers = _BARRIERS_BY_FORM.get(id(form))
    if barriers is None:
        if len(_BARRIERS_BY_FORM) >= _MAX_FORMS:
            _BARRIERS_BY_FORM.clear()
        names, waits, _, _ = form
        barriers = _BARRIERS_BY_FORM[id(form)] = (form, *find_barriers(names, waits))
    return barriers


def find_barriers(
    names: Sequence[str], waits: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[_Key, ...]]:
    """Indices and keys of the barriers among spans in time order, given as columns."""
    indices = [n for n, each in enumerate(zip(names, waits, strict=True)) if is_barrier(*each)]
    return tuple(indices), number_names([names[index] for index in indices])


def number_names(names: Iterable[str]) -> tuple[_Key, ...]:
    """Each name with how often it came before."""
    count: dict[str, int] = {}
    keys = []
    for name in names:
        number = count.get(name, 0)
        count[name] = number + 1
        keys.append((name, number))
    return tuple(keys)


def estimate_skew(start: Start) -> Skew:
    """Estimate the skew of every node of a start from its barriers."""
    nodes = {source.identity.node for source in start.sources}
    exits = _collect_exits(start.sources) if len(nodes) > 1 else {}
    median_exits = {
        key: {node: int(median(values)) for node, values in by_node.items()}
        for key, by_node in exits.items()
        if len(by_node) > 1
    }
    ahead, moments = _fit(median_exits)
    consistent = _find_consistent(median_exits, ahead, moments)
    if len(consistent) < len(median_exits):
        median_exits = {key: median_exits[key] for key in consistent}
        ahead, moments = _fit(median_exits)
    if not ahead:
        return Skew({}, {}, SkewSummary(None, 0, 0.0, 0.0, len(nodes) if len(nodes) > 1 else 0))
    reference = sorted(ahead, key=lambda node: (ahead[node], node))[len(ahead) // 2]
    uncertainty = _estimate_uncertainty(median_exits, exits, ahead, moments)
    zero = ahead[reference]
    ahead = {node: value - zero for node, value in ahead.items()}
    summary = SkewSummary(
        reference=reference,
        barriers=len(median_exits),
        max_abs_s=max(abs(value) for value in ahead.values()) / 1e9,
        max_uncertainty_s=max(uncertainty.values(), default=0) / 1e9,
        unknown_nodes=len(nodes) - len(ahead),
    )
    return Skew(ahead, uncertainty, summary)


def _collect_exits(sources: Sequence[Source]) -> dict[_Key, dict[str, list[int]]]:
    """Barrier -> node -> wall times at which its processes left it."""
    exits: dict[_Key, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source in sources:
        for key, _, end_ns, status in find_passages(source.spans):
            if end_ns is not None and status == "ok":
                exits[key][source.identity.node].append(end_ns + source.offset_ns)
    return exits


def _fit(median_exits: Mapping[_Key, Mapping[str, int]]) -> tuple[dict[str, int], dict[_Key, int]]:
    """Each node's skew s(n) and each barrier's true moment t(b), see the module's docstring."""
    ahead: dict[str, int] = {node: 0 for by_node in median_exits.values() for node in by_node}
    moments: dict[_Key, int] = {}
    exits_of_node: dict[str, list[tuple[_Key, int]]] = defaultdict(list)
    for key, by_node in median_exits.items():
        for node, moment in by_node.items():
            exits_of_node[node].append((key, moment))
    for _ in range(_ROUNDS):
        moments = {
            key: int(median([moment - ahead[node] for node, moment in by_node.items()]))
            for key, by_node in median_exits.items()
        }
        ahead = {
            node: int(median([moment - moments[key] for key, moment in passed]))
            for node, passed in exits_of_node.items()
        }
    return ahead, moments


def _find_consistent(
    median_exits: Mapping[_Key, Mapping[str, int]],
    ahead: Mapping[str, int],
    moments: Mapping[_Key, int],
) -> list[_Key]:
    """The barriers whose exits agree; all of them when none is clearly better."""
    spread = {
        key: median([abs(moment - ahead[node] - moments[key]) for node, moment in by_node.items()])
        for key, by_node in median_exits.items()
    }
    consistent = [key for key, value in spread.items() if value <= _MAX_SPREAD_NS]
    return consistent or list(median_exits)


def _estimate_uncertainty(
    median_exits: Mapping[_Key, Mapping[str, int]],
    exits: Mapping[_Key, Mapping[str, list[int]]],
    ahead: Mapping[str, int],
    moments: Mapping[_Key, int],
) -> dict[str, int]:
    residuals: dict[str, list[int]] = defaultdict(list)
    ranges: dict[str, list[int]] = defaultdict(list)
    for key, by_node in median_exits.items():
        for node, moment in by_node.items():
            residuals[node].append(moment - ahead[node] - moments[key])
            values = exits[key][node]
            if len(values) > 1:
                ranges[node].append(max(values) - min(values))
    uncertainty = {}
    for node, values in residuals.items():
        widths = [max(values) - min(values)] if len(values) > 1 else []
        if ranges[node]:
            widths.append(int(median(ranges[node])))
        if widths:
            uncertainty[node] = max(widths) // 2
    return uncertainty
