"""Striped and plain checkpoints on a real HDFS whose DataNodes have links of ~95 MiB/s each.

    python -m bench hdfs            all cases
    python -m bench.hdfs CASE ...   these cases alone, put into the results in place of older ones

A NameNode and three DataNodes (Hadoop 2.7.3) run here, each DataNode in a network namespace of
its own behind a link capped in both directions; clients and the NameNode share one free of caps.
The DataNodes' files lie in memory (tmpfs), so reads never wait for a disk, and each mount is a
fresh one, so nothing of it is in the page cache. Sides take turns in processes of their own; each
reads all of one file of 768 MiB (mounts: 512) or writes one of 1 GiB (`--quick` 192 MiB) whose
blocks are of 128 MiB, and the bytes that Python reads are compared with the source's.

`striped read r1`: ours reads a checkpoint whose stripes were steered over the DataNodes, through
webhdfs://; `over hdfs-native` reads the same through hdfs://, `random placement` (through hdfs://
too) one whose stripes HDFS placed. `one reader` is curl on a plain file, `link sum` what the
links carry together by plain TCP. `plain read r3`: one existing file at replication 3, no
conversion; only WebHDFS lets the replica be chosen. `longest pause`: a striped file at
replication 3, one DataNode stopped (SIGSTOP) after a third of it; seconds of the longest wait for
a MiB from then on. `striped write r1`: WebHDFS alone can steer; Hadoop 2.7 waits 0.4 s or more at
the end of many an object, which a longer file hides. `mount …`: the file as a mount shows it to
Python, dd, cat, and torch.load, plain or mapped, of a state dict of which every tensor is looked
at; `hdfs-native` is that library alone. There are four DataNodes here, for three links carry no
more than 3.05 times one. Cases that end in `cores apart` give half of the processors to HDFS and
the other half to the clients, to tell what sharing them costs. `memory …`: links free; ours is a
mount read by dd.

Cases ending in `CPU` are the processor seconds of the client (and of its mount) a GiB; `peak
memory` is the largest resident set in MiB of what fetches, Python and libraries included; our
budget is 512 MiB by default, of which 432 are for blocks. Needs root, and for some sides curl and
rclone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness
from bench.hdfs.cases import CASES, NATIVE, Runs
from bench.hdfs.lab import Kind, Lab, Run, Side, lab
from tools.hdfs import jars
from tools.netlab import own_network

MEASURES = (
    "bootseer/blocks",
    "bootseer/cli/stripe/mount.py",
    "bootseer/fuse",
    "bootseer/reporting.py",
    "bootseer/storage",
    "bootseer/stripedfs",
    "bench/cores.py",
    "bench/hdfs/benchmark.py",
    "bench/hdfs/cases.py",
    "bench/hdfs/lab.py",
    "bench/hdfs/links.py",
    "bench/hdfs/mounts.py",
    "bench/hdfs/side.py",
    "bench/memory.py",
)
QUICK_FILE_BYTES = 192 << 20
WARMING_RUNS = 8  # from 220 to 300 MiB/s; DataNodes run for weeks
Keep = Callable[[list[harness.Case]], None]


def run(options: harness.Options) -> list[harness.Case]:
    """Run every case and return their figures."""
    return measure(options, list(CASES))


def measure(
    options: harness.Options, wanted: Sequence[str], keep: Keep | None = None
) -> list[harness.Case]:
    """Run these cases; `keep` gets each one's figures as soon as they are there."""
    if os.geteuid() != 0:
        raise RuntimeError("bench hdfs needs root: it makes network namespaces")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would have programs compiled each time
    cases: list[harness.Case] = []
    by_kind: dict[Kind, list[str]] = {}
    for name in wanted:
        by_kind.setdefault(_kind(name, options), []).append(name)
    jars.jars_folder()  # the network below leads to no registry
    with own_network():
        for kind, names in by_kind.items():
            cases += _together(kind, names, options, keep)
    return cases


def _kind(name: str, options: harness.Options) -> Kind:
    kind = CASES[name].kind
    # Cases that differ in size, links and processors alone share a quick cluster.
    return Kind(kind.datanodes, QUICK_FILE_BYTES) if options.quick else kind


def _together(
    kind: Kind, names: Sequence[str], options: harness.Options, keep: Keep | None
) -> list[harness.Case]:
    """Cases that share a cluster; before the first our sides run some times, uncounted."""
    cases: list[harness.Case] = []
    cold = not options.quick
    with (
        tempfile.TemporaryDirectory(prefix="bootseer-bench-hdfs-", dir="/dev/shm") as folder,
        lab(kind, Path(folder)) as place,
    ):
        for name in names:
            cases += (made := _one(place, name, options.runs, cold))
            cold = False
            if keep is not None:
                keep(made)
    return cases


def _one(place: Lab, name: str, rounds: int, cold: bool) -> list[harness.Case]:
    spec = CASES[name]
    sides = spec.sides(place)
    if cold:  # Java compiles what it runs often, and both protocols are ours
        for side in sorted(sides.keys() & {harness.OURS, NATIVE}) * WARMING_RUNS:
            sides[side]()
    runs: Runs = {side: [] for side in sides}
    turns = {side: _counted(runs[side], turn) for side, turn in sides.items()}
    harness.interleave(turns, rounds=rounds, warmup=0)
    cases = harness.under(
        place.conditions(spec.file_bytes(place.size_bytes)), spec.told(name, runs)
    )
    print(harness.table(cases), file=sys.stderr, flush=True)
    return cases


def _counted(runs: list[Run], turn: Side) -> Callable[[], float]:
    def counted() -> float:
        runs.append(turn())
        return 0.0

    return counted


def main() -> int:
    """Measure some cases and put them into the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.hdfs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("case", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small files; results apart")
    arguments = parser.parse_args()
    command = harness.command_line("hdfs", sys.argv[1:])

    def keep(cases: list[harness.Case]) -> None:
        harness.keep("hdfs", cases, names=list(CASES), command=command, quick=arguments.quick)

    cases = measure(harness.Options(arguments.quick, arguments.runs), arguments.case, keep)
    print(harness.table(cases))
    return 0
