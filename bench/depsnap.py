"""Restoring an installed environment against installing it: ready, and first work.

Work sets: `large` is `depsnap-requirements.txt` (torch's CPU build, transformers, …: about 1.4 GB
installed), `small` (`--quick`) numpy and pandas. The wheels are downloaded once into
`$BOOTSEER_BENCH_CACHE` (default `~/.cache/bootseer-bench`), torch first, so that nothing pulls
its CUDA packages. Every side installs into a fresh venv made by `python -m venv`.

Before each side everything is synced and, as root, the page cache dropped (`drop_caches` = 1);
otherwise the wheels and archives are dropped by `posix_fadvise`. *Ready* is the wall time of the
whole command, interpreter start included (`limit` counts only the writing). *First work* is ready
and the first import of the heaviest packages in a new process right after.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import harness
from bootseer.depsnap import archive, scan, tree
from bootseer.depsnap.model import ArchiveInfo, RootDelta

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("BOOTSEER_BENCH_CACHE", "~/.cache/bootseer-bench")).expanduser()
TREE = "ours (tree)"


@dataclass(frozen=True, slots=True)
class WorkSet:
    """What is installed, and what is imported as first work."""

    name: str
    requirements: tuple[str, ...]
    imports: str


SMALL = WorkSet("small", ("numpy==2.4.6", "pandas==3.1.1"), "import numpy, pandas")


def large() -> WorkSet:
    lines = (HERE / "depsnap-requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = tuple(line for line in lines if line and not line.startswith("#"))
    imports = "import torch, transformers, datasets, accelerate, pandas, pyarrow, peft, scipy"
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
    """One file system's working directory, its venv's path, and what the sides share."""

    folder: Path
    work_set: WorkSet
    wheels: Path
    info: ArchiveInfo | None = None
    work: dict[str, list[float]] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def archive(self) -> Path:
        return self.folder / "snapshot.tar.zst"

    @property
    def cache(self) -> str:
        return str(self.folder / "cache")

    def reset(self) -> None:
        """A venv as `python -m venv` makes it, nothing installed; cold caches."""
        tree.unplace(str(self.venv), self.cache)
        if self.venv.exists():
            shutil.rmtree(self.venv)
        shutil.copytree(self.folder / "base", self.venv, symlinks=True)
        cold([self.wheels, self.folder])

    def first_work(self) -> float:
        start = time.perf_counter()
        python = str(self.venv / "bin/python")
        subprocess.run([python, "-c", self.work_set.imports], check=True, env=environment())
        return time.perf_counter() - start


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
    """Make the base venv, capture what pip's install changes in it, unpack the tree once."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place.venv)], check=True)
    shutil.copytree(place.venv, place.folder / "base", symlinks=True)
    before = scan.scan(str(place.venv))
    timed(pip_command(place))
    delta = scan.diff(before, scan.scan(str(place.venv)))
    place.info = archive.create(str(place.archive), [RootDelta.of_delta(delta)])
    shutil.move(place.venv, place.folder / "installed")
    tree.ensure(place.cache, str(place.archive), place.info.index_digest)
    timed(uv_command(place, "copy", place.folder / "uv-warm"))


def pip_command(place: Place) -> list[str]:
    python = str(place.venv / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    return [*pip, "--find-links", str(place.wheels), *place.work_set.requirements]


def uv_command(place: Place, link_mode: str, cache: Path) -> list[str]:
    if not place.venv.exists():
        shutil.copytree(place.folder / "base", place.venv, symlinks=True)
    uv = [shutil.which("uv") or str(Path(sys.executable).with_name("uv")), "pip", "install", "-q"]
    uv += ["--python", str(place.venv / "bin/python"), "--offline", "--no-index"]
    uv += ["--find-links", str(place.wheels), "--link-mode", link_mode]
    return [*uv, "--cache-dir", str(cache), *place.work_set.requirements]


def side(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "bench.depsnap_side", name, *words]


def sides(place: Place) -> dict[str, Callable[[], float]]:
    """Each side resets, runs, and notes its first work beside."""
    assert place.info is not None
    digest, venv = place.info.index_digest, str(place.venv)
    cold_cache = place.folder / "uv-cold"
    commands: dict[str, Callable[[], list[str]]] = {
        harness.OURS: lambda: side("restore", str(place.archive), digest, venv, venv),
        TREE: lambda: side("tree", place.cache, digest, venv, venv),
        "pip warm": lambda: pip_command(place),
        "uv copy warm": lambda: uv_command(place, "copy", place.folder / "uv-warm"),
        "uv copy cold": lambda: uv_command(place, "copy", cold_cache),
        "uv hard link warm": lambda: uv_command(place, "hardlink", place.folder / "uv-warm"),
    }

    def run(name: str) -> float:
        if cold_cache.exists():
            shutil.rmtree(cold_cache)
        place.reset()
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
    words = side("limit", str(place.folder / "installed"), str(target), str(os.cpu_count()))
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(target)
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
def working(parent: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bootseer-bench-", dir=parent))
    try:
        yield folder
    finally:
        tree.unplace(str(folder / "venv"), str(folder / "cache"))
        shutil.rmtree(folder)


def file_systems() -> dict[str, str]:
    """Name -> a directory on it: the disk's own name, and tmpfs."""
    disk = os.environ.get("BOOTSEER_BENCH_DISK", str(CACHE))
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", disk], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {"ext4" if kind == "ext2/ext3" else kind: disk, "tmpfs": "/dev/shm"}


def run(options: harness.Options) -> list[harness.Case]:
    work_set = SMALL if options.quick else large()
    wheels = wheelhouse(work_set)
    out: list[harness.Case] = []
    for name, parent in file_systems().items():
        with working(parent) as folder:
            place = Place(folder, work_set, wheels)
            prepare(place)
            print(f"{name}, {work_set.name}: {place.info}", file=sys.stderr)
            warmup = 0 if options.quick else 1
            ready = harness.interleave(sides(place), rounds=options.runs, warmup=warmup)
            out += cases(place, ready, f"{name}, {work_set.name}", options.runs)
    return out
