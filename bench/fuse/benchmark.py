"""`stripe mount` against FUSE servers in C and other Python bindings, each serving one file.

    python -m bench fuse                           all cases
    python -m bench fuse "stripe mount direct 4"   these alone

The file (2 GiB, `--quick` 512 MiB) is wholly in the page cache. `stripe mount …` reads it as a
striped checkpoint from a node cache that holds it whole and verified as a whole, as it is some
seconds after it was first read through a mount: as root on Linux 6.9 and newer the kernel reads
the cache's file (passthrough). `stripe mount plain file …` has a plain file in the node cache,
which the server itself answers from there: what every mount does until a file is verified as a
whole, and any mount without root. Each side's server stays up
through all rounds at a mount of its own, with read-ahead 1 MiB; before each run the mount's own
page cache is emptied, so every read reaches the server, and after it as well, so that sides do
not share memory with what others left. The reader is a program in C: sequential streams each
read their share by 1 MiB into a warm huge page, random ones 4 KiB anywhere; random reads go to the
direct_io mounts, where none is answered by the cache. rclone (its local backend) has no direct_io.
`image mount …` is a file of an image all of which is on the node: verified as a whole, when EROFS
reads the node cache's file and nobody serves; and `served`, by our server, as it goes on in the
mount during which the image came.
`EROFS over C` is the same EROFS over the C server (`mmap`, direct_io) of the same data.
`passthrough` sets our mount beside the cached file itself.

The C servers use libfuse 3's low-level interface, 1 MiB requests, clone_fd and two threads (the
best of 1, 2, 4 and 10 here). Cases ending in `CPU` are processor seconds of the server's processes
a GiB read (a million reads for `random`). Needs root, gcc, pkg-config, libfuse3-dev and, for
fusepy, libfuse2; pyfuse3, mfusepy, fusepy and rclone are left out when they are not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.fuse import images
from bootseer.blocks.cache import present_index

MEASURES = (
    "bootseer/blockimage",
    "bootseer/blocks",
    "bootseer/cli/image/mount.py",
    "bootseer/cli/stripe/mount.py",
    "bootseer/fuse",
    "bootseer/imageprefetch",
    "bootseer/reporting.py",
    "bootseer/storage",
    "bootseer/stripedfs",
    "bench/fuse/images.py",
    "bench/fuse/benchmark.py",
    "bench/fuse/peers.py",
    "bench/fuse/c",
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "data"
FILE_BYTES, QUICK_FILE_BYTES = 2 << 30, 512 << 20
READS, QUICK_READS = 40_000, 10_000
RANDOM_ROUNDS = 3  # they are short, and differ more from one to the next
C_THREADS, C_CLONE = 2, 1
READ_AHEAD_KIB = 1024
READINGS, SEALED_S = 3, 60.0
RAW = "raw file"
STRIPED, PLAIN = "stripe mount", "stripe mount plain file"
CONDITIONS = {
    STRIPED: "root; whole file in the node cache, sealed: read by passthrough",
    "image mount": "whole image in the node cache, sealed: no server",
    "image mount served": "image that came whole while it was mounted: read by our server",
    PLAIN: "whole file in the node cache, not sealed: read by our server",
}
BUFFERED = {"buffered 1": "seq 1", "buffered 4": "seq 4"}
DIRECT = {"direct 1": "seq 1", "direct 4": "seq 4"}
RANDOM = {"random 4k x1": "rand 1", "random 4k x4": "rand 4"}
PASSED = {"passthrough": "seq 1", "passthrough random 4k x4": "rand 4"}
IMAGES = {"image mount": True, "image mount served": False}
"""Whether no server of ours has a part in it."""
CASES = (
    *(f"{kind} {access}" for kind in (STRIPED, PLAIN) for access in BUFFERED | DIRECT | RANDOM),
    *PASSED,
    *(f"{kind} {access}" for kind in IMAGES for access in BUFFERED | RANDOM),
)
Keep = Callable[[list[harness.Case]], None]
BINDINGS = {"pyfuse3": "pyfuse3", "mfusepy": "mfusepy", "fusepy": "fuse"}


@dataclass(frozen=True, slots=True)
class Side:
    """One server: its process and the file as its mount shows it."""

    name: str
    process: subprocess.Popen[bytes] | None
    path: Path


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run of the reader."""

    total_bytes: int
    reads: int
    seconds: float
    cpu_seconds: float


