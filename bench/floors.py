"""What the figures must reach: all floors in one place, each against the figures of its case."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from bench import harness

PAIRS, MEDIANS = "median of ratios", "ratio of medians"
Verdict = Literal["held", "MISSED", "too few rounds", "MISSED in too few rounds", "not measured"]


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """How many seconds more than the peer's ours may take: the larger of `share` of the peer's,
    and `extra_s`, which is given only where the peer's is below `below_s`."""

    share: float
    extra_s: float
    below_s: float = math.inf

    def of(self, peer_s: float) -> float:
        """Seconds beside a peer's seconds."""
        return max(self.share * peer_s, self.extra_s if peer_s < self.below_s else 0.0)

    def __str__(self) -> str:
        extra = f"{self.extra_s:g} s" + (f" below {self.below_s:g} s" * (self.below_s < math.inf))
        return f"{self.share * 100:.2g} % or {extra}"


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """A bound for our side's figure of one case.

    With a `peer`, `at_least` bounds the ratio (above 1 = ours better), and `at_most` says of how
    many times the peer's seconds (or other cost) ours may need, which is the same ratio turned
    over. Without one they bound the median of the values themselves. `kinds` names which ratios
    must keep the bound: the median of those taken pairwise within rounds, the ratio of medians.
    `at_most_over` bounds by how many seconds ours may take longer: the figure is what is left of
    that, the median over rounds, and below 0 where it was missed. `rounds` is the least number of
    rounds that tell whether the floor holds.
    """

    case: str
    unit: str
    peer: str = ""
    at_least: float | None = None
    at_most: float | None = None
    kinds: tuple[str, ...] = (PAIRS,)
    at_most_over: Allowance | None = None
    rounds: int = 1

    def __str__(self) -> str:
        if self.at_most_over is not None:
            return f"slower by ≤ {self.at_most_over}"
        bound = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        of = "times" if self.peer else self.unit
        return f"{bound} {of}" + (f" in ≥ {self.rounds} rounds" if self.rounds > 1 else "")

    def figures(self, cases: Sequence[harness.Case]) -> dict[str, float]:
        """What stands in the place of the bound, by kind; empty where it was not measured."""
        if self.at_most_over is not None:
            return self._left(cases, self.at_most_over)
        if not self.peer:
            wanted = (self.case, harness.OURS, self.unit)
            values = [c.values for c in cases if (c.case, c.side, c.unit) == wanted and c.values]
            return {"median": statistics.median(values[0])} if values else {}
        for ratio in harness.ratios_of(cases):
            if (ratio.case, ratio.unit, ratio.peer) == (self.case, self.unit, self.peer):
                both = {PAIRS: ratio.median, MEDIANS: ratio.of_medians}
                turned = self.at_most is not None
                return {kind: 1 / both[kind] if turned else both[kind] for kind in self.kinds}
        return {}

    def _left(self, cases: Sequence[harness.Case], allowance: Allowance) -> dict[str, float]:
        """Seconds of the allowance that ours did not take."""
        values = {c.side: c.values for c in cases if (c.case, c.unit) == (self.case, self.unit)}
        ours, peers = values.get(harness.OURS, []), values.get(self.peer, [])
        if not ours or len(ours) != len(peers):
            return {}
        pairs = zip(ours, peers, strict=True)
        return {"s left": statistics.median(peer + allowance.of(peer) - own for own, peer in pairs)}

    def _has_rounds(self, cases: Sequence[harness.Case]) -> bool:
        """Whether each side that it is about was measured often enough."""
        sides = (harness.OURS, self.peer) if self.peer else (harness.OURS,)
        counts = [
            len(c.values)
            for c in cases
            if (c.case, c.unit) == (self.case, self.unit) and c.side in sides
        ]
        return min(counts, default=0) >= self.rounds

    def verdict(self, cases: Sequence[harness.Case]) -> Verdict:
        """Whether the floor holds."""
        figures = self.figures(cases).values()
        if not figures:
            return "not measured"
        if self._holds(figures):
            return "held" if self._has_rounds(cases) else "too few rounds"
        return "MISSED" if self._has_rounds(cases) else "MISSED in too few rounds"

    def _holds(self, figures: Iterable[float]) -> bool:
        if self.at_most_over is not None:
            return min(figures) >= 0
        if self.at_least is not None:
            return min(figures) >= self.at_least
        assert self.at_most is not None
        return max(figures) <= self.at_most


BOTH = (PAIRS, MEDIANS)
_SEQUENTIAL = ("buffered 1", "buffered 4", "direct 1", "direct 4")
_RANDOM = ("random 4k x1", "random 4k x4")
_IMAGE_LINKS = ("1 Gbit/s", "200 Mbit/s", "unshaped")


def _fuse() -> tuple[Floor, ...]:
    striped: tuple[str, ...] = ("C pread", "C mmap")
    images: tuple[str, ...] = ("EROFS over C",)
    peers = {"stripe mount": striped, "stripe mount plain file": striped}
    peers |= {"image mount": images, "image mount served": images}
    return tuple(
        Floor(f"{mount} {access}", unit, peer, at_least=bound)
        for mount, names in peers.items()
        for accesses, unit, bound in ((_SEQUENTIAL, "MiB/s", 0.8), (_RANDOM, "reads/s", 0.4))
        for access in accesses
        if names == striped or not access.startswith("direct")
        for peer in names
    )


