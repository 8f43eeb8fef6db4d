"""A writer's spans as columns: records are made of them only where somebody asks (pure).

A large start has more than a million spans. As records, each with its two times, they would take
most of the memory, and passing them between processes most of the time. Whatever differs little
between writers (what they did, in which order) is one object for all that have it in common.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, overload

from bootseer.profiler.report.load.spans import Span

Form = tuple[tuple[str, ...], tuple[bool, ...], tuple[str, ...], tuple[bool, ...]]
"""Names, waits, states and points, a value a span: what many writers have in common."""

Plain = tuple[Form, Any, Any, Any, Any]

_new = tuple.__new__  # a quarter of the time of Span(...)


class Spans(Sequence[Span]):
    """One writer's spans, in order; equal to a tuple of the same.

    `moments` has each span's begin and end in turn, as an array wherever all of them are known;
    `ids` are one text where all are as long as each other. `parents` and `attributes` are None
    where no span has any.
    """

    __slots__ = ("attributes", "form", "ids", "moments", "parents")

    def __init__(
        self,
        form: Form,
        moments: array[int] | tuple[int | None, ...],
        ids: str | tuple[str | None, ...],
        parents: tuple[str | None, ...] | None,
        attributes: tuple[Any, ...] | None,
    ) -> None:
        self.form, self.moments, self.ids = form, moments, ids
        self.parents, self.attributes = parents, attributes

    @property
    def names(self) -> tuple[str, ...]:
        """Each span's name."""
        return self.form[0]

    @property
    def waits(self) -> tuple[bool, ...]:
        """Whether each span is a wait."""
        return self.form[1]

    @property
    def states(self) -> tuple[str, ...]:
        """Each span's status."""
        return self.form[2]

    @property
    def points(self) -> tuple[bool, ...]:
        """Whether each span is a point."""
        return self.form[3]

    @property
    def is_timed(self) -> bool:
        """Whether every begin and end is known."""
        return type(self.moments) is array

    def __len__(self) -> int:
        return len(self.form[0])

    def __iter__(self) -> Iterator[Span]:
        names, waits, states, points = self.form
        rows = zip(
            names,
            self.moments[::2],
            self.moments[1::2],
            waits,
            states,
            points,
            self._each_id(),
            repeat(None) if self.parents is None else self.parents,
            repeat(None) if self.attributes is None else self.attributes,
            strict=False,  # None is repeated without end
        )
        return map(_new, repeat(Span), rows)

    def _each_id(self) -> Sequence[str | None]:
        ids = self.ids
        if type(ids) is not str:
            return ids
        width = len(ids) // len(self)
        return [ids[place : place + width] for place in range(0, len(ids), width)]

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, place: int | slice) -> Span | tuple[Span, ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def to_plain(self) -> Plain:
        """Plain values, of which `from_plain` makes the same in another process."""
        return self.form, self.moments, self.ids, self.parents, self.attributes

    @staticmethod
    def from_plain(plain: Plain) -> Spans:
        """What `to_plain` gave, after `marshal` turned an array into bytes."""
        form, moments, ids, parents, attributes = plain
        if type(moments) is bytes:
            moments = array("q", moments)
        return Spans(form, moments, ids, parents, attributes)


@functools.lru_cache(maxsize=4096)
def shared(form: Form) -> Form:
    """One object for all forms that are equal."""
    names, waits, states, points = form
    return tuple(map(sys.intern, names)), waits, tuple(map(sys.intern, states)), points


def join_ids(ids: Sequence[str | None]) -> str | tuple[str | None, ...]:
    """Ids as `Spans` holds them."""
    if not ids or None in ids or not ids[0] or len(set(map(len, ids))) > 1:  # type: ignore[arg-type]
        return tuple(ids)
    return "".join(ids)  # type: ignore[arg-type]


def in_turn(begins: Sequence[Any], ends: Sequence[Any]) -> array[int] | tuple[int | None, ...]:
    """Begins and ends as `Spans` holds them."""
    moments = chain.from_iterable(zip(begins, ends, strict=True))
    if None not in begins and None not in ends:
        try:
            return array("q", moments)
        except OverflowError:
            moments = chain.from_iterable(zip(begins, ends, strict=True))
    return tuple(moments)


def columns_of(rows: Sequence[tuple[Any, ...]]) -> Spans:
    """Spans by columns; `rows` are records, or plain tuples of their fields, or columns already."""
    if isinstance(rows, Spans):
        return rows
    if not rows:
        return Spans(((), (), (), ()), array("q"), (), None, None)
    names, begins, ends, waits, states, points, ids, parents, attributes = zip(*rows, strict=True)
    return Spans(
        shared((names, waits, states, points)),
        in_turn(begins, ends),
        join_ids(ids),
        parents if any(parent is not None for parent in parents) else None,
        attributes if any(about is not None for about in attributes) else None,
    )


def extent_of(rows: Sequence[Span]) -> tuple[int, int]:
    """The first and the last moment of any span, on their own clock; there must be one."""
    moments: Sequence[Any] = columns_of(rows).moments
    if type(moments) is not array and None in moments:
        moments = [moment for moment in moments if moment is not None]
    return min(moments), max(moments)
