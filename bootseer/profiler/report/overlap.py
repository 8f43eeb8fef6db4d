"""What a process does at each moment where its spans overlap: nested and concurrent ones (pure).

A span lies *within* another where its chain of parents leads to it, where it is named as a part of
it (`deps.install.unpack` of `deps.install`), where the other one is the whole command (`job`), or
where both were read from one lane of a log and the other one contains it: one thread writes a log,
one line after the other, and a log has no parents. The innermost spans of a moment are those with
no running span within them. Two or more of them run *at once*, as in two threads.

Own work of a phase is all time in which one of its spans is innermost, whatever runs at once: how
long a phase takes does not depend on what it shares the process with. Where each moment can go to
one phase only, as on the critical path, it goes to the innermost span that ends last: the others
had ended by then, so they held nothing up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.profiler.report.load.segments import PREFIX_CHARS
from bootseer.profiler.report.load.spans import Span
from bootseer.profiler.report.model import JOB

_MAX_ANCESTORS = 64  # a chain of parents may be a circle


class Part(NamedTuple):
    """An innermost span at some moment; `shared` as in `lanes.Piece`."""

    name: str
    wait: bool
    shared: bool


class Moment(NamedTuple):
    """`[begin_s, end_s)`, in which the same spans are innermost; `parts[0]` ends last."""

    begin_s: float
    end_s: float
    parts: tuple[Part, ...]


class Item(NamedTuple):
    """A span on the start's clock, cut off at the lane's end; `outlasts`: it ended after that."""

    begin_s: float
    end_s: float
    span: Span
    shared: bool
    outlasts: bool


_new = tuple.__new__  # a quarter of the time of Moment(...)


class _TreeNode:
    """An item with its place in the forest of spans."""

    __slots__ = ("above", "begin_s", "end_s", "part", "precedence", "reach_s")

    def __init__(self, item: Item) -> None:
        self.begin_s, self.end_s = item.begin_s, item.end_s
        self.part = Part(item.span.name, item.span.wait, item.shared)
        self.above: _TreeNode | None = None
        # When it and all within it had ended; the lane's end waited for nothing that outlasts it.
        self.reach_s = -math.inf if item.outlasts else item.end_s
        self.precedence: tuple[tuple[float, float], ...] = ()


def find_moments(items: Sequence[Item], parents: Mapping[str, str | None]) -> list[Moment]:
    """The innermost spans at each moment, in order; moments that no span covers are absent.

    `parents` has the parent of every span of the process, including spans that are no items, such
    as one that never ended.
    """
    jobs = [item for item in items if item.span.name == JOB and item.end_s > item.begin_s]
    nodes = _build_forest(items, parents)
    edges = {edge for node in nodes for edge in (node.begin_s, node.end_s)}
    edges.update(edge for item in jobs for edge in (item.begin_s, item.end_s))
    moments: list[Moment] = []
    active: list[_TreeNode] = []
    following = 0
    for low, high in itertools.pairwise(sorted(edges)):
        while following < len(nodes) and nodes[following].begin_s <= low:
            active.append(nodes[following])
            following += 1
        active = [node for node in active if node.end_s > low]
        if len(active) == 1:
            parts: tuple[Part, ...] = (active[0].part,)
        elif active:
            parts = tuple([node.part for node in _find_innermost(active)])
        else:
            running = (item for item in jobs if item.begin_s <= low < item.end_s)
            job = next(running, None)
            if job is None:
                continue
            parts = (Part(JOB, job.span.wait, job.shared),)
        if moments and moments[-1][1] == low and moments[-1][2] == parts:
            low = moments.pop()[0]  # noqa: PLW2901 - one moment, though an outer span ended in it
        moments.append(_new(Moment, (low, high, parts)))
    return moments


def _build_forest(items: Sequence[Item], parents: Mapping[str, str | None]) -> list[_TreeNode]:
    """The items as nodes, by begin and the longer first, each linked to the one it is within.

    Without the whole command, which everything is within.
    """
    ordered = sorted(
        (item for item in items if item.end_s > item.begin_s and item.span.name != JOB),
        key=lambda item: (item.begin_s, -item.end_s),
    )
    nodes = [_TreeNode(item) for item in ordered]
    by_id = {
        item.span.span_id: node
        for item, node in zip(ordered, nodes, strict=True)
        if item.span.span_id is not None
    }
    stacks: dict[tuple[object, ...], list[_TreeNode]] = {}
    for item, node in zip(ordered, nodes, strict=True):
        attributes = item.span.attributes
        above = None
        if attributes is not None and attributes.get("bootseer.source") == "log":
            stack = stacks.setdefault(_log_lane_of(item.span, attributes), [])
            above = _push_into_containing(stack, node)
        node.above = above or _find_parent(item.span, by_id, parents)
    for node in nodes:
        if node.above is not None:
            _extend_reach(node)
    for node in nodes:
        node.precedence = _find_precedence(node)
    return nodes


def _find_parent(
    span: Span, by_id: Mapping[str, _TreeNode], parents: Mapping[str, str | None]
) -> _TreeNode | None:
    """The nearest ancestor that is an item."""
    ancestor, steps = span.parent_id, 0
    while ancestor is not None and steps < _MAX_ANCESTORS:
        if ancestor in by_id:
            return by_id[ancestor]
        ancestor, steps = parents.get(ancestor), steps + 1
    return None


def _log_lane_of(span: Span, attributes: Mapping[str, object]) -> tuple[object, ...]:
    """A key that the spans of one log have in common that are of the same rank."""
    writer = (span.span_id or "")[:PREFIX_CHARS]
    ranks = (attributes.get("bootseer.rank"), attributes.get("bootseer.local_rank"))
    return writer, *(rank if type(rank) is int else None for rank in ranks)


def _push_into_containing(stack: list[_TreeNode], node: _TreeNode) -> _TreeNode | None:
    """Add `node` to the log's running spans; return the innermost one that contains it."""
    while stack and stack[-1].end_s <= node.begin_s:
        stack.pop()
    above = next((each for each in reversed(stack) if each.end_s >= node.end_s), None)
    stack.append(node)
    return above


