"""Restoring an installed environment against installing it: ready, and first work.

`python -m bench.depsnap CASE…` measures some of the cases and keeps the others' figures. Whole
`deps run` commands: see `bench.depsnap.commands`. The forms alone, `archive` and `tree`, are
measured as a program that does nothing else: no key, record or lease.

Work sets: `large` is `large-requirements.txt` (torch's CPU build, transformers, …: about 1.4 GB
installed), `small` (`--quick`) numpy and pandas. The wheels are downloaded once into
`$BOOTSEER_BENCH_CACHE` (default `~/.cache/bootseer-bench`), torch first, so that nothing pulls
its CUDA packages. Every side installs into a fresh venv made by `python -m venv`.

As root each side finds a newly made file system, as a new node does (ext4 on a loop device, or
tmpfs): on one that has just been emptied ext4 passes over every inode deleted in the last minute,
which slowed whoever came next by half. What a side needs beside its target (uv's cache to link
from, the node's tree) is put there first. A plain user's sides share a directory.

Before each side everything is synced and, as root, the page cache dropped (`drop_caches` = 1);
otherwise the wheels and archives are dropped by `posix_fadvise`. *Ready* is the wall time of the
whole command, interpreter start included (`limit` counts only the writing). *First work* is ready
and the first import of the heaviest packages in a new process right after.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import harness
from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.restore import staging
from bootseer.depsnap.shared_tree import cache as treecache
from bootseer.depsnap.shared_tree.forms import unplace
from bootseer.depsnap.types import ArchiveInfo

MEASURES = (
    "bootseer/__init__.py",
    "bootseer/__main__.py",
    "bootseer/blockimage",
    "bootseer/cli/__init__.py",
    "bootseer/cli/deps",
    "bootseer/cli/read_ahead.py",
    "bootseer/config/__init__.py",
    "bootseer/config/paths.py",
    "bootseer/context_managers.py",
    "bootseer/depsnap",
    "bootseer/entrypoint/__init__.py",
    "bootseer/entrypoint/job_process.py",
    "bootseer/errors.py",
    "bootseer/events",
    "bootseer/light_dataclasses.py",
    "bootseer/storage",
    "bootseer/system",
    "scripts",
    "bench/depsnap/benchmark.py",
    "bench/depsnap/commands.py",
    "bench/depsnap/side.py",
    "bench/depsnap/small-lock.txt",
    "bench/depsnap/large-lock.txt",
    "bench/depsnap/small-requirements.txt",
    "bench/depsnap/large-requirements.txt",
)
HERE = Path(__file__).parent
UNMOUNT_LIMIT_S = 60.0
CACHE = Path(os.environ.get("BOOTSEER_BENCH_CACHE", "~/.cache/bootseer-bench")).expanduser()
TREE = "ours (tree)"
IMAGE_BYTES = 16 << 30  # sparse


@dataclass(frozen=True, slots=True)
class WorkSet:
    """What is installed, and what is imported as first work."""

    name: str
    requirements: tuple[str, ...]
    imports: str


SMALL = WorkSet("small", ("numpy==2.4.6", "pandas==3.1.1"), "import numpy, pandas")


def requirements_of(name: str) -> tuple[str, ...]:
    """The requirements that a file beside this one names."""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def large() -> WorkSet:
    wanted = requirements_of("large-requirements.txt")
    imports = "import torch, transformers, datasets, accelerate, pandas, pyarrow"
    return WorkSet("large", wanted, imports)


def wheelhouse(work_set: WorkSet) -> Path:
    """A directory with all wheels of the work set, downloaded once."""
    folder = CACHE / work_set.name
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder)]
    for first in (w for w in work_set.requirements if w.startswith("torch==")):
        subprocess.run([*pip, "--no-deps", first], check=True)
    subprocess.run([*pip, "--find-links", str(folder), *work_set.requirements], check=True)
    (folder / "complete").touch()
    return folder


@dataclass(slots=True)
class Place:
    """The inputs' folder on the disk, and the file system that the sides fill.

    `kind` is ext4 or tmpfs, made anew for each side, or empty: a directory beside the inputs.
    """

    inputs: Path
    kind: str
    work_set: WorkSet
    wheels: Path
    info: ArchiveInfo | None = None
    work: dict[str, list[float]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.inputs / "fresh"

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def archive(self) -> Path:
        return self.inputs / "snapshot.tar.zst"

    @property
    def cache(self) -> str:
        return str(self.folder / "cache")

    @property
    def linked_cache(self) -> Path:
        return self.folder / "uv"

    def empty(self) -> None:
        """Leave nothing of the side before."""
        for cache in (self.cache, str(Path(self.cache) / "trees")):
            unplace(str(self.venv), cache)
        if self.kind and os.path.ismount(self.folder):
            _unmount(self.folder)
        elif self.folder.exists():
            staging.remove_tree(str(self.folder))  # a plain user's shared tree is read-only

    def reset(self, side: str = "", prime: Callable[[], None] | None = None) -> None:
        """A venv as `python -m venv` makes it, nothing installed; cold caches.

        `prime` leaves there what an earlier start of this node has left.
        """
        self.empty()
        self.folder.mkdir(exist_ok=True)
        if self.kind == "ext4":
            image = self.inputs / "image"
            # A new file: another mount namespace may still hold, and write to, the one before.
            image.unlink(missing_ok=True)
            with image.open("wb") as file:
                file.truncate(IMAGE_BYTES)
            made = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,nodiscard", str(image)]
            subprocess.run(made, check=True)
            # The kernel's own filling-in of inode tables would run beside the first sides.
            options = ["-o", "loop,noinit_itable"]
            subprocess.run(["mount", *options, str(image), str(self.folder)], check=True)
        elif self.kind:
            subprocess.run(["mount", "-t", "tmpfs", "bench", str(self.folder)], check=True)
        copy(self.inputs / "base", self.venv)
        if side == TREE:
            assert self.info is not None
            treecache.ensure(self.cache, str(self.archive), self.info.index_digest)
        elif side == "uv hard link warm":
            copy(self.inputs / "uv-warm", self.linked_cache)
        if prime is not None:
            prime()
        cold([self.wheels, self.inputs])

    def first_work(self) -> float:
        start = time.perf_counter()
        python = str(self.venv / "bin/python")
        subprocess.run([python, "-c", self.work_set.imports], check=True, env=environment())
        return time.perf_counter() - start


def _unmount(folder: Path) -> None:
    """Unmount once what a side left running in the background, at lowest priority, has ended."""
    words = ["umount", str(folder)]
    end_s = time.monotonic() + UNMOUNT_LIMIT_S
    while subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode:
        if time.monotonic() > end_s:
            subprocess.run(words, check=True)  # which says why not
            return
        time.sleep(0.1)


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def environment() -> dict[str, str]:
    """The caller's, less what would keep imports from writing or pip from its own settings."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def cold(folders: list[Path]) -> None:
    """Write everything back and drop the page cache, as far as this user may."""
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
        return
    for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def prepare(place: Place) -> None:
    """Make the base venv, capture what pip's install changes in it, warm uv's cache."""
    place.folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    copy(place.venv, place.inputs / "base")
    before = scan.scan(str(place.venv))
    timed(pip_command(place))
    delta = scan.diff(before, scan.scan(str(place.venv)))
    place.info = archive.create(str(place.archive), [RootDelta.of_delta(delta)])
    shutil.move(place.venv, place.inputs / "installed")
    copy(place.inputs / "base", place.venv)
    timed(uv_command(place, "copy", place.inputs / "uv-warm"))
    shutil.rmtree(place.folder)