def _image() -> tuple[Floor, ...]:
    bare = tuple(
        Floor(f"{command}{work} {link}", "s", "with agent", at_most=1.1, kinds=BOTH)
        for command in ("", "image run ")
        for link in _IMAGE_LINKS
        for work in ("numpy+pyarrow", "torch")
    )
    return bare + tuple(
        Floor(f"{work} 1 Gbit/s", "s", peer, least, most, BOTH, rounds=9)
        for work, of_limit in (("numpy+pyarrow", 1.6), ("torch", 1.25))
        for peer, least, most in (("stargz optimised", 4.0, None), ("limit", None, of_limit))
    )


def _depsnap() -> tuple[Floor, ...]:
    out: list[Floor] = []
    for name in ("small", "large"):
        label = f"ready, ext4, {name}, locked"
        out += [
            Floor(f"first start {label}", "s", "pip warm", at_most=1.03, kinds=BOTH),
            Floor(f"fresh node {label}", "s", "pip warm", at_least=10, kinds=BOTH),
            Floor(f"fresh node {label}", "s", "uv copy warm", at_least=1.3, kinds=BOTH),
            Floor(f"second start {label}", "s", "pip warm", at_least=25, kinds=BOTH),
            Floor(f"second start {label}", "s", "uv hard link warm", at_least=3, kinds=BOTH),
            Floor(f"second start after resolving, ext4, {name}, unpinned", "s", at_most=0.6),
        ]
    return tuple(out)


WORKING = Allowance(share=1 / 0.97 - 1, extra_s=0.3, below_s=10)
"""Where the store or registry works: never slower, or by what nobody notices."""
FAULTY = Allowance(share=0.1, extra_s=5)
"""Where it is slow, hangs or is gone before the job begins."""
_FAULTS = ("gone", "slow", "hanging")


def _plain() -> tuple[Floor, ...]:
    working = (
        *("deps first start", "deps fresh node", "deps second start", "deps nothing to gain"),
        *(
            "deps tiny install",
            "deps uv links",
            "image tiny",
            "image tiny mount",
            "image nothing to gain",
        ),
        *("checkpoint tiny", "checkpoint tiny cat", "checkpoint tiny mount"),
        *("checkpoint tiny put", "start nothing to do"),
    )
    faulty = ("deps store", "image registry", "start checkpoint store")
    return tuple(
        Floor(case, "s", "plain", at_most_over=allowance)
        for cases, allowance in (
            (working, WORKING),
            ([f"{what} {fault}" for what in faulty for fault in _FAULTS], FAULTY),
        )
        for case in cases
    )


def _start() -> tuple[Floor, ...]:
    parts = ("hot set", "layer", "checkpoint", "prefetch")
    kept = ("second start", "again in its container", "after warm")
    return (
        Floor("fresh node", "s", "limit", at_most=1.5),
        Floor("fresh node", "s", "plain", at_least=5),
        Floor("second start", "s", "warm plain", at_most=1.2),
        Floor("again in its container", "s", "warm plain", at_most=1.2),
        Floor("newer checkpoint", "s", "needed", at_most=1.2),
        Floor("after warm", "s", "second start", at_most=1.1),
        *(Floor(f"{case} received", "MB", at_most=0.5) for case in kept),
        *(
            Floor(f"without a part: {case}", "s", f"without {part}", at_least=0.97)
            for case in ("fresh node", "second start")
            for part in parts
        ),
        Floor("larger job", "s", "plain", at_least=7),
        Floor("agent memory", "MiB", at_most=100),
        Floor("agent idle", "% of a core", at_most=0.1),
    )


FLOORS: dict[str, tuple[Floor, ...]] = {
    "wrapper": (
        Floor("run -- true", "s", "bare interpreter", at_most=1.5),
        Floor("run -- true, uv", "s", "bare interpreter", at_most=1.5),
    ),
    "report": (
        Floor("330k events", "s", "duckdb", at_most=2),
        Floor("65,536 ranks", "s", "duckdb", at_most=2),
        *(
            Floor(f"65,536 ranks{output}", unit, at_most=most)
            for output in ("", ", json")
            for unit, most in (("s", 10), ("bytes", 1e9))
        ),
    ),
    "fuse": _fuse(),
    "fetch": (
        Floor("range fetch", "GB/s", "raw parallel", at_least=0.9),
        Floor("range fetch", "GB/s", "one stream", at_least=15),
        Floor("range fetch, cores apart", "GB/s", "raw parallel", at_least=0.9),
        Floor("range fetch, cores apart", "CPU s/GB", at_most=0.3),
    ),
    "hdfs": (
        Floor("striped read r1", "MiB/s", "one reader", at_least=2.7),
        Floor("striped read r1", "MiB/s", "link sum", at_least=0.9),
        *(
            Floor(f"mount {reader}", "MiB/s", "rclone mount", at_least=3.0)
            for reader in ("read", "dd", "cat", "torch.load")
        ),
        Floor("mount plain file of one block", "MiB/s", "rclone mount", at_least=0.97),
    ),
    "image": _image(),
    "depsnap": _depsnap(),
    "plain": _plain(),
    "start": _start(),
}
