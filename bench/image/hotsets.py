"""Hot sets that do not fit, for `bench.image`: how much a bad one can cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench import harness
from bench.image import ours
from bench.image.lab import WORK as WORKS
from bench.image.lab import Lab, Start
from bench.image.peers import REPOSITORY
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.imageprefetch.record.trace_store import TraceStore

WORK, OTHER = "numpy+pyarrow", "torch"
PAGE_BYTES, RUN_PAGES = 4096, 16
KINDS = ("empty", "random", "of another program", "of another image", "of everything")
OTHER_TAG, CARRIED = "other", "another-image"


def publish(lab: Lab, cache: Path, other: str) -> None:
    """Build and push the crafted hot sets; `cache` holds the recording of `WORK`.

    `other` is the source of another stock image that runs `WORK`: what its start reads is carried
    over to this one, file by file.
    """
    (path,) = cache.glob(f"images/*/traces/{ours.workload(WORK)}.trace")
    store = TraceStore(path.parent)
    recorded = store.load(ours.workload(WORK))
    if recorded is None:
        raise RuntimeError("nothing was recorded")
    for name, made in (("empty", _empty), ("random", _random), ("everything", _everything)):
        store.add(replace(made(recorded), workload=name))
        words = ["--plain-http", "--cache", str(cache), "--workload", name, "--push"]
        ours.call(lab, "hotset", "build", *words, ours.image(lab))
    lab.ours.push(other, REPOSITORY, OTHER_TAG)
    ref = lab.ours.reference(REPOSITORY, OTHER_TAG)
    words = ["--plain-http", "--cache", str(cache)]
    ours.call(lab, "build", *words, ref)
    words += ["--workload", CARRIED]
    program = ["python3", "-c", WORKS[WORK]]
    ours.call(lab, "record", *words, "--push", ref, "--", *program)
    ours.call(lab, "hotset", "build", *words, "--from", ref, "--push", ours.image(lab))


def _empty(trace: Trace) -> Trace:
    """One page: nothing at all is no hot set."""
    return replace(trace, extents=(trace.extents[0]._replace(length=trace.page_bytes),))


def _random(trace: Trace) -> Trace:
    """As much as the real one has, from anywhere, in any order."""
    rng, run = random.Random(7), RUN_PAGES * trace.page_bytes
    places = rng.sample(range(trace.size_bytes // run), trace.touched_bytes() // run)
    extents = [Touched(place * run, run, number, 1) for number, place in enumerate(places)]
    return replace(trace, extents=tuple(extents))


def _everything(trace: Trace) -> Trace:
    return replace(trace, extents=(Touched(0, trace.size_bytes, 0, trace.starts),))


def cases(
    lab: Lab, name: str, rounds: int, interleaved: Callable[..., dict[str, list[Start]]]
) -> list[harness.Case]:
    """Starts with each, against one without a hot set; ours is the one with the right one."""
    names = {
        "empty": "empty",
        "random": "random",
        "of another program": ours.workload(OTHER),
        "of another image": CARRIED,
        "of everything": "everything",
    }
    sides: dict[str, Callable[[], Start]] = {
        harness.OURS: lambda: ours.start(lab, WORK),
        "no hot set": lambda: ours.start(lab, WORK, "--no-hot"),
    }
    for kind in KINDS:
        sides[kind] = lambda kind=kind: ours.start(lab, WORK, name=names[kind])  # type: ignore[misc]
    runs = interleaved(name, sides, rounds)
    seconds = {side: [r.seconds for r in starts] for side, starts in runs.items()}
    out = harness.cases_of(name, {s: seconds[s] for s in (harness.OURS, "no hot set")}, unit="s")
    for kind in KINDS:  # each is ours, and what it must not be slower than its peer
        pair = {harness.OURS: seconds[kind], "no hot set": seconds["no hot set"]}
        out += harness.cases_of(f"{name}: {kind}", pair, unit="s")
    return out