def compile_programs(folder: Path) -> None:
    """Compile the C servers and the reader. Raises RuntimeError saying what to install."""
    for program in ("gcc", "pkg-config"):
        if shutil.which(program) is None:
            raise RuntimeError(f"bench fuse needs {program}: install it")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise RuntimeError("bench fuse needs libfuse 3's headers: install libfuse3-dev")
    for name, words in (("server", found.stdout.split()), ("reader", [])):
        source, program = str(HERE / "c" / f"{name}.c"), str(folder / name)
        subprocess.run(
            ["gcc", "-O2", "-Wall", "-o", program, source, *words, "-pthread"], check=True
        )


def make_file(path: Path, size_bytes: int) -> None:
    """Bytes that no layer could compress, in the page cache once written."""
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size_bytes >> 20):
            file.write(block)


def our_command(folder: Path, kind: str, *, direct: bool) -> list[str]:
    """`stripe mount` of the striped or of the plain file, without the mount point."""
    command = [sys.executable, "-m", "bootseer", "stripe", "mount", "--foreground"]
    command += [] if direct else ["--buffered"]
    store = folder / ("store" if kind == STRIPED else "source")
    return [*command, "--cache", str(folder / "cache"), str(store)]


def fill_cache(folder: Path, kinds: Sequence[str]) -> None:
    """Have the files of these kinds in the node cache, the striped one verified as a whole.

    It is read again where it was not: a block that could not be kept in time is fetched anew, and
    each closing has it looked at once. Raises RuntimeError when that does not come about.
    """
    put = [sys.executable, "-m", "bootseer", "stripe", "put"]
    files = [str(folder / "source" / NAME), str(folder / "store" / NAME)]
    (folder / "store").mkdir()
    subprocess.run([*put, *files], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    for kind in kinds:
        with served(folder, kind, our_command(folder, kind, direct=True)) as side:
            for _ in range(READINGS):
                subprocess.run(["cmp", files[0], side.path], check=True)
                if kind != STRIPED or is_sealed_in(folder, SEALED_S):
                    break
            else:
                raise RuntimeError("the striped file was not verified as a whole in time")


def is_sealed_in(folder: Path, limit_s: float) -> bool:
    """Wait until the kernel may read the striped file by itself; whether it came about."""
    end_s = time.monotonic() + limit_s
    while not sealed_of(folder):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.5)
    return True


def sealed_of(folder: Path) -> Path | None:
    """The node cache's file that the kernel may read by itself, once there is one."""
    for path in (folder / "cache").glob("*/present"):
        with path.open("rb") as file:
            if file.read(len(present_index.FROZEN)) == present_index.FROZEN:
                return path.with_name("data")
    return None


def peer_commands(folder: Path, *, direct: bool) -> dict[str, list[str]]:
    """Side -> command without its mount point, for the sides that can run here."""
    source, python = str(folder / "source" / NAME), sys.executable
    server, mode = str(folder / "server"), str(int(direct))
    commands = {
        f"C {kind}": [server, kind, mode, str(C_THREADS), str(C_CLONE), source]
        for kind in ("pread", "mmap")
    }
    for name, module in BINDINGS.items():
        if importlib.util.find_spec(module) is not None:
            commands[name] = [python, "-m", "bench.fuse.peers", name, mode, source]
    if not direct and shutil.which("rclone"):
        folder_url = f":local:{folder / 'source'}"
        commands["rclone"] = ["rclone", "mount", "--read-only", "--config", "", folder_url]
    return commands


