"""One writer's spans as columns, from which records are made on demand (pure).

A large start has more than a million spans. As records, each with its two times, they would take
most of the memory, and passing them between processes would take most of the time. What many
writers have in common (which phases they went through, in which order) is one shared object.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, overload

from bootseer.profiler.report.load.spans import Source, Span

Form = tuple[tuple[str, ...], tuple[bool, ...], tuple[str, ...], tuple[bool, ...]]
"""Names, wait flags, statuses and point flags, one of each per span: equal for many writers."""

Plain = tuple[Form, Any, Any, Any, Any]

_new = tuple.__new__  # a quarter of the time of Span(...)


class Spans(Sequence[Span]):
    """One writer's spans, in order; equal to a tuple of the same records.

    `moments` has each span's begin and end in turn, as an array where all of them are known.
    `ids` is one string where all ids have the same length. `parents` and `attributes` are None
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
    def statuses(self) -> tuple[str, ...]:
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
        names, waits, statuses, points = self.form
        rows = zip(
            names,
            self.moments[::2],
            self.moments[1::2],
            waits,
            statuses,
            points,
            self._split_ids(),
            repeat(None) if self.parents is None else self.parents,
            repeat(None) if self.attributes is None else self.attributes,
            strict=False,  # None is repeated without end
        )
        return map(_new, repeat(Span), rows)

    def _split_ids(self) -> Sequence[str | None]:
        ids = self.ids
        if type(ids) is not str:
            return ids
        width = len(ids) // len(self)
        return [ids[begin : begin + width] for begin in range(0, len(ids), width)]

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def to_plain(self) -> Plain:
        """Values that `marshal` can write; `from_plain` makes the same spans of them."""
        return self.form, self.moments, self.ids, self.parents, self.attributes

    @staticmethod
    def from_plain(plain: Plain) -> Spans:
        """The spans of `to_plain`'s result, whose array `marshal` may have turned into bytes."""
        form, moments, ids, parents, attributes = plain
        if type(moments) is bytes:
            moments = array("q", moments)
        return Spans(form, moments, ids, parents, attributes)


@functools.lru_cache(maxsize=4096)
def share_form(form: Form) -> Form:
    """Return one and the same object for all forms that are equal."""
    names, waits, statuses, points = form
    return tuple(map(sys.intern, names)), waits, tuple(map(sys.intern, statuses)), points


def join_ids(ids: Sequence[str | None]) -> str | tuple[str | None, ...]:
    """Span ids in the form in which `Spans` holds them."""
    if not ids or None in ids or not ids[0] or len(set(map(len, ids))) > 1:  # type: ignore[arg-type]
        return tuple(ids)
    return "".join(ids)  # type: ignore[arg-type]


def join_moments(begins: Sequence[Any], ends: Sequence[Any]) -> array[int] | tuple[int | None, ...]:
    """Begins and ends in the form in which `Spans` holds them."""
    moments = chain.from_iterable(zip(begins, ends, strict=True))
    if None not in begins and None not in ends:
        try:
            return array("q", moments)
        except OverflowError:
            moments = chain.from_iterable(zip(begins, ends, strict=True))
    return tuple(moments)


def columns_of(rows: Sequence[tuple[Any, ...]]) -> Spans:
    """Spans as columns; `rows` are records, plain tuples of their fields, or columns already."""
    if isinstance(rows, Spans):
        return rows
    if not rows:
        return Spans(((), (), (), ()), array("q"), (), None, None)
    names, begins, ends, waits, statuses, points, ids, parents, attributes = zip(*rows, strict=True)
    return Spans(
        share_form((names, waits, statuses, points)),
        join_moments(begins, ends),
        join_ids(ids),
        parents if any(parent is not None for parent in parents) else None,
        attributes if any(each is not None for each in attributes) else None,
    )


def extent_of(rows: Sequence[Span]) -> tuple[int, int]:
    """The first and the last moment of any span, on the spans' own clock; there must be one."""
    moments: Sequence[Any] = columns_of(rows).moments
    if type(moments) is not array and None in moments:
        moments = [moment for moment in moments if moment is not None]
    return min(moments), max(moments)


def wall_extent_of(source: Source) -> tuple[int, int]:
    """A source's first and last moment in nanoseconds of its node's wall clock."""
    low_ns, high_ns = extent_of(source.spans)
    return low_ns + source.offset_ns, high_ns + source.offset_ns
