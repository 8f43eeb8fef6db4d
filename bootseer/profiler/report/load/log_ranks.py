"""Ranks whose phases one log has, each made a source of its own (pure).

A launcher's log, imported or read live around `torchrun`, is one event file without a rank of its
own. Each of its events carries the rank whose line it was read from. Each such rank becomes a
source of its own. Otherwise the ranks' phases would be added up as those of one process, and one
rank that hangs would be hidden by the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from bootseer.profiler.report.load.columns import columns_of
from bootseer.profiler.report.load.spans import Source, Span
from bootseer.profiler.report.model import FIRST_STEP

_RANK, _LOCAL_RANK = "bootseer.rank", "bootseer.local_rank"


def split_logs(sources: Sequence[Source]) -> list[Source]:
    """The sources of a start, with each log of several ranks split into one a rank and the rest.

    A launcher that names only ranks within its node (`[default1]:`) identifies them only where
    all sources are of one node; elsewhere its events stay those of the node.
    """
    if not any(_names_ranks(source) for source in sources):
        return list(sources)
    key = _RANK
    if not any(_find_ranks(s, _RANK) for s in sources if s.identity.rank is None):
        if len({source.identity.node for source in sources}) > 1:
            return list(sources)
        key = _LOCAL_RANK
    local_ranks = {(s.identity.node, s.identity.rank): s.identity.local_rank for s in sources}
    split: list[Source] = []
    for source in sources:
        ranks = _find_ranks(source, key) if source.identity.rank is None else set()
        if len(ranks) > 1:
            split += _split_log(source, ranks, key, local_ranks)
        else:
            split.append(source)
    return split


def _names_ranks(source: Source) -> bool:
    if source.identity.rank is not None:
        return False
    attributes = (span[8] for span in source.spans if span[8] is not None)  # of many spans
    return any(_RANK in each or _LOCAL_RANK in each for each in attributes)


def _rank_of_line(span: Span, key: str) -> int | None:
    """The rank whose line an event was read from; None for one of no rank, or of no log."""
    attributes = span.attributes
    if attributes is None or attributes.get("bootseer.source") != "log":
        return None
    rank = attributes.get(key)
    return rank if type(rank) is int and 0 <= rank < 1 << 40 else None


def _find_ranks(source: Source, key: str) -> set[int]:
    """The ranks that a log has phases of.

    A single point that names a rank makes none: an agent writes one about a worker that failed.
    """
    ranks = (
        _rank_of_line(span, key)
        for span in source.spans
        if not span.point or span.name == FIRST_STEP
    )
    return {rank for rank in ranks if rank is not None}


def _split_log(
    source: Source,
    ranks: Iterable[int],
    key: str,
    local_ranks: dict[tuple[str, int | None], int | None],
) -> list[Source]:
    spans: dict[int | None, list[Span]] = defaultdict(list)
    wanted = set(ranks)
    for span in source.spans:
        rank = _rank_of_line(span, key)
        spans[rank if rank in wanted else None].append(span)
    split = []
    index_of = {rank: index for index, rank in enumerate(sorted(wanted))}
    for rank in sorted(spans, key=lambda each: -1 if each is None else each):
        identity, own = source.identity, columns_of(spans[rank])
        if rank is not None:
            # Without a local rank it would count as a wrapper of the processes that have one.
            known = rank if key == _LOCAL_RANK else local_ranks.get((identity.node, rank))
            local_rank = index_of[rank] if known is None else known
            identity = identity._replace(rank=rank, local_rank=local_rank)
        events = sum(1 if span.point or span.end_ns is None else 2 for span in own)
        split.append(Source(source.file, identity, own, events, source.offset_ns))
    return split
