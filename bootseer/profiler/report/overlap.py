"""What a process does at each moment where its spans overlap: nested and concurrent ones (pure).

A span lies *within* another where its chain of parents leads to it, where it is named as a part of
it (`deps.install.unpack` of `deps.install`), where the other one is the whole command (`job`), or
where both were read from one lane of a log and the other one contains it: a log is written by one
thread after the other, and knows no parents. The innermost spans of a moment are those with no
running span within them. Two or more of them run *at once*, as in two threads.

Own work of a phase is all time in which one of its spans is innermost, whatever runs at once: how
long a phase takes does not depend on what it shares the process with. Where each moment can go to
one phase only, as on the critical path, the innermost span that ends last has it: the others were
done by then, so they held nothing up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.profiler.report.load.spans import Span

WHOLE = "job"
_DEEPEST = 64  # ancestors asked for in a row; a chain of parents may be a circle
_PREFIX_CHARS = 10  # of a span id: one writer's (see `events`)


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


_moment = tuple.__new__  # a quarter of the time of Moment(...)


class _Node:
    """An item with its place in the forest of spans."""

    __slots__ = ("above", "begin_s", "end_s", "part", "rank", "reach_s")

    def __init__(self, item: Item) -> None:
        self.begin_s, self.end_s = item.begin_s, item.end_s
        self.part = Part(item.span.name, item.span.wait, item.shared)
        self.above: _Node | None = None
        # When it and all within it had ended; the lane's end waited for nothing that outlasts it.
        self.reach_s = -math.inf if item.outlasts else item.end_s
        self.rank: tuple[tuple[float, float], ...] = ()


def moments(items: Sequence[Item], parents: Mapping[str, str | None]) -> list[Moment]:
    """The innermost spans at each moment, in order; moments that no span covers are absent.

    `parents` has the parent of every span of the process, also of those that are no items, such
    as one that never ended.
    """
    whole = [item for item in items if item.span.name == WHOLE and item.end_s > item.begin_s]
    nodes = _forest(items, parents)
    edges = {edge for node in nodes for edge in (node.begin_s, node.end_s)}
    edges.update(edge for item in whole for edge in (item.begin_s, item.end_s))
    out: list[Moment] = []
    active: list[_Node] = []
    following = 0
    for low, high in itertools.pairwise(sorted(edges)):
        while following < len(nodes) and nodes[following].begin_s <= low:
            active.append(nodes[following])
            following += 1
        active = [node for node in active if node.end_s > low]
        if len(active) == 1:
            parts: tuple[Part, ...] = (active[0].part,)
        elif active:
            parts = tuple([node.part for node in _innermost(active)])
        else:
            around = (item for item in whole if item.begin_s <= low < item.end_s)
            found = next(around, None)
            if found is None:
                continue
            parts = (Part(WHOLE, found.span.wait, found.shared),)
        if out and out[-1][1] == low and out[-1][2] == parts:
            low = out.pop()[0]  # noqa: PLW2901 - one moment, though something outer ended in it
        out.append(_moment(Moment, (low, high, parts)))
    return out


def _forest(items: Sequence[Item], parents: Mapping[str, str | None]) -> list[_Node]:
    """The items as nodes, by begin and the longer first, each below the one that it is within;
    without the whole command, which everything is within."""
    ordered = sorted(
        (item for item in items if item.end_s > item.begin_s and item.span.name != WHOLE),
        key=lambda item: (item.begin_s, -item.end_s),
    )
    nodes = [_Node(item) for item in ordered]
    by_id = {
        item.span.span_id: node
        for item, node in zip(ordered, nodes, strict=True)
        if item.span.span_id is not None
    }
    in_logs: dict[tuple[object, ...], list[_Node]] = {}
    for item, node in zip(ordered, nodes, strict=True):
        about = item.span.attributes
        if about is not None and about.get("bootseer.source") == "log":
            above = _containing(in_logs.setdefault(_log_lane(item.span, about), []), node)
        else:
            above = None
        node.above = above or _parent(item.span, by_id, parents)
    for node in nodes:
        if node.above is not None:
            _climb(node)
    for node in nodes:
        node.rank = _rank(node)
    return nodes


def _parent(
    span: Span, by_id: Mapping[str, _Node], parents: Mapping[str, str | None]
) -> _Node | None:
    """The nearest ancestor that is an item."""
    at, steps = span.parent_id, 0
    while at is not None and steps < _DEEPEST:
        if at in by_id:
            return by_id[at]
        at, steps = parents.get(at), steps + 1
    return None


def _log_lane(span: Span, about: Mapping[str, object]) -> tuple[object, ...]:
    writer = (span.span_id or "")[:_PREFIX_CHARS]
    told = (about.get("bootseer.rank"), about.get("bootseer.local_rank"))
    return writer, *(rank if type(rank) is int else None for rank in told)


def _containing(stack: list[_Node], node: _Node) -> _Node | None:
    """The innermost of the log's earlier spans that contains `node`."""
    while stack and stack[-1].end_s <= node.begin_s:
        stack.pop()
    above = next((each for each in reversed(stack) if each.end_s >= node.end_s), None)
    stack.append(node)
    return above


def _climb(node: _Node) -> None:
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


def _rank(node: _Node) -> tuple[tuple[float, float], ...]:
    """What to compare nodes by, from the outermost that it is within: who ends last, else who
    began first."""
    out = [(node.reach_s, -node.begin_s)]
    at = node.above
    while at is not None:
        out.append((at.reach_s, -at.begin_s))
        at = at.above
    return tuple(reversed(out))


def _innermost(active: Sequence[_Node]) -> list[_Node]:
    """Those of the running spans that no running span is within; the one that ends last first."""
    outer: set[int] = set()
    for node in active:
        above = node.above
        while above is not None and id(above) not in outer:
            outer.add(id(above))
            above = above.above
    left = [node for node in active if id(node) not in outer] if outer else list(active)
    if len(left) > 1:
        names = {node.part.name for node in left}
        if len(names) > 1:
            left = [node for node in left if not _has_part(node.part.name, names)]
            left.sort(key=lambda node: node.rank, reverse=True)
    return left


def _has_part(name: str, names: set[str]) -> bool:
    """Whether another name is a part of this one, which then is outside of it."""
    below = name + "."
    return any(other.startswith(below) for other in names)