@contextlib.contextmanager
def served(folder: Path, name: str, command: list[str]) -> Iterator[Side]:
    """Start a server, wait for its mount, unmount it at the end."""
    mountpoint = folder / f"mount-{len(list(folder.iterdir()))}"
    mountpoint.mkdir()
    log = (folder / f"{mountpoint.name}.log").open("wb")
    process = subprocess.Popen(
        # A server whose bench was killed must not stay behind its mount.
        ["setpriv", "--pdeathsig", "KILL", "--", *command, str(mountpoint)],
        cwd=ROOT,
        stdout=log,
        stderr=log,
    )
    try:
        end = time.monotonic() + 20
        while mountpoint.stat().st_dev == folder.stat().st_dev:
            if process.poll() is not None or time.monotonic() > end:
                said = Path(log.name).read_text(errors="replace")[-500:]
                raise RuntimeError(f"the server {name} does not mount: {said}")
            time.sleep(0.02)
        path = mountpoint / NAME
        path.stat()  # answered: INIT is over, and read-ahead stays as set
        device = mountpoint.stat().st_dev
        knob = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        Path(knob).write_text(str(READ_AHEAD_KIB), encoding="ascii")
        yield Side(name, process, path)
    finally:
        subprocess.run(["umount", "-l", mountpoint], check=False, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        log.close()


def cpu_seconds(process: subprocess.Popen[bytes] | None) -> float:
    """Processor time so far of another process and its child, ended threads included."""
    if process is None:
        return 0.0
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = [process.pid, *map(int, children)]
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # clock_getcpuclockid


def read(folder: Path, side: Side, words: list[str], last: list[str]) -> Figures:
    """One run of the reader over one side."""
    mode, streams = words
    empty = ["keep"] if side.name == RAW else []  # the file itself stays in the cache
    before = cpu_seconds(side.process)
    command = [str(folder / "reader"), mode, streams, str(side.path), *last, *empty]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"reading {side.name} failed: {done.stderr.strip()}")
    used = cpu_seconds(side.process) - before
    if side.name != RAW:
        fd = os.open(side.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    total, reads, seconds = done.stdout.split()
    return Figures(int(total), int(reads), float(seconds), used)


def measure_case(
    case: str, folder: Path, sides: list[Side], words: str, options: harness.Options
) -> list[harness.Case]:
    """Speed and the server's processor time of one case over all its sides."""
    is_random = words.startswith("rand")
    reads = (QUICK_READS if options.quick else READS) // int(words.split()[1])
    last = [str(reads)] if is_random else []
    cpu: dict[str, list[float]] = {side.name: [] for side in sides}

    def run(side: Side) -> float:
        figures = read(folder, side, words.split(), last)
        of = figures.reads / 1e6 if is_random else figures.total_bytes / 2**30
        cpu[side.name].append(figures.cpu_seconds / of)
        if is_random:
            return figures.reads / figures.seconds
        return figures.total_bytes / 2**20 / figures.seconds

    def bound(side: Side) -> Callable[[], float]:
        return lambda: run(side)

    rounds = options.runs * (1 if options.quick or not is_random else RANDOM_ROUNDS)
    values = harness.interleave({side.name: bound(side) for side in sides}, rounds=rounds)
    unit = "reads/s" if is_random else "MiB/s"
    cases = harness.cases_of(case, values, unit=unit, better="higher")
    used = {s.name: cpu[s.name][-rounds:] for s in sides if s.process is not None}
    cpu_unit = "CPU s/million reads" if is_random else "CPU s/GiB"
    return cases + harness.cases_of(f"{case} CPU", used, unit=cpu_unit)


def measure_mounts(
    folder: Path, wanted: Sequence[str], *, direct: bool, options: harness.Options
) -> Iterator[list[harness.Case]]:
    """Those of the wanted cases that are of the buffered or of the direct_io mounts."""
    runs = DIRECT | RANDOM if direct else BUFFERED
    kinds = [kind for kind in (STRIPED, PLAIN) if chosen(kind, runs, wanted)]
    if not kinds:
        return
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(served(folder, *item))
            for item in peer_commands(folder, direct=direct).items()
            if kinds != [PLAIN] or item[0].startswith("C ")
        ]
        ours = {
            kind: stack.enter_context(
                served(folder, harness.OURS, our_command(folder, kind, direct=direct))
            )
            for kind in kinds
        }
        for kind, side in ours.items():
            # The plain file's peers are those that decide; the others stand beside the first.
            beside = peers if kind == STRIPED else [p for p in peers if p.name[:2] == "C "]
            for case, words in chosen(kind, runs, wanted).items():
                found = measure_case(case, folder, [side, *beside], words, options)
                yield harness.under(CONDITIONS[kind], found)


