"""The stand-in for a cluster: a package index, a shared store, and one node, made anew."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bootseer.depsnap.shared_tree import forms
from bootseer.errors import NotSupportedError
from tools.demo import checkpoints
from tools.demo.options import ROOT, Options
from tools.machine import remove


class Lab:
    """All places of one demonstration; a context manager that leaves only what `kept` holds.

    The job's virtual environment stands at the same path for every start, since its scripts have
    that path in their first lines; before each start it is put back to how it was made.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._stack = contextlib.ExitStack()
        scratch = options.scratch
        self.wheels = options.kept / "wheels"
        self.base = scratch / "base"
        self.node = scratch / "node"
        self.venv = self.node / "venv"
        self.cache = self.node / "cache"
        self.store = scratch / "store"
        self.modules = scratch / "modules"
        self.made = scratch / checkpoints.NAME
        self.mounted = self.node / "checkpoint"
        self.fetched = self.node / checkpoints.NAME
        self.events = scratch / "events"
        self.logs = scratch / "logs"

    def __enter__(self) -> Lab:
        self.take_down()  # what a killed demonstration left
        remove(self.options.scratch)
        for path in (self.node, self.store, self.modules, self.logs):
            path.mkdir(parents=True)
        # The job can import bootseer from here, and nothing else that lies beside it.
        (self.modules / "bootseer").symlink_to(ROOT / "bootseer")
        place = checkpoints.opened(self.options.store, self.options.scratch)
        self.place = self._stack.enter_context(place)
        return self

    def __exit__(self, *_: object) -> None:
        self.take_down()
        self._stack.close()
        remove(self.options.scratch)

    @property
    def python(self) -> str:
        """The job's interpreter."""
        return str(self.venv / "bin" / "python")

    @property
    def requirements(self) -> Path:
        """What the job needs."""
        return self.options.job / "requirements.txt"

    @property
    def install(self) -> list[str]:
        """The job's own install command."""
        pip = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        index = ["--no-index", "--find-links", str(self.wheels)]
        return [*pip, *index, "-r", str(self.requirements)]

    def train(self, *, plain: bool) -> list[str]:
        """The job, which resumes from what the plain side or ours made ready."""
        script = str(self.options.job / "train.py")
        ours = self.mounted / checkpoints.NAME
        path = self.place.plain_path(self.fetched) if plain else ours
        return [self.python, script, "--checkpoint", str(path), *self.options.job_arguments]

    def fetch_wheels(self) -> bool:
        """Download what the job needs, once; True when that was necessary."""
        wanted = self.requirements.read_text(encoding="utf-8") + sys.version
        note = self.wheels / "complete.txt"
        if note.is_file() and note.read_text(encoding="utf-8") == wanted:
            return False
        remove(self.wheels)
        self.wheels.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        only = ["--only-binary", ":all:", "-d", str(self.wheels), "-r", str(self.requirements)]
        self.call([*pip, *only], "download the example's packages")
        note.write_text(wanted, encoding="utf-8")
        return True

    def make_base(self) -> None:
        """Make the node's virtual environment as an image would hold it: Python and pip."""
        self.call([sys.executable, "-m", "venv", str(self.venv)], "make a virtual environment")
        self.venv.rename(self.base)

    def fresh_node(self) -> None:
        """A node that has never seen the job."""
        self.take_down()
        remove(self.cache)
        self._base_again()

    def second_start(self) -> None:
        """The same node later: its cache is there, the container's file system is new."""
        self.take_down()
        self._base_again()

    def take_down(self) -> None:
        """Undo mounts and links by which the environment and the checkpoint were placed."""
        checkpoints.take_down(self.mounted, [self.fetched])
        if os.path.lexists(self.venv):
            forms.unplace(str(self.venv), str(self.cache / "trees"))

    def _base_again(self) -> None:
        if self.venv.is_symlink():
            self.venv.unlink()
        remove(self.venv)
        self.call(["cp", "-a", str(self.base), str(self.venv)], "put the environment back")

    def call(self, command: Sequence[str], action: str) -> None:
        """Run a set-up command; raises NotSupportedError with the end of what it said."""
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            last = " / ".join(done.stdout.strip().splitlines()[-3:])
            raise NotSupportedError(f"cannot {action}: {last}")
