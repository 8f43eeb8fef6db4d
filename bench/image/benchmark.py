"""From nothing local to a container's first work: ours against whole pulls, stargz and the disk.

    python -m bench image            all cases
    python -m bench.image CASE ...   these cases alone, put into the results in place of older ones

One stock image (Debian, Python, numpy, pyarrow, pandas, scipy, torch; 447 MB compressed) in
Debian's docker-registry behind a link of its own: 1 Gbit/s with a round trip of 1 ms, 200 Mbit/s
with 5 ms, and unshaped. The registry's page cache is warm, ours has nothing of the image, and
each start begins without any of it on disk. Figures are seconds until the program's first line;
`CPU` is processor time of all that runs on our side until then, the kernel's threads left out;
`received` what came over the link until then. A container of podman's runs on a mounted tree
under a throw-away overlay, for ours and for the disk; runc runs all of them.

`ours` begins on a bare node: no process of ours runs. `with agent` has one that stands by, started
for that side alone; the cases of `image run` are of that command, the others of `image mount` and
`podman run`. Each side runs once uncounted before the first round, so that its programs (our
modules, podman, containerd, the stargz snapshotter) are in the page cache for all.

`limit` is the longer of: the hot set over the link, the same run on a local EROFS in memory.
`cold local disk` is that EROFS with nothing of it in memory. `stargz optimised` has an image for
each program, optimised by running it. `full pull` is containerd's, which unpacks by `unpigz`.
Needs root; minutes to make the images at the first run. Whole pulls, which take two
minutes a round, are measured in the first three rounds; `--sides` measures some of the sides and
keeps nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import harness
from bench.image import hotsets, ours, peers, steady
from bench.image.lab import FREE, LINKS, WORK, Lab, Link, Start, lab, own_group
from tools.images import real
from tools.netlab import own_network

MEASURES = (
    "bootseer/__init__.py",
    "bootseer/__main__.py",
    "bootseer/agent",
    "bootseer/blockimage",
    "bootseer/blocks",
    "bootseer/cli/__init__.py",
    "bootseer/cli/image",
    "bootseer/cli/read_ahead.py",
    "bootseer/cli/shared/__init__.py",
    "bootseer/cli/shared/options.py",
    "bootseer/cli/shared/size_text.py",
    "bootseer/config/__init__.py",
    "bootseer/config/paths.py",
    "bootseer/context_managers.py",
    "bootseer/errors.py",
    "bootseer/events",
    "bootseer/fuse",
    "bootseer/imageprefetch",
    "bootseer/light_dataclasses.py",
    "bootseer/reporting.py",
    "bootseer/storage",
    "bootseer/system",
    "scripts",
    "bench/image/benchmark.py",
    "bench/image/hotsets.py",
    "bench/image/lab.py",
    "bench/image/ours.py",
    "bench/image/peers.py",
    "bench/image/steady.py",
    "tools/images",
)
Side = Callable[[], Start]
TOGETHER = 8
HOT_SETS = "hot sets"
WITH_AGENT = "with agent"
BY_RUN = "image run "
PULL_ROUNDS = 3
PULLS = ("full pull", "full pull podman")
RECORDING_ROUNDS = 10  # times the rounds of other cases: processor time differs by 2 % at most
COLD = "nothing of the image on disk or in memory; each side's programs in memory"


def names() -> list[str]:
    """All cases."""
    starts = [f"{work} {link.name}" for link in LINKS for work in WORK]
    return [*starts, *(f"{BY_RUN}{name}" for name in starts), *EXTRA]


def run(options: harness.Options) -> list[harness.Case]:
    """Measure all cases."""
    first = "numpy+pyarrow 1 Gbit/s"
    return measure(options, [first, f"{BY_RUN}{first}", *EXTRA] if options.quick else names())


def measure(
    options: harness.Options,
    wanted: Sequence[str],
    done: Callable[[list[harness.Case]], None] | None = None,
    store: Path | None = None,
    sides: Sequence[str] = (),
) -> list[harness.Case]:
    """Measure these cases; `done` gets each one's as soon as they are there.

    `store` keeps our registry's content for the next run, which then publishes nothing. `sides`
    are those to be measured of cases of starts, besides ours; none: all.
    """
    ours.compile_modules()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would have programs compiled each time
    image = real.image("torch")
    other = real.image("python")  # made by pip: the network below leads to no index
    storage, disk = peers.prepare(image)
    cases: list[harness.Case] = []
    scratch = Path(tempfile.mkdtemp(prefix="bi-"))
    try:
        with own_group() as group, own_network():
            if store is not None:
                store.mkdir(parents=True, exist_ok=True)
                (scratch / "ours-data").symlink_to(store.resolve())
            with lab(FREE, scratch, storage, group) as place:
                sizes = _published(place, image.source, other.source, scratch / "ours-data")
            for link in LINKS:
                here = [name for name in wanted if _link_of(name) == link]
                if here:
                    with lab(link, scratch, storage, group) as place:
                        for name in here:
                            made = _one(place, name, sizes, disk, options, sides)
                            cases += made
                            if done is not None:
                                done(made)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return cases


def _published(place: Lab, source: str, other: str, stored: Path) -> dict[str, int]:
    """The hot sets' sizes by program; all that we need in a registry is pushed first."""
    told = stored / "sizes.json"
    if told.exists():
        sizes: dict[str, int] = json.loads(told.read_text(encoding="utf-8"))
        return sizes
    also = functools.partial(hotsets.publish, other=other)
    sizes = ours.publish(place, source, list(WORK), also)
    told.write_text(json.dumps(sizes), encoding="utf-8")
    return sizes