def chosen(kind: str, runs: dict[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Of the cases of one kind of mount those that are wanted, with the reader's words."""
    cases = {f"{kind} {access}": words for access, words in runs.items()}
    return {case: words for case, words in cases.items() if case in wanted}


def measure_passthrough(
    folder: Path, wanted: Sequence[str], options: harness.Options
) -> Iterator[list[harness.Case]]:
    """Our mount with the kernel reading the file itself, beside that file."""
    runs = {case: words for case, words in PASSED.items() if case in wanted}
    if not runs:
        return
    sealed = sealed_of(folder)
    if sealed is None:
        raise RuntimeError("no file of the node cache was verified as a whole")
    raw = Side(RAW, None, sealed)
    command = our_command(folder, STRIPED, direct=True)
    with served(folder, harness.OURS, command) as side:
        for case, words in runs.items():
            found = measure_case(case, folder, [side, raw], words, options)
            yield harness.under(CONDITIONS[STRIPED], found)


def measure_images(
    folder: Path, wanted: Sequence[str], options: harness.Options
) -> Iterator[list[harness.Case]]:
    """The cases of a file of an image; what `image mount` leaves running is not timed by CPU."""
    runs = {kind: chosen(kind, BUFFERED | RANDOM, wanted) for kind in IMAGES}
    if not any(runs.values()):
        return
    image = images.Image(folder)
    image.prepare(folder / "source" / NAME)
    threads = [str(C_THREADS), str(C_CLONE)]
    command = [str(folder / "server"), "mmap", "1", *threads, str(image.data)]
    with served(folder, "C mmap", command) as server, image.over(server.path) as over:
        for kind, complete in IMAGES.items():
            if not runs[kind]:
                continue
            with image.mounted(complete=complete) as path:
                sides = [Side(harness.OURS, None, path), Side("EROFS over C", None, over)]
                for case, words in runs[kind].items():
                    found = measure_case(case, folder, sides, words, options)
                    yield harness.under(CONDITIONS[kind], found)


def run(options: harness.Options) -> list[harness.Case]:
    """All cases; see the top of this file."""
    return measure(options, CASES)


def measure(
    options: harness.Options, wanted: Sequence[str], keep: Keep | None = None
) -> list[harness.Case]:
    """Measure these cases; `keep` gets each one's figures as soon as they are there."""
    cases: list[harness.Case] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        folder = Path(name)
        compile_programs(folder)
        (folder / "source").mkdir()
        make_file(folder / "source" / NAME, QUICK_FILE_BYTES if options.quick else FILE_BYTES)
        runs = BUFFERED | DIRECT | RANDOM
        passed = [case for case in PASSED if case in wanted]
        kinds = [PLAIN] if chosen(PLAIN, runs, wanted) else []
        kinds += [STRIPED] if chosen(STRIPED, runs, wanted) or passed else []
        if kinds:
            fill_cache(folder, kinds)
        for found in itertools.chain(
            measure_mounts(folder, wanted, direct=False, options=options),
            measure_mounts(folder, wanted, direct=True, options=options),
            measure_passthrough(folder, wanted, options),
            measure_images(folder, wanted, options),
        ):
            print(harness.table(found), file=sys.stderr, flush=True)
            cases += found
            if keep is not None:
                keep(found)
    return cases
