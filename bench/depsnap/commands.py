"""Whole `deps run` commands against the whole `pip` and `uv` commands that they stand for.

`first start` is `deps run` with an empty store, which installs and publishes in the background;
`fresh node` restores onto a node that holds nothing; `second start` places what an earlier start
unpacked into the node's cache. Each is one process from its start to its end (*ready*), and that
and the first import of the heaviest packages in a new process (*first work*). The wheels, uv's
cache and the store lie on this disk; what a node keeps lies on the target's file system, which is
made for each side. `unpinned` names the packages wanted without versions, and counts how much
later than `uv pip compile` of the list alone a second start is ready.

`limit` is the least of any command in Python that installs into an environment: an interpreter
that starts the environment's own, to be told where it installs, and neither does anything else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness
from bench.depsnap.benchmark import (
    Place,
    WorkSet,
    copy,
    requirements_of,
    timed,
    uv_command,
    wheelhouse,
    working,
)
from bootseer.depsnap.restore import staging
from bootseer.depsnap.shared_tree import forms

SITUATIONS = ("first start", "fresh node", "second start")
SETS = {
    "small": "import sklearn, matplotlib, pandas, sympy, statsmodels.api, xarray, networkx",
    "large": "import torch, transformers, datasets, accelerate, pandas, pyarrow",
}
LIMIT = "limit"
_TWO_PYTHONS = """
import os, sys
words = [sys.argv[1], "-I", "-c", "pass"]
os.waitpid(os.posix_spawn(words[0], words, os.environ), 0)
"""
PEERS = ("pip warm", "uv copy warm", "uv hard link warm")
_PUBLISHED_LIMIT_S = 300.0


def locked(name: str) -> WorkSet:
    """A work set with every package that it brings named and pinned."""
    return WorkSet(f"{name}-locked", requirements_of(f"{name}-lock.txt"), SETS[name])


class Commands:
    """One work set's sides on one place. `listed` is the list that all sides are given."""

    def __init__(self, place: Place, listed: Path) -> None:
        self.place = place
        self.listed = listed
        self.store = place.inputs / "store"
        self.work: dict[str, list[float]] = {}

    def pip(self) -> list[str]:
        python = str(self.place.venv / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
        return [*pip, "--find-links", str(self.place.wheels), "-r", str(self.listed)]

    def deps_run(self, store: Path) -> list[str]:
        script = str(Path(sys.executable).with_name("bootseer"))
        ours = [script, "deps", "run", "--store", str(store), "--cache", self.place.cache]
        return [*ours, "--", *self.pip()]

    def prepare(self) -> None:
        """Publish once, warm uv's cache."""
        place = self.place
        place.folder.mkdir()
        without_pip = [sys.executable, "-m", "venv", "--without-pip", str(place.venv)]
        subprocess.run(without_pip, check=True)
        copy(place.venv, place.inputs / "base")
        timed(self.deps_run(self.store))
        published(self.store)
        staging.remove_tree(str(place.folder))
        place.folder.mkdir()
        copy(place.inputs / "base", place.venv)
        timed(uv_command(place, "copy", place.inputs / "uv-warm"))
        staging.remove_tree(str(place.folder))

    def side(self, name: str) -> float:
        """Seconds until one side's command has ended, on a file system of its own."""
        place = self.place
        store = place.inputs / "new-store" if name == "first start" else self.store
        shutil.rmtree(place.inputs / "new-store", ignore_errors=True)
        place.reset(name, prime=self._earlier_start if name == "second start" else None)
        peers: dict[str, Callable[[], list[str]]] = {
            "pip warm": self.pip,
            "uv copy warm": lambda: uv_command(place, "copy", place.inputs / "uv-warm"),
            "uv hard link warm": lambda: uv_command(place, "hardlink", place.linked_cache),
        }
        ready = timed(peers[name]() if name in peers else self.deps_run(store))
        self.work.setdefault(name, []).append(ready + place.first_work())
        print(f"  {name}: ready {ready:.2f} s, work {self.work[name][-1]:.2f} s", file=sys.stderr)
        if name == "first start":
            published(store)
        return ready

    def limit(self) -> float:
        """Seconds until an interpreter that starts the environment's own has ended."""
        self.place.reset()
        python = str(self.place.venv / "bin/python")
        return timed([sys.executable, "-I", "-c", _TWO_PYTHONS, python])

    def _earlier_start(self) -> None:
        """Leave in the node's cache what a start leaves there, and the target as it was."""
        place = self.place
        timed(self.deps_run(self.store))
        forms.unplace(str(place.venv), str(Path(place.cache) / "trees"))
        staging.remove_tree(str(place.venv))
        copy(place.inputs / "base", place.venv)

    def resolving(self) -> float:
        """Seconds of `uv pip compile` of the list alone."""
        self.place.reset()
        uv = [uv_command(self.place, "copy", self.place.inputs / "uv-warm")[0], "pip", "compile"]
        uv += ["-q", "--python", str(self.place.venv / "bin/python"), "--no-index"]
        return timed([*uv, "--find-links", str(self.place.wheels), str(self.listed)])


def published(store: Path) -> None:
    """Wait until a background publication has ended, so that it does not slow the next side."""
    begun = time.monotonic()
    while not (any(store.glob("deps/*/record-*.json")) and any(store.glob("deps/latest/*"))):
        if time.monotonic() - begun > _PUBLISHED_LIMIT_S:
            raise RuntimeError("nothing was published")
        time.sleep(0.1)
    time.sleep(0.5)


def run(kind: str, name: str, pinned: str, rounds: int) -> list[harness.Case]:
    """All whole-command cases of one work set on one kind of file system."""
    work_set = locked(name)
    wheels = wheelhouse(work_set)
    label = f"{kind or 'this disk'}, {name}, {pinned}"
    with working(kind, work_set, wheels) as place:
        listed = place.inputs / "list.txt"
        words = work_set.requirements
        if pinned == "unpinned":
            source = f"{name}-requirements.txt"
            words = tuple(word.partition("=")[0] for word in requirements_of(source))
        listed.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        commands = Commands(place, listed)
        commands.prepare()
        print(label, file=sys.stderr)
        sides = {n: _side(commands, n) for n in (*SITUATIONS, *PEERS)}
        sides[LIMIT] = commands.limit
        if pinned == "unpinned":
            sides = {n: _side(commands, n) for n in ("second start", *PEERS)}
            sides["uv pip compile"] = commands.resolving
        ready = harness.interleave(sides, rounds=rounds, warmup=0)
    return _cases(ready, commands.work, label)


def _side(commands: Commands, name: str) -> Callable[[], float]:
    return lambda: commands.side(name)


def _cases(
    ready: dict[str, list[float]], work: dict[str, list[float]], label: str
) -> list[harness.Case]:
    out: list[harness.Case] = []
    conditions = "page cache dropped before every side"
    for situation in (s for s in SITUATIONS if s in ready):
        for what, values in (("ready", ready), ("first work", work)):
            picked = {harness.OURS: values[situation]}
            alone = () if situation == "second start" else (LIMIT,)
            picked |= {k: v for k, v in values.items() if k not in (*SITUATIONS, *alone)}
            case = f"{situation} {what}, {label}"
            out += harness.cases_of(case, picked, unit="s", conditions=conditions)
    if "uv pip compile" in ready:
        pairs = zip(ready["second start"], ready["uv pip compile"], strict=True)
        later = {harness.OURS: [ours - alone for ours, alone in pairs]}
        case = f"second start after resolving, {label}"
        out += harness.cases_of(case, later, unit="s", conditions=conditions)
    return out


def labels(kinds: Sequence[str]) -> list[tuple[str, str, str]]:
    """File system, work set, `locked` or `unpinned` of each run."""
    return [(k, n, p) for k in kinds for n in SETS for p in ("locked", "unpinned")]