def _link_of(name: str) -> Link:
    return next((link for link in LINKS if name.endswith(link.name)), LINKS[0])


def _one(
    place: Lab,
    name: str,
    sizes: dict[str, int],
    disk: Path,
    options: harness.Options,
    wanted: Sequence[str],
) -> list[harness.Case]:
    if name in EXTRA:
        return harness.under(_link(place), EXTRA[name](place, name, disk, options.runs))
    work = next(work for work in WORK if name.removeprefix(BY_RUN).startswith(work))
    by_run = name.startswith(BY_RUN)
    sides = run_sides(place, work) if by_run else start_sides(place, work, disk, options.quick)
    sides = {s: side for s, side in sides.items() if not wanted or s in (harness.OURS, *wanted)}
    runs = _interleaved(name, sides, options.runs)
    return harness.under(_link(place), _cases(name, runs, place.link, sizes[work]))


def _link(place: Lab) -> str:
    link = place.link
    shape = f"link {link.mbit:g} Mbit/s, {link.rtt_ms:g} ms" if link.mbit else "link unshaped"
    return f"{shape}; {COLD}"


def run_sides(place: Lab, work: str) -> dict[str, Side]:
    """What is compared in a case of `image run`."""
    return {
        harness.OURS: lambda: ours.run_start(place, work),
        WITH_AGENT: lambda: ours.run_start(place, work, with_agent=True),
    }


def start_sides(place: Lab, work: str, disk: Path, quick: bool) -> dict[str, Side]:
    """What is compared in a case of starts."""
    sides: dict[str, Side] = {
        harness.OURS: lambda: ours.start(place, work),
        WITH_AGENT: lambda: ours.start(place, work, with_agent=True),
        "no hot set": lambda: ours.start(place, work, "--no-hot"),
        "stargz optimised": lambda: peers.stargz_pull(place, work, peers.optimised(work)),
        "cold local disk": lambda: peers.cold_disk(place, work, disk),
        "warm local disk": lambda: peers.warm_disk(place, work, disk),
    }
    if not quick:
        sides["stargz"] = lambda: peers.stargz_pull(place, work, peers.LAZY)
        sides[PULLS[0]] = lambda: peers.containerd_pull(place, work)
        sides[PULLS[1]] = lambda: peers.podman_pull(place, work)
    return sides


def _interleaved(name: str, sides: dict[str, Side], rounds: int) -> dict[str, list[Start]]:
    """A list of starts for each side, after one of each that brings its programs into memory."""
    runs: dict[str, list[Start]] = {side: [] for side in sides}
    for warm in sides.values():
        warm()

    def counted(side: str) -> Callable[[], float]:
        def turn() -> float:
            runs[side].append(sides[side]())
            made = runs[side][-1]
            about = (
                f"{made.seconds:.2f} s, {made.received_bytes / 1e6:.1f} MB, {made.cpu_s:.2f} CPU-s"
            )
            print(f"{name}, {side}: {about}", file=sys.stderr, flush=True)
            return 0.0

        return turn

    pulls = {side: min(PULL_ROUNDS, rounds) for side in PULLS if side in sides}
    turns = {side: counted(side) for side in sides}
    harness.interleave(turns, rounds=rounds, warmup=0, at_most=pulls)
    return runs


