"""What a start needs, behind one link: a registry, a package index, a checkpoint's store.

The servers run on a host of their own, to which one emulated link leads (by default 1 Gbit/s with a
round trip of 1 ms). Everything else, the measured programs included, is on our end of it. To be
used within `tools.netlab.own_network`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bootseer.errors import NotSupportedError
from bootseer.stripedfs import put
from tools.images.layout import Written
from tools.machine import remove
from tools.netdelay import delayed
from tools.netlab import Host, Network
from tools.podman import Podman
from tools.registry import Registry
from tools.startlab import job_image, package_index
from tools.startlab.web import Web

ROOT = Path(__file__).parents[2]
PORT = "port0"  # our end of the servers' link
REGISTRY_PORT, WEB_PORT = 5000, 8000
REPOSITORY, WORKLOAD = "demo/job", "job"
REQUIREMENTS = "requirements.txt"
INSIDE_JOB, INSIDE_CHECKPOINT, INSIDE_MEASURE = "/job", "/ckpt", "/measure"


@dataclass(frozen=True, slots=True)
class Link:
    """The shape of the link; `mbit` 0 leaves it as it is."""

    mbit: float = 1000
    rtt_ms: float = 1

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.rtt_ms:g} ms" if self.mbit else "not shaped"


@dataclass(frozen=True, slots=True)
class Job:
    """A job and what it needs.

    `folder` holds `train.py`, which makes its `checkpoint` with `--make` and `making`, and
    `requirements` what is installed. Its image has `unread_bytes` that no start reads.
    """

    folder: Path
    requirements: Path
    checkpoint: str = "model.npz"
    making: Sequence[str] = ()
    unread_bytes: int = 0

    @classmethod
    def of_example(cls, folder: Path) -> Job:
        """The example's job, with a checkpoint of 0.13 GB."""
        return cls(folder, folder / "requirements.txt", making=("--hidden", "3200"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Stored bytes of what a start may need."""

    image: int
    wheels: int
    checkpoint: int


class StartLab:
    """A context manager, after `download`.

    `kept` is where downloads stay for the next time, `scratch` holds everything else, and goes at
    the end.
    """

    def __init__(self, job: Job, kept: Path, scratch: Path, link: Link) -> None:
        self.job, self.kept, self.scratch, self.link = job, kept, scratch, link
        self._stack = contextlib.ExitStack()
        self.www = scratch / "www"
        self.modules = scratch / "modules"
        self.shown = scratch / "job"
        self.short = Path(f"/tmp/sl-{os.getpid()}")
        """A folder for what takes no long path: podman's own, and sockets."""
        self.sizes = Sizes(0, 0, 0)
        self.ref = ""

    def __enter__(self) -> Self:
        remove(self.scratch)
        for path in (self.scratch, self.modules, self.kept):
            path.mkdir(parents=True, exist_ok=True)
        self._stack.callback(remove, self.scratch)
        try:
            self._start()
        except BaseException:  # nothing that was started stays
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        # The job can import bootseer from here, and nothing else that lies beside it.
        shutil.copytree(ROOT / "bootseer", self.modules / "bootseer", symlinks=True)
        shutil.copytree(self.job.folder, self.shown)
        shutil.copyfile(self.job.requirements, self.shown / REQUIREMENTS)
        image = job_image.make(self.kept, self.job.unread_bytes)
        wheels_bytes = package_index.write_index(fetch_wheels(self.job, self.kept), self.www)
        checkpoint_bytes = self._make_checkpoint()
        network = self._stack.enter_context(Network(1, mbit=self.link.mbit))
        host = network.hosts[0]
        self._stack.enter_context(delayed(host.prefix, self.link.rtt_ms))
        self.registry = self._stack.enter_context(self._registry(host))
        where = f"{host.address}:{WEB_PORT}"
        self.web = self._stack.enter_context(
            Web(self.scratch / "nginx", self.www, where, host.prefix)
        )
        folder = self.short
        self._stack.callback(remove, folder)
        trusted = [self.registry.host]
        podman = self._stack.enter_context(Podman(folder / "p", trusted=trusted))
        self.podman = podman
        # Another's images: those of `podman` go before each plain start.
        self.warm_podman = self._stack.enter_context(Podman(folder / "w", trusted=trusted))
        self.sizes = Sizes(_bytes_of(image), wheels_bytes, checkpoint_bytes)
        self.ref = self.registry.push(image.source, REPOSITORY, job_image.TAG)
        ours = [sys.executable, "-m", "bootseer", "image", "build", "--plain-http"]
        call([*ours, "--cache", str(self.scratch / "build"), self.ref], env=podman.environment)

    def _registry(self, host: Host) -> Registry:
        return Registry(
            self.scratch / "registry",
            address=host.address,
            port=REGISTRY_PORT,
            prefix=host.prefix,
        )

    def _make_checkpoint(self) -> int:
        """Make the job's checkpoint, plain and striped, as files of the web server."""
        venv, made = self.scratch / "venv", self.scratch / self.job.checkpoint
        call([sys.executable, "-m", "venv", str(venv)])
        python = str(venv / "bin/python")
        wheels = ["--no-index", "--find-links", str(_wheels_of(self.job, self.kept))]
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", *wheels]
        call([python, *install, "-r", str(self.job.requirements)])
        script = [str(self.job.folder / "train.py"), "--checkpoint", str(made), "--make"]
        call([python, *script, *self.job.making])
        remove(venv)
        folder = self.www / "checkpoints"
        folder.mkdir()
        size_bytes = made.stat().st_size
        made.rename(folder / self.job.checkpoint)
        self.publish_checkpoint()
        return size_bytes

    def publish_checkpoint(self) -> None:
        """Publish the checkpoint, striped, as a new version."""
        folder, name = self.www / "checkpoints", self.job.checkpoint
        put(str(folder / name), f"file://{folder}/striped/{name}")

    @property
    def plain_checkpoint(self) -> str:
        """Where its stock client reads the checkpoint."""
        return f"{self.web.url}/checkpoints/{self.job.checkpoint}"

    @property
    def striped_checkpoint(self) -> str:
        """Where we read it."""
        return f"{self.web.url}/checkpoints/striped/{self.job.checkpoint}"

    def received_bytes(self) -> int:
        """What has come over the link so far."""
        for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == PORT:
                return int(counts.split()[0])
        raise RuntimeError(f"no {PORT} in this network")


def download(job: Job, kept: Path) -> None:
    """Fetch what a lab is made of, once; there is no network within the lab.

    The packages are fetched while the image is made.
    """
    kept.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        wheels = pool.submit(fetch_wheels, job, kept)
        job_image.make(kept, job.unread_bytes)
        wheels.result()


def _wheels_of(job: Job, kept: Path) -> Path:
    return kept / f"wheels-{job.requirements.parent.name}"


def fetch_wheels(job: Job, kept: Path) -> Path:
    """The folder of the job's wheels, downloaded once."""
    wheels, requirements = _wheels_of(job, kept), job.requirements
    wanted = requirements.read_text(encoding="utf-8") + sys.version
    note = wheels / "complete.txt"
    if note.is_file() and note.read_text(encoding="utf-8") == wanted:
        return wheels
    remove(wheels)
    wheels.mkdir(parents=True)
    words = ["download", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    call([sys.executable, "-m", "pip", *words, "-d", str(wheels), "-r", str(requirements)])
    note.write_text(wanted, encoding="utf-8")
    return wheels


def _bytes_of(image: Written) -> int:
    return sum(layer.size_bytes for layer in image.layers())


def call(command: Sequence[str], **options: Any) -> str:
    """Run a set-up command; returns what it printed. Raises NotSupportedError with its end."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    if done.returncode:
        raise NotSupportedError(f"{' '.join(command[:4])} …: {done.stdout.strip()[-1500:]}")
    said: str = done.stdout
    return said