def _extend_reach(node: _TreeNode) -> None:
    """Let all that `node` is within reach as far as it does; break a circle of parents."""
    seen = {id(node)}
    below, above = node, node.above
    while above is not None:
        if id(above) in seen:
            below.above = None
            return
        seen.add(id(above))
        above.reach_s = max(above.reach_s, node.reach_s)
        below, above = above, above.above


def _find_precedence(node: _TreeNode) -> tuple[tuple[float, float], ...]:
    """The sort key of nodes that run at once: which ends last, else which began first.

    Compared from the outermost node that each is within.
    """
    keys = [(node.reach_s, -node.begin_s)]
    above = node.above
    while above is not None:
        keys.append((above.reach_s, -above.begin_s))
        above = above.above
    return tuple(reversed(keys))


def _find_innermost(active: Sequence[_TreeNode]) -> list[_TreeNode]:
    """The running spans that no running span is within; the one that ends last first."""
    outer: set[int] = set()
    for node in active:
        above = node.above
        while above is not None and id(above) not in outer:
            outer.add(id(above))
            above = above.above
    inner = [node for node in active if id(node) not in outer] if outer else list(active)
    if len(inner) > 1:
        names = {node.part.name for node in inner}
        if len(names) > 1:
            inner = [node for node in inner if not _has_part(node.part.name, names)]
            inner.sort(key=lambda node: node.precedence, reverse=True)
    return inner


def _has_part(name: str, names: set[str]) -> bool:
    """Whether another name is a part of this one, whose span then is the outer one."""
    below = name + "."
    return any(other.startswith(below) for other in names)