def _cases(
    name: str, runs: dict[str, list[Start]], link: Link, hot_bytes: int
) -> list[harness.Case]:
    seconds = {side: [r.seconds for r in starts] for side, starts in runs.items()}
    wire_s = hot_bytes * 8 / (link.mbit * 1e6) if link.mbit else 0.0
    if "warm local disk" in seconds:
        seconds["limit"] = [max(wire_s, warm) for warm in seconds["warm local disk"]]
    agent = {harness.OURS: "no process of ours before", WITH_AGENT: "agent running"}
    cases = harness.cases_of(name, seconds, unit="s", conditions=agent)
    cpu = {side: [r.cpu_s for r in starts] for side, starts in runs.items()}
    cases += harness.cases_of(f"{name} CPU", cpu, unit="CPU-s")
    far = {s: [r.received_bytes / 1e6 for r in v] for s, v in runs.items() if "local" not in s}
    far["hot set"] = [hot_bytes / 1e6] * len(far[harness.OURS])
    return cases + harness.cases_of(f"{name} received", far, unit="MB")


# Further cases, on the first link.

Extra = Callable[[Lab, str, Path, int], list[harness.Case]]


def recording(place: Lab, name: str, _disk: Path, rounds: int) -> list[harness.Case]:
    """What recording adds to a start, by processor time: enough rounds to tell 2 %."""
    work = "numpy+pyarrow"
    sides: dict[str, Side] = {
        harness.OURS: lambda: ours.start(place, work),
        "without recording": lambda: ours.start(place, work, "--no-record"),
    }
    runs = _interleaved(name, sides, RECORDING_ROUNDS * rounds)
    cpu = {side: [start.cpu_s for start in starts] for side, starts in runs.items()}
    each = [ours / peer for ours, peer in zip(*cpu.values(), strict=True)]
    half = 1.96 * statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    mean = f"mean ratio {statistics.mean(each):.3f} ± {half:.3f} (95 %)"
    cases = harness.cases_of(f"{name} CPU", cpu, unit="CPU-s", conditions=mean)
    return _plain_cases(name, runs) + cases


def at_once(place: Lab, name: str, _disk: Path, rounds: int) -> list[harness.Case]:
    """Several containers of one image against one, without the background fill."""
    work, distinct = "numpy+pyarrow", list[float]()
    sides: dict[str, Side] = {
        harness.OURS: lambda: ours.together(
            place, work, TOGETHER, lambda size: distinct.append(size / 1e6)
        ),
        "one container": lambda: ours.start(place, work, "--no-fill"),
    }
    runs = _interleaved(name, sides, rounds)
    # What came over the link, against each different block, and the hot set, once.
    received = [start.received_bytes / 1e6 for start in runs[harness.OURS]]
    once = {harness.OURS: received, "each block once": distinct[-len(received) :]}
    return _plain_cases(name, runs) + harness.cases_of(f"{name} fetched", once, unit="MB")


def _plain_cases(name: str, runs: dict[str, list[Start]]) -> list[harness.Case]:
    seconds = {side: [r.seconds for r in starts] for side, starts in runs.items()}
    far = {side: [r.received_bytes / 1e6 for r in starts] for side, starts in runs.items()}
    return [
        *harness.cases_of(name, seconds, unit="s"),
        *harness.cases_of(f"{name} received", far, unit="MB"),
    ]


def hot_sets(place: Lab, name: str, _disk: Path, rounds: int) -> list[harness.Case]:
    """Hot sets that do not fit."""
    return hotsets.cases(place, name, rounds, _interleaved)


EXTRA: dict[str, Extra] = {
    HOT_SETS: hot_sets,
    "recording": recording,
    f"{TOGETHER} containers at once": at_once,
    "steady reads": steady.steady,
}


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        print(f"bench.image: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def main() -> int:
    """Measure some cases and put them into the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.image", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("case", nargs="+", choices=names())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--store", type=Path, help="a folder to keep what is published in")
    parser.add_argument("--sides", default="", help="these besides ours, by commas; kept nowhere")
    parser.add_argument("--quick", action="store_true", help="fewer peers; results apart")
    arguments = parser.parse_args()
    with _noted():
        options = harness.Options(arguments.quick, arguments.runs)
        command = harness.command_line("image", sys.argv[1:])

        sides = [side for side in arguments.sides.split(",") if side]

        def done(cases: list[harness.Case]) -> None:
            if sides:
                return
            harness.keep("image", cases, names=names(), command=command, quick=options.quick)

        cases = measure(options, arguments.case, done, arguments.store, sides)
    print(harness.table(cases))
    return 0
