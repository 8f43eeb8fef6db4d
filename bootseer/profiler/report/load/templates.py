"""Writers that leave the same lines but for their times and ids, taken apart by places (pure).

All ranks of a job run one program, so what one of them left says where in the bytes of another
each time and each id stands, if all else is the same to the byte. Cut at known places and compared,
a writer takes little more than half of the time of a search by pattern. What fits no template is
searched (see `lines`), and gives one, with the same result.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import defaultdict
from operator import gt, sub
from typing import NamedTuple

from bootseer.profiler.report.load.columns import Spans
from bootseer.profiler.report.load.segments import PREFIX_CHARS, Segment, clock_of

_EVENT = re.compile(
    rb'^\{"v":1,"event":"(?:begin|end)","trace_id":"[^"]*","span_id":"([0-9a-f]{16})"'
    rb',"parent_span_id":null,"name":"[^"]+","time_unix_nano":([1-3][0-9]{18})'
    rb',"mono_nano":([1-9][0-9]*),"status"',
    re.MULTILINE,
)
_HEX = b"0123456789abcdef"
_LEAST_WALL, _MOST_WALL = 10**18, 4 * 10**18  # as `lines` has them
_MOST_TEMPLATES, _MOST_OF_A_LENGTH = 64, 4
_MOST_BYTES = 64 << 10  # of a writer's events; a longer one has hardly its like
_TRIES = 256  # writers that fitted none, before nothing is tried any more without a gain


class _Template(NamedTuple):
    """How the events of one writer are cut: `cut` gives what all have in common and each one's
    own in turn. `example` is what came of the first one."""

    cut: struct.Struct
    common: tuple[bytes, ...]
    least_mono: int
    example: Segment


class Templates:
    """Templates of the writers seen so far by one reader; they are few, or there are none."""

    def __init__(self) -> None:
        self._by_length: dict[int, list[_Template]] = defaultdict(list)
        self._count = self._missed = self._fitted = 0

    @property
    def useful(self) -> bool:
        """Whether to try: not once most of many writers fitted none."""
        return self._missed < _TRIES + self._fitted

    def fit(self, events: bytes) -> bool:
        """Whether one may fit, by the length."""
        return len(events) in self._by_length

    def segment(
        self, events: bytes, trace: str, prefix: str, resource: dict[str, object]
    ) -> Segment | None:
        """What a whole writer's events come to, its resource line read already; None where no
        template fits, or any value is not as the writer leaves it."""
        for template in self._by_length[len(events)]:
            parts = template.cut.unpack(events)
            if parts[::2] == template.common and trace == template.example.trace:
                found = _segment(template, parts[1::2], prefix, resource)
                if found is not None:
                    self._fitted += 1
                    return found
        return None

    def learn(self, events: bytes, segment: Segment) -> None:
        """Keep how `events`, which fitted none, were taken apart, where all that differs in their
        like are times and ids: phases that ended before the next one began."""
        self._missed += 1
        if self._count >= _MOST_TEMPLATES or len(events) > _MOST_BYTES:
            return
        if len(self._by_length.get(len(events), ())) >= _MOST_OF_A_LENGTH:
            return
        spans = segment.spans
        if not spans.is_timed or any(spans.points) or segment.open or segment.orphans:
            return
        found = list(_EVENT.finditer(events))
        if 2 * len(spans) != len(found) or len(found) != events.count(b"\n"):
            return
        ids = [match[1] for match in found]
        widths = {len(match[3]) for match in found}
        if ids[::2] != ids[1::2] or len(widths) > 1 or type(spans.ids) is not str:
            return
        places = [place for match in found for group in (1, 2, 3) for place in match.span(group)]
        sizes = map(sub, [*places, len(events)], [0, *places])
        cut = struct.Struct("".join([f"{size}s" for size in sizes]))
        least_mono = 10 ** (widths.pop() - 1)
        common = cut.unpack(events)[::2]
        example = segment._replace(resource={})  # which may be large, and is each writer's own
        self._by_length[len(events)].append(_Template(cut, common, least_mono, example))
        self._count += 1


def _segment(
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
        min(walls) < _LEAST_WALL
        or max(walls) >= _MOST_WALL
        or min(monos) < template.least_mono
        or any(map(gt, monos[::2], monos[1::2]))
    ):
        return None
    example = template.example
    like = example.spans
    spans = Spans(like.form, array("q", monos), ids.decode(), None, like.attributes)
    clock = clock_of(monos, list(map(sub, walls, monos)), whole=True)
    return Segment(example.trace, prefix, resource, len(monos), *clock, 0, spans, {}, [])
