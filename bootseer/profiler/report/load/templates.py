"""Templates of writers whose lines differ in nothing but times and span ids (pure).

All ranks of a job run one program. What one rank wrote therefore shows at which byte of another
rank's events each time and each id stands, if all other bytes are equal. Cutting a writer's events
at known offsets and comparing the rest takes little more than half of the time of a search by
pattern. A writer that fits no template is searched (see `line_blocks`), with the same result, and
gives a new template.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import defaultdict
from operator import gt, sub
from typing import NamedTuple

from bootseer.profiler.report.load.columns import Spans
from bootseer.profiler.report.load.segments import PREFIX_CHARS, Segment, describe_clock

_EVENT = re.compile(
    rb'^\{"v":1,"event":"(?:begin|end)","trace_id":"[^"]*","span_id":"([0-9a-f]{16})"'
    rb',"parent_span_id":null,"name":"[^"]+","time_unix_nano":([1-3][0-9]{18})'
    rb',"mono_nano":([1-9][0-9]*),"status"',
    re.MULTILINE,
)
_HEX = b"0123456789abcdef"
_MIN_WALL_NS, _MAX_WALL_NS = 10**18, 4 * 10**18  # the bounds of the pattern in `line_blocks`
_MAX_TEMPLATES, _MAX_PER_LENGTH = 64, 4
_MAX_BYTES = 64 << 10  # of a writer's events; hardly any other writer equals a longer one
_MAX_MISSES = 256  # writers that fitted no template, beyond those that did, before trying ends


class _Template(NamedTuple):
    """How one writer's events are cut.

    `cut` gives, in turn, what all writers have in common and what is each one's own. `example` is
    the segment of the writer from which the template was made.
    """

    cut: struct.Struct
    common: tuple[bytes, ...]
    min_mono_ns: int
    example: Segment


class Templates:
    """The templates of the writers that one process has read so far; few, or none."""

    def __init__(self) -> None:
        self._by_length: dict[int, list[_Template]] = defaultdict(list)
        self._count = self._missed = self._fitted = 0

    @property
    def is_useful(self) -> bool:
        """Whether to try templates: no longer once most of many writers fitted none."""
        return self._missed < _MAX_MISSES + self._fitted

    def may_fit(self, events: bytes) -> bool:
        """Whether a template for events of this length is known."""
        return len(events) in self._by_length

    def make_segment(
        self, events: bytes, trace: str, prefix: str, resource: dict[str, object]
    ) -> Segment | None:
        """Make a segment of a whole writer's events, whose resource line was read already.

        None where no template fits, or any value is not as the event writer writes it.
        """
        for template in self._by_length[len(events)]:
            parts = template.cut.unpack(events)
            if parts[::2] == template.common and trace == template.example.trace:
                segment = _make_segment(template, parts[1::2], prefix, resource)
                if segment is not None:
                    self._fitted += 1
                    return segment
        return None

    def learn(self, events: bytes, segment: Segment) -> None:
        """Make a template of `events`, which fitted none and were searched.

        Only where similar writers differ in times and ids alone: where each phase ended before
        the next one began.
        """
        self._missed += 1
        if self._count >= _MAX_TEMPLATES or len(events) > _MAX_BYTES:
            return
        if len(self._by_length.get(len(events), ())) >= _MAX_PER_LENGTH:
            return
        spans = segment.spans
        if not spans.is_timed or any(spans.points) or segment.open or segment.orphans:
            return
        matches = list(_EVENT.finditer(events))
        if 2 * len(spans) != len(matches) or len(matches) != events.count(b"\n"):
            return
        ids = [match[1] for match in matches]
        widths = {len(match[3]) for match in matches}
        if ids[::2] != ids[1::2] or len(widths) > 1 or type(spans.ids) is not str:
            return
        cuts = [offset for match in matches for group in (1, 2, 3) for offset in match.span(group)]
        sizes = map(sub, [*cuts, len(events)], [0, *cuts])
        cut = struct.Struct("".join([f"{size}s" for size in sizes]))
        min_mono_ns = 10 ** (widths.pop() - 1)
        common = cut.unpack(events)[::2]
        example = segment._replace(resource={})  # which may be large, and is each writer's own
        self._by_length[len(events)].append(_Template(cut, common, min_mono_ns, example))
        self._count += 1


def _make_segment(
    template: _Template, own: tuple[bytes, ...], prefix: str, resource: dict[str, object]
) -> Segment | None:
    begun, ended = own[::6], own[3::6]
    ids = b"".join(begun)
    wanted = prefix.encode()
    if (
        begun != ended
        or min(begun)[:PREFIX_CHARS] != wanted
        or max(begun)[:PREFIX_CHARS] != wanted
        or len(set(begun)) < len(begun)
        or ids.translate(None, _HEX)
        or not b"".join(own[1::3] + own[2::3]).isdigit()
    ):
        return None
    walls, monos = list(map(int, own[1::3])), list(map(int, own[2::3]))
    if (
        min(walls) < _MIN_WALL_NS
        or max(walls) >= _MAX_WALL_NS
        or min(monos) < template.min_mono_ns
        or any(map(gt, monos[::2], monos[1::2]))
    ):
        return None
    example = template.example
    like = example.spans
    spans = Spans(like.form, array("q", monos), ids.decode(), None, like.attributes)
    clock = describe_clock(monos, list(map(sub, walls, monos)), whole=True)
    return Segment(example.trace, prefix, resource, len(monos), *clock, 0, spans, {}, [])
