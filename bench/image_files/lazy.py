"""File mode inside containers whose image loads lazily: Debian's stargz, not optimised.

The image lies in a registry behind a link of 1 Gbit/s with a round trip of 1 ms; each start is
with a new snapshotter and containerd, so that nothing of it is there. `ours` is the container's
command behind `bootseer start` with the trace of a start on a local disk; the wrapper is shown to
the container by a bind mount. `stargz` is the command alone. Seconds from the pull's beginning to
the program's first line.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.image import peers
from bench.image.lab import LINKS, WORK, Lab, Start, lab, own_group
from tools.images import real
from tools.netlab import own_network

HOME = "/opt/bootseer"
NAME = "stargz"


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where lazily loaded containers run, and what is shown to them."""

    lab: Lab
    home: Path
    shared: Path

    def start(self, *words: str) -> Start:
        """From nothing local to the first line of a container that runs these words."""
        shown = [
            *("--mount", f"type=bind,src={self.home},dst={HOME},options=rbind:ro"),
            *("--mount", f"type=bind,src={self.shared},dst=/shared,options=rbind:rw"),
        ]
        return peers.stargz_run(self.lab, peers.LAZY, shown, words)


@contextmanager
def place(home: Path, shared: Path) -> Iterator[Lazy]:
    """The registry and its link; leaves this process's network for one of its own meanwhile."""
    storage, _ = peers.prepare(real.image("torch"))
    scratch = Path(tempfile.mkdtemp(prefix="bl-"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        with own_group() as group, own_network(), lab(LINKS[0], scratch, storage, group) as made:
            yield Lazy(made, home, shared)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def measure(
    here: Lazy,
    sides: Callable[[str], dict[str, Sequence[str]]],
    works: Sequence[str],
    rounds: int,
) -> list[harness.Case]:
    """`sides` gives the words of each side for a program."""
    cases: list[harness.Case] = []
    for work in works:
        received: dict[str, list[float]] = {}

        def side(
            name: str, words: Sequence[str], far: dict[str, list[float]] = received
        ) -> Callable[[], float]:
            def turn() -> float:
                made = here.start(*words)
                far.setdefault(name, []).append(made.received_bytes / 1e6)
                about = f"{made.seconds:.2f} s, {made.received_bytes / 1e6:.1f} MB"
                print(f"{NAME}, {name}: {about}", file=sys.stderr, flush=True)
                return made.seconds

            return turn

        each = {name: side(name, words) for name, words in sides(work).items()}
        values = harness.interleave(each, rounds=rounds, warmup=0)
        cases += harness.cases_of(f"{work} {NAME}", values, unit="s")
        cases += harness.cases_of(f"{work} {NAME} received", received, unit="MB")
    return harness.under(f"no agent; link {LINKS[0].name}", cases)


def names() -> list[str]:
    """The cases that there are."""
    return [f"{work} {NAME}" for work in WORK]
