"""A job's whole start in its container: from nothing local to its first step.

    python -m bench start            all cases
    python -m bench.start CASE ...   these cases alone, put into the results in place of older ones

The example's job (`examples/train`) in an image of Debian's Python and packages that it does not
read; its dependencies in a package index, its checkpoint of 0.13 GB in a web server, its image in
Debian's docker-registry, all behind one link of 1 Gbit/s with a round trip of 1 ms. Their page
cache is warm. Seconds are from the launch until the first step is done, `received` what came over
the link until then. Each side runs once uncounted before the first round. A machine may drop from
its page cache what no program has used for a minute, and a start right after one of its own kind is
faster than after another's. So what is counted follows one that is not: a `plain` and a node that
was warmed a `warm plain`, a fresh node a second start, a `warm plain` and a second start their own
kind. In each round these two and a start with a newer checkpoint take turns three times.

`plain` pulls the image by podman, installs by pip, fetches the checkpoint by one request, and runs.
`ours` is one command, `bootseer image run --config`. On a fresh node no process of ours runs
before. Each start leaves an agent behind for the later ones (BOOTSEER_AGENT_KEEP=600), and so does
`bootseer warm`; `second start, no agent` finds none. `warm plain` is the same job by podman with
its image, environment and checkpoint on the local disk, all of it in memory. `limit` is the larger
of that and the bytes that a start needs over the link, and the first step's own seconds: the hot
pack of the image, the wheels, the checkpoint.

`fresh node`: the node has nothing of the job. `second start`: the node as the fresh start left it,
with the image and the dependencies filled in meanwhile. `again in its container`: the command once
more in a container that has run it. `newer checkpoint`: a second start, but for a new version of
the checkpoint; its peer `needed` is the larger of `warm plain` and those bytes over the link.
`after warm`: a node on which `bootseer warm` ran, against the second start. `without a part`: a
fresh and a second start with one part of ours switched off. `larger job`: a job of torch and the
packages of fine-tuning, 1.4 GB installed, with a checkpoint of 1 GB, in an image of 2 GB of which
it reads little. `agent`: memory of the node's agent with its helpers after an answer, and the
processor's time that it takes while nothing is asked. Needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import harness
from bench.start import agent
from tools.machine import remove
from tools.netlab import own_network
from tools.startlab.lab import ROOT, Job, Link, StartLab, download
from tools.startlab.starts import Part, Start, Starts

MEASURES = (
    "bootseer/__init__.py",
    "bootseer/__main__.py",
    "bootseer/agent",
    "bootseer/blockimage",
    "bootseer/blocks",
    "bootseer/cli/__init__.py",
    "bootseer/cli/image",
    "bootseer/cli/read_ahead.py",
    "bootseer/config",
    "bootseer/depsnap/key",
    "bootseer/entrypoint",
    "bootseer/events",
    "bootseer/fuse",
    "bootseer/imageprefetch",
    "bootseer/light_dataclasses.py",
    "bootseer/storage",
    "bootseer/stripedfs",
    "bootseer/system",
    "examples/train",
    "scripts",
    "bench/start/agent.py",
    "bench/start/benchmark.py",
    "bench/start/large",
    "bench/depsnap/large-lock.txt",
    "tools/startlab",
)
_KINDS = (
    *("fresh node", "second start", "second start, no agent", "again in its container"),
    *("newer checkpoint", "after warm"),
)
JOB = (*_KINDS, *(f"{kind} received" for kind in _KINDS))
"""Cases that share their rounds, as those of the other groups do: a second start follows a fresh
one."""
WITHOUT = ("without a part: fresh node", "without a part: second start")
LARGER = ("larger job", "larger job received")
AGENT = ("agent memory", "agent idle")
CASES = (*JOB, *WITHOUT, *LARGER, *AGENT)
PLAIN, WARM, LIMIT, NEEDED, SECOND = "plain", "warm plain", "limit", "needed", "second start"
ALONE = "second start, no agent"
PARTS: tuple[Part, ...] = ("hot set", "layer", "checkpoint", "prefetch")
LINK = Link()
EXAMPLE = Job.of_example(ROOT / "examples/train")
LARGE = Job(
    ROOT / "bench/start/large",
    ROOT / "bench/depsnap/large-lock.txt",
    checkpoint="model.pt",
    unread_bytes=2_000_000_000,
)
IDLE_S = 30.0
REPEATS = 3
"""Starts of the short kinds in each round: on a machine that others use, too, one says little."""


def run(options: harness.Options) -> list[harness.Case]:
    """Measure all cases."""
    return measure(options, CASES)


def measure(
    options: harness.Options,
    wanted: Sequence[str],
    done: Callable[[list[harness.Case]], None] | None = None,
) -> list[harness.Case]:
    """Measure these cases; `done` gets those that share their rounds once they are there."""
    groups: dict[tuple[str, ...], Callable[[], list[harness.Case]]] = {
        JOB: lambda: _measure_job(options.runs),
        WITHOUT: lambda: _measure_parts(options.runs),
        LARGER: lambda: _measure_larger(options.runs),
        AGENT: lambda: agent.measure(options.runs, IDLE_S),
    }
    cases: list[harness.Case] = []
    for names, group in groups.items():
        if not set(names) & set(wanted):
            continue
        made = group()
        cases += made
        if done is not None:
            done(made)
    return cases


@contextmanager
def prepared(job: Job = EXAMPLE, link: Link = LINK) -> Iterator[Starts]:
    """A lab in which the job was started and recorded."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would have programs compiled each time
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(base) / "bootseer/startlab"
    scratch = Path(tempfile.mkdtemp(prefix="bs-"))
    try:
        download(job, kept)
        with (
            own_network(),
            StartLab(job, kept, scratch / "lab", link) as lab,
            Starts(lab, same_memory=True, keeps_agent=True) as starts,
        ):
            starts.install_warm()
            starts.record()
            yield starts
    finally:
        remove(scratch)


