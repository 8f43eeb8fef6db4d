"""Our FUSE server against servers in C and other Python bindings, each serving one file.

The file (2 GiB, `--quick` 512 MiB) is wholly in the page cache. Each side's server stays up
through all rounds at a mount of its own, with read-ahead 1 MiB; before each run the mount's own
page cache is emptied, so every read reaches the server, and after it as well, so that sides do
not share memory with what others left. The reader is a program in C: sequential streams each
read their share by 1 MiB into a warm huge page, random ones 4 KiB anywhere; random reads go to the
direct_io mounts, where none is answered by the cache. `passthrough` opens the file through our
mount, `raw file` the file itself. Our server serves `LocalTree`: it answers from maps of the
files (`Operations.maps`), and while reads are small each of its two threads keeps to a half of
the processors; neither is so for the trees of stores and images, nor for the servers beside it.

The C servers use libfuse 3's low-level interface, 1 MiB requests, clone_fd and two threads (the
best of 1, 2, 4 and 10 here). `ours, system Python` is our server under /usr/bin/python3, left
out where that is the bench's own interpreter or older than 3.11: distributions build Python with
profile-guided optimisation, pyenv by default without, and small reads show it. Cases ending in
`CPU` are processor seconds of the server process a GiB read (a million reads for `random`).
Needs root, gcc, pkg-config, libfuse3-dev and, for fusepy, libfuse2; pyfuse3, mfusepy and fusepy
are left out when they are not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import harness

MEASURES = (
    "bootseer/fuse",
    "bench/fuse.py",
    "bench/fuse_ours.py",
    "bench/fuse_peers.py",
    "bench/fuse_c",
)
HERE = Path(__file__).parent
ROOT = HERE.parent
NAME = "data"
FILE_BYTES, QUICK_FILE_BYTES = 2 << 30, 512 << 20
READS, QUICK_READS = 40_000, 10_000
RANDOM_ROUNDS = 3  # they are short, and differ more from one to the next
C_THREADS, C_CLONE = 2, 1
READ_AHEAD_KIB = 1024
SYSTEM_PYTHON = Path("/usr/bin/python3")
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
        source, program = str(HERE / "fuse_c" / f"{name}.c"), str(folder / name)
        subprocess.run(
            ["gcc", "-O2", "-Wall", "-o", program, source, *words, "-pthread"], check=True
        )


def make_file(path: Path, size_bytes: int) -> None:
    """Bytes that no layer could compress, in the page cache once written."""
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size_bytes >> 20):
            file.write(block)


def has_other_python() -> bool:
    """Whether the system has an interpreter that can serve and is not the one running."""
    if not SYSTEM_PYTHON.exists() or SYSTEM_PYTHON.samefile(os.path.realpath(sys.executable)):
        return False
    serves = [str(SYSTEM_PYTHON), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(serves, check=False).returncode == 0


def server_commands(folder: Path, *, direct: bool) -> dict[str, list[str]]:
    """Side -> command without its mount point, for the sides that can run here."""
    source, python = str(folder / "source" / NAME), sys.executable
    ours = ["-m", "bench.fuse_ours", str(folder / "source"), "direct" if direct else "buffered"]
    server, mode = str(folder / "server"), str(int(direct))
    commands = {harness.OURS: [python, *ours]}
    if has_other_python():
        commands["ours, system Python"] = [str(SYSTEM_PYTHON), *ours]
    for kind in ("pread", "mmap"):
        commands[f"C {kind}"] = [server, kind, mode, str(C_THREADS), str(C_CLONE), source]
    for name, module in BINDINGS.items():
        if importlib.util.find_spec(module) is not None:
            commands[name] = [python, "-m", "bench.fuse_peers", name, mode, source]
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
    """Processor time of another process so far, ended threads included (clock_getcpuclockid)."""
    return 0.0 if process is None else time.clock_gettime(~process.pid << 3 | 2)


def read(folder: Path, side: Side, words: list[str], last: list[str]) -> Figures:
    """One run of the reader over one side."""
    mode, streams = words
    empty = [] if side.process is not None else ["keep"]  # the file itself stays in the cache
    before = cpu_seconds(side.process)
    command = [str(folder / "reader"), mode, streams, str(side.path), *last, *empty]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"reading {side.name} failed: {done.stderr.strip()}")
    used = cpu_seconds(side.process) - before
    if side.process is not None:
        fd = os.open(side.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    total, reads, seconds = done.stdout.split()
    return Figures(int(total), int(reads), float(seconds), used)


def measure(
    case: str, folder: Path, sides: list[Side], words: str, options: harness.Options
) -> list[harness.Case]:
    """Speed and the server's processor time of one case over all its sides."""
    is_random = words.startswith("rand")
    last = [str(QUICK_READS if options.quick else READS)] if is_random else []
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


def measure_mode(folder: Path, *, direct: bool, options: harness.Options) -> list[harness.Case]:
    """The cases of the buffered or of the direct_io mounts."""
    runs = {"direct 1": "seq 1", "direct 4": "seq 4"} if direct else {}
    if direct:
        runs |= {"random 4k x1": "rand 1", "random 4k x4": "rand 4"}
    else:
        runs = {"buffered 1": "seq 1", "buffered 4": "seq 4"}
    cases = []
    with contextlib.ExitStack() as stack:
        commands = server_commands(folder, direct=direct)
        sides = [stack.enter_context(served(folder, *item)) for item in commands.items()]
        for case, words in runs.items():
            cases += measure(case, folder, sides, words, options)
    return cases


def measure_passthrough(folder: Path, options: harness.Options) -> list[harness.Case]:
    """Our mount with the kernel reading the file itself, beside the file."""
    command = server_commands(folder, direct=False)[harness.OURS]
    command[-1] = "passthrough"
    raw = Side("raw file", None, folder / "source" / NAME)
    in_c = server_commands(folder, direct=True)["C pread"]
    with served(folder, harness.OURS, command) as side, served(folder, "C pread", in_c) as other:
        cases = measure("passthrough", folder, [side, raw], "seq 1", options)
        sides = [side, raw, other]
        return cases + measure("passthrough random 4k x4", folder, sides, "rand 4", options)


def run(options: harness.Options) -> list[harness.Case]:
    """All cases; see the top of this file."""
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        folder = Path(name)
        compile_programs(folder)
        (folder / "source").mkdir()
        make_file(folder / "source" / NAME, QUICK_FILE_BYTES if options.quick else FILE_BYTES)
        cases = measure_mode(folder, direct=False, options=options)
        cases += measure_mode(folder, direct=True, options=options)
        return cases + measure_passthrough(folder, options)