def pip_command(place: Place) -> list[str]:
    python = str(place.venv / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    return [*pip, "--find-links", str(place.wheels), *place.work_set.requirements]


def uv_command(place: Place, link_mode: str, cache: Path) -> list[str]:
    uv = [shutil.which("uv") or str(Path(sys.executable).with_name("uv")), "pip", "install", "-q"]
    uv += ["--python", str(place.venv / "bin/python"), "--offline", "--no-index"]
    uv += ["--find-links", str(place.wheels), "--link-mode", link_mode]
    return [*uv, "--cache-dir", str(cache), *place.work_set.requirements]


def side(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "bench.depsnap.side", name, *words]


def sides(place: Place) -> dict[str, Callable[[], float]]:
    """Each side resets, runs, and notes its first work beside."""
    assert place.info is not None
    digest, venv = place.info.index_digest, str(place.venv)
    cold_cache, warm_cache = place.folder / "uv-cold", place.inputs / "uv-warm"
    commands: dict[str, Callable[[], list[str]]] = {
        harness.OURS: lambda: side("restore", str(place.archive), digest, venv, venv),
        TREE: lambda: side("tree", place.cache, digest, venv, venv),
        "pip warm": lambda: pip_command(place),
        "uv copy warm": lambda: uv_command(place, "copy", warm_cache),
        "uv copy cold": lambda: uv_command(place, "copy", cold_cache),
        "uv hard link warm": lambda: uv_command(place, "hardlink", place.linked_cache),
    }

    def run(name: str) -> float:
        place.reset(name)
        ready = timed(commands[name]())
        place.work.setdefault(name, []).append(ready + place.first_work())
        print(f"  {name}: ready {ready:.2f} s, work {place.work[name][-1]:.2f} s", file=sys.stderr)
        return ready

    out: dict[str, Callable[[], float]] = {}
    for name in commands:
        out[name] = lambda name=name: run(name)  # type: ignore[misc]
    out["limit"] = lambda: limit(place)
    return out


def limit(place: Place) -> float:
    place.reset()
    target = place.folder / "limit"
    words = side("limit", str(place.inputs / "installed"), str(target), str(os.cpu_count()))
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def cases(
    place: Place, ready: Mapping[str, list[float]], label: str, rounds: int
) -> list[harness.Case]:
    """Archive and tree cases from one interleaved run; peers' values stand in both."""
    work = {name: values[-rounds:] for name, values in place.work.items()}
    out: list[harness.Case] = []
    for form, ours in (("archive", harness.OURS), ("tree", TREE)):
        for what, values in (("ready", ready), ("first work", work)):
            picked = {harness.OURS: values[ours]}
            picked |= {k: v for k, v in values.items() if k not in (harness.OURS, TREE)}
            out += harness.cases_of(f"{form} {what}, {label}", picked, unit="s")
    return out


@contextmanager
def working(kind: str, work_set: WorkSet, wheels: Path) -> Iterator[Place]:
    """A place whose inputs lie on the disk, gone at the end."""
    inputs = Path(tempfile.mkdtemp(prefix="bootseer-bench-", dir=CACHE))
    place = Place(inputs, kind, work_set, wheels)
    try:
        yield place
    finally:
        place.empty()
        shutil.rmtree(inputs)


def file_systems() -> tuple[str, ...]:
    """Kinds of `Place` that this user can make."""
    return ("ext4", "tmpfs") if os.geteuid() == 0 else ("",)


def forms(kind: str, work_set: WorkSet, rounds: int) -> list[harness.Case]:
    """The forms alone, on one kind of file system."""
    wheels = wheelhouse(work_set)
    label = f"{kind or 'this disk'}, {work_set.name}"
    with working(kind, work_set, wheels) as place:
        prepare(place)
        print(f"{label}: {place.info}", file=sys.stderr)
        # No warm-up round: every side starts from a cold cache and a fresh file system.
        ready = harness.interleave(sides(place), rounds=rounds, warmup=0)
        return cases(place, ready, label, rounds)


def run(options: harness.Options) -> list[harness.Case]:
    out: list[harness.Case] = []
    for kind in file_systems():
        out += forms(kind, SMALL if options.quick else large(), options.runs)
    if not options.quick:
        for kind, name, pinned in load_commands().labels(file_systems()):
            out += load_commands().run(kind, name, pinned, options.runs)
    return out


def load_commands() -> types.ModuleType:
    """The whole commands' half, which uses this one."""
    return importlib.import_module("bench.depsnap.commands")


def main() -> int:
    """Measure some cases and put them into the result file."""
    commands = load_commands()
    choices = {f"forms {k or 'this disk'}": k for k in file_systems()}
    whole = {
        f"commands {k or 'this disk'} {n} {p}": (k, n, p)
        for k, n, p in commands.labels(file_systems())
    }
    parser = argparse.ArgumentParser(prog="python -m bench.depsnap")
    parser.add_argument("case", nargs="+", choices=[*choices, *whole])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    command = harness.command_line("depsnap", sys.argv[1:])
    for name in arguments.case:
        found = (
            forms(choices[name], large(), arguments.runs)
            if name in choices
            else commands.run(*whole[name], arguments.runs)
        )
        harness.keep("depsnap", found, names=case_names(), command=command)
        print(harness.table(found))
    return 0


def case_names() -> list[str]:
    """All cases in their order in the result file."""
    kinds = [kind or "this disk" for kind in file_systems()]
    whole = [
        f"{situation} {what}, {kind}, {name}, {pinned}"
        for kind, name, pinned in load_commands().labels(kinds)
        for situation in ("first start", "fresh node", "second start")
        for what in ("ready", "first work", "after resolving")
    ]
    alone = [
        f"{form} {what}, {kind}, large"
        for kind in kinds
        for form in ("archive", "tree")
        for what in ("ready", "first work")
    ]
    return [*whole, *alone]