class Rounds:
    """The starts of one measurement, by their kinds; those that fall back, or compute otherwise,
    end it."""

    def __init__(self, starts: Starts) -> None:
        self.starts = starts
        self.where = f"link {LINK}; {os.cpu_count()} cores; disk {_disk(starts.node)}"
        self._made: dict[str, list[Start]] = {}
        self._rounds = 0

    def counted(self, kind: str, start: Callable[[], Start]) -> Callable[[], float]:
        """A side, for `harness.interleave`."""

        def turn() -> float:
            made = start()
            self._made.setdefault(kind, []).append(made)
            received = made.received_bytes / 1e6
            print(f"{kind}: {made.seconds:.2f} s, {received:.1f} MB", file=sys.stderr, flush=True)
            for reason in made.fallbacks():
                raise RuntimeError(f"{kind} fell back: {reason}")
            return made.seconds

        return turn

    def run(self, sides: dict[str, Callable[[], float]], rounds: int) -> None:
        """One round that is not counted, and so many that are."""
        self._rounds = rounds
        harness.interleave(sides, rounds=rounds, warmup=1)
        outputs = {start.output for made in self._made.values() for start in made}
        if len(outputs) > 1:
            raise RuntimeError(f"the jobs did not compute the same: {sorted(outputs)}")

    def of(self, kind: str) -> list[Start]:
        """The starts of a kind, in order."""
        made = self._made[kind]
        return made[len(made) // (self._rounds + 1) :]

    def seconds(self, kind: str) -> list[float]:
        """Their seconds."""
        return [start.seconds for start in self.of(kind)]

    def received(self, kind: str) -> list[float]:
        """What came over the link, in MB."""
        return [start.received_bytes / 1e6 for start in self.of(kind)]

    def limit(self, needed_bytes: int, *, with_step: bool = True) -> list[float]:
        """The larger of warm plain starts, and of so many bytes with the first step after them."""
        wire_s = needed_bytes * 8 / (LINK.mbit * 1e6)
        steps_s = [start.span_s("first_step") * with_step for start in self.of(WARM)]
        bounds = zip(self.seconds(WARM), steps_s, strict=True)
        return [max(wire_s + step_s, warm_s) for warm_s, step_s in bounds]


def _measure_job(rounds: int) -> list[harness.Case]:
    with prepared() as starts:
        made = Rounds(starts)
        plain = made.counted(PLAIN, lambda: _again_in_memory(starts.warm_plain, starts.plain))
        warm = made.counted(WARM, lambda: _again_in_memory(starts.warm_plain, starts.warm_plain))
        fresh = made.counted("fresh node", lambda: _again_in_memory(starts.second, starts.fresh))
        second = made.counted(SECOND, lambda: _again_in_memory(starts.second, starts.second))
        alone = made.counted(ALONE, starts.second_alone)
        again = made.counted("again in its container", starts.again)
        newer = made.counted("newer checkpoint", starts.newer)
        warmed = made.counted(
            "after warm", lambda: _again_in_memory(starts.warm_plain, starts.second)
        )

        def ours() -> float:
            seconds = fresh()
            for _ in range(REPEATS):
                starts.warm()
                warm()
                second()
                newer()
            again()
            alone()
            starts.warm_empty()
            warmed()
            return seconds

        made.run({PLAIN: plain, harness.OURS: ours}, rounds)
        needed, checkpoint = starts.needed_bytes(), starts.checkpoint_bytes
        firsts, lasts = slice(0, None, REPEATS), slice(REPEATS - 1, None, REPEATS)  # of each round
        peers = {
            "fresh node": {
                PLAIN: made.seconds(PLAIN),
                LIMIT: made.limit(needed)[firsts],
                WARM: made.seconds(WARM)[firsts],
            },
            SECOND: {WARM: made.seconds(WARM)},
            ALONE: {WARM: made.seconds(WARM)[lasts]},
            "newer checkpoint": {NEEDED: made.limit(checkpoint, with_step=False)},
            "again in its container": {WARM: made.seconds(WARM)[lasts]},
            "after warm": {SECOND: made.seconds(SECOND)[lasts]},
        }
        cases: list[harness.Case] = []
        for kind, others in peers.items():
            values = {harness.OURS: made.seconds(kind), **others}
            cases += harness.cases_of(kind, values, unit="s")
            received = {harness.OURS: made.received(kind)}
            if kind == "fresh node":
                received |= {PLAIN: made.received(PLAIN), NEEDED: [needed / 1e6] * rounds}
            cases += harness.cases_of(f"{kind} received", received, unit="MB")
        return harness.under(made.where, cases)


def _again_in_memory(before: Callable[[], Start], start: Callable[[], Start]) -> Start:
    """A start whose programs another one has just used."""
    before()
    return start()


def _measure_parts(rounds: int) -> list[harness.Case]:
    """Each round has whole starts and starts without each part, so that drift strikes all."""
    with prepared() as starts:
        made = Rounds(starts)

        def pair(without: Part | None) -> Callable[[], float]:
            name = without or "whole"
            fresh = made.counted(f"fresh {name}", lambda: starts.fresh(without))
            second = made.counted(f"second {name}", lambda: starts.second(without))

            def turn() -> float:
                seconds = fresh()
                starts.warm()
                second()
                return seconds

            return turn

        made.run(
            {harness.OURS: pair(None), **{part: pair(part) for part in PARTS}},
            rounds,
        )
        cases: list[harness.Case] = []
        for kind, case in (("fresh", "fresh node"), ("second", SECOND)):
            values = {harness.OURS: made.seconds(f"{kind} whole")}
            for part in PARTS:
                values[f"without {part}"] = made.seconds(f"{kind} {part}")
            cases += harness.cases_of(f"without a part: {case}", values, unit="s")
        return harness.under(made.where, cases)


def _measure_larger(rounds: int) -> list[harness.Case]:
    with prepared(LARGE) as starts:
        made = Rounds(starts)
        made.run(
            {
                PLAIN: made.counted(
                    PLAIN, lambda: _again_in_memory(starts.warm_plain, starts.plain)
                ),
                harness.OURS: made.counted(
                    "fresh node", lambda: _again_in_memory(starts.second, starts.fresh)
                ),
                WARM: made.counted(
                    WARM, lambda: _again_in_memory(starts.warm_plain, starts.warm_plain)
                ),
            },
            rounds,
        )
        needed = starts.needed_bytes()
        seconds = {
            harness.OURS: made.seconds("fresh node"),
            PLAIN: made.seconds(PLAIN),
            LIMIT: made.limit(needed),
            WARM: made.seconds(WARM),
        }
        received = {
            harness.OURS: made.received("fresh node"),
            PLAIN: made.received(PLAIN),
            NEEDED: [needed / 1e6] * rounds,
        }
        cases = harness.cases_of("larger job", seconds, unit="s")
        cases += harness.cases_of("larger job received", received, unit="MB")
        return harness.under(made.where, cases)


def _disk(path: Path) -> str:
    """The kind of file system that a path lies on."""
    kinds = (line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines())
    device = os.stat(path).st_dev
    return next((kind for _, at, kind, *_ in kinds if _device_of(at) == device), "unknown")


def _device_of(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def main() -> int:
    """Measure the cases and put them into the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    command = harness.command_line("start", sys.argv[1:])

    def done(cases: list[harness.Case]) -> None:
        harness.keep("start", cases, names=list(CASES), command=command)

    wanted = arguments.case or CASES
    cases = measure(harness.Options(False, arguments.runs), wanted, done)
    print(harness.table(cases))
    return 0
