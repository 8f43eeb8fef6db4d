"""Whose phases one writer's events are where a log tells of several ranks (pure).

A launcher's log, imported or read live around `torchrun`, is one event file without a rank of its
own, and each of its events says which rank's line it was read from. Each such rank gets a source
of its own, or the ranks' phases would be added up as those of one process, and one of them that
hangs would be hidden by the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Span

FIRST_STEP = "first_step"
_RANK, _LOCAL_RANK = "bootseer.rank", "bootseer.local_rank"


def split(sources: Sequence[Source]) -> list[Source]:
    """The sources of a start, those of logs with several ranks as one a rank and the rest.

    A launcher that names only ranks within its node (`[default1]:`) tells them where all sources
    are of one node; elsewhere its events stay those of the node.
    """
    if not any(_names_ranks(source) for source in sources):
        return list(sources)
    key = _RANK
    if not any(_ranks(source, _RANK) for source in sources if source.identity.rank is None):
        if len({source.identity.node for source in sources}) > 1:
            return list(sources)
        key = _LOCAL_RANK
    local = {(s.identity.node, s.identity.rank): s.identity.local_rank for s in sources}
    out: list[Source] = []
    for source in sources:
        ranks = _ranks(source, key) if source.identity.rank is None else set()
        if len(ranks) > 1:
            out += _split(source, ranks, key, local)
        else:
            out.append(source)
    return out


def _names_ranks(source: Source) -> bool:
    if source.identity.rank is not None:
        return False
    found = (each[8] for each in source.spans if each[8] is not None)
    return any(_RANK in about or _LOCAL_RANK in about for about in found)


def _spoken(span: Span, key: str) -> int | None:
    """The rank whose line an event was read from; None for what is of no rank, or of no log."""
    about = span.attributes
    if about is None or about.get("bootseer.source") != "log":
        return None
    rank = about.get(key)
    return rank if type(rank) is int and 0 <= rank < 1 << 40 else None


def _ranks(source: Source, key: str) -> set[int]:
    """The ranks that a log tells phases of. Others may speak of a rank in one moment, as an agent
    does of a worker that failed; that makes no rank."""
    found = (
        _spoken(span, key) for span in source.spans if not span.point or span.name == FIRST_STEP
    )
    return {rank for rank in found if rank is not None}


def _split(
    source: Source,
    ranks: Iterable[int],
    key: str,
    local: dict[tuple[str, int | None], int | None],
) -> list[Source]:
    spans: dict[int | None, list[Span]] = defaultdict(list)
    wanted = set(ranks)
    for span in source.spans:
        rank = _spoken(span, key)
        spans[rank if rank in wanted else None].append(span)
    out = []
    places = {rank: place for place, rank in enumerate(sorted(wanted))}
    for rank in sorted(spans, key=lambda each: -1 if each is None else each):
        identity, own = source.identity, columns_of(spans[rank])
        if rank is not None:
            # One without would count as a wrapper of those processes that know theirs.
            within = rank if key == _LOCAL_RANK else local.get((identity.node, rank))
            within = places[rank] if within is None else within
            identity = identity._replace(rank=rank, local_rank=within)
        events = sum(1 if span.point or span.end_ns is None else 2 for span in own)
        out.append(Source(source.file, identity, own, events, source.offset_ns))
    return out
