"""The container's image on both sides: pulled whole, or mounted while it arrives.

A real registry and a real podman with runc. The image holds Debian's Python and the example's
packages; its container runs the imports of the example's job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError, NotSupportedError
from bootseer.fuse.mount.mount_point import can_mount
from tools.demo.machine import remove
from tools.images.layout import Image, Layer, Written, open_layout, write_layout
from tools.images.members import Member, directory, file
from tools.images.real import tree_members
from tools.initimage.payload import DEBIAN, unpack

PROGRAMS = ("docker-registry", "skopeo", "podman", "runc")
PULL, WORK = "image.pull", "image.imports"
NAME, TAG, WORKLOAD = "demo/job", "1", "job"
PACKAGES = (*DEBIAN, "libstdc++6", "gcc-12-base", "libgomp1")
SITE = "usr/local/lib/python3.11/dist-packages"
IMPORTS = "import numpy, pandas, scipy.special, sklearn.datasets, sklearn.preprocessing"
COMMAND = ("/usr/bin/python3.11", "-c", f"{IMPORTS}; print(numpy.__version__, pandas.__version__)")
SMALL_COMMAND = ("/bin/busybox", "cat", "/etc/greeting")
BUSYBOX = "/bin/busybox"
TIMEOUT_S = 600.0


def missing() -> str:
    """Why this machine cannot have an image stage; empty when it can."""
    if not can_mount():
        return "mounting an image and running containers needs root with CAP_SYS_ADMIN"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian's packages of these names)"
    if not os.path.exists("/dev/fuse"):
        return "this machine has no /dev/fuse"
    return ""


@dataclass(frozen=True, slots=True)
class Ran:
    """The image's half of a start: what the container printed, and what `image mount` said."""

    exit_code: int
    output: str
    mounted: Mapping[str, Any]


class Images:
    """A registry that holds the image, and a podman to run it; a context manager.

    `why` is not empty when there is none of it here; then `run` does nothing. `kept` holds the
    image for the next demonstration.
    """

    def __init__(self, node: Path, cache: Path, kept: Path, kind: str) -> None:
        self._stack = contextlib.ExitStack()
        self._cache, self._kept, self._kind = cache, kept, kind
        self._tree, self._runtime = node / "image", node / "run"
        self._command = SMALL_COMMAND if kind == "small" else COMMAND
        self.why = "left out, as asked" if kind == "off" else missing()
        self._reference = ""

    def __enter__(self) -> Images:
        if not self.why:
            from tools.podman import Podman
            from tools.registry import Registry

            # Short, for podman; and no part of what is removed while containers run.
            folder = Path(f"/tmp/bsd-{os.getpid()}")
            self._stack.callback(remove, folder)
            self._registry = self._stack.enter_context(Registry(folder / "r"))
            trusted = [self._registry.host]
            self._podman = self._stack.enter_context(Podman(folder / "p", trusted=trusted))
        return self

    def __exit__(self, *_: object) -> None:
        self.take_down()
        self._stack.close()

    def publish(self, wheels: Path) -> str:
        """Push the image, make its block image and its hot set; returns what there is now.

        Where that fails, the stage is unavailable, and `why` says what went wrong.
        """
        try:
            image = _small() if self._kind == "small" else None
            made = _job_image(self._kept, wheels) if image is None else _written(image, self._kept)
            self._reference = self._registry.push(made.source, NAME, TAG)
            self._bootseer("build", "--cache", str(self._cache), self._reference)
            words = ["--cache", str(self._cache), "--workload", WORKLOAD, "--push"]
            self._bootseer("record", *words, self._reference, "--", *self._command)
            remove(self._cache)
        except (BootseerError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            self.why = f"{error}".strip().splitlines()[-1][:300]
            return ""
        size = sum(layer.size_bytes for layer in made.layers())
        return f"image of {size / 1e6:.0f} MB pushed, its block image and hot set made"

    def _bootseer(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "image", *words],
            env=self._podman.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise NotSupportedError(f"bootseer image {words[0]}: {done.stderr[-1000:]}")
        return done.stdout

    def run(self, environ: Mapping[str, str], *, plain: bool) -> Ran:
        """Bring the image to the node and run its container, as two phases of a start."""
        run = [sys.executable, "-m", "bootseer", "run", "--phase"]
        environ = {**environ, **_added(self._podman.environment)}
        if plain:
            bring = self._podman.command("pull", "--quiet", self._reference)
            work = self._podman.command("run", "--rm", self._reference, *self._command)
        else:
            self._tree.mkdir(parents=True, exist_ok=True)
            places = ["--cache", str(self._cache), "--runtime", str(self._runtime)]
            words = ["image", "mount", "--json", "--workload", WORKLOAD, *places]
            bring = [sys.executable, "-m", "bootseer", *words, self._reference, str(self._tree)]
            work = self._podman.command("run", "--rm", "--rootfs", f"{self._tree}:O")
            work += self._command
        brought = _call([*run, PULL, "--", *bring], environ)
        if brought.returncode:
            return Ran(brought.returncode, brought.stderr[-1000:], {})
        worked = _call([*run, WORK, "--", *work], environ)
        mounted = {} if plain else json.loads(brought.stdout)
        output = worked.stdout if worked.returncode == 0 else worked.stderr[-1000:]
        return Ran(worked.returncode, output, mounted)

    def take_down(self) -> None:
        """A node without the image: nothing pulled, nothing mounted."""
        if self.why or not self._reference:
            return
        if os.path.ismount(self._tree):
            words = ["umount", "--lazy", "--runtime", str(self._runtime), str(self._tree)]
            with contextlib.suppress(NotSupportedError):
                self._bootseer(*words)
            self._wait_until_unmounted()
        self._podman.forget_images()

    def _wait_until_unmounted(self) -> None:
        """The server takes its own mounts away after the last user's, when it has ended."""
        from tools.podman import mounts_below

        end_s = time.monotonic() + TIMEOUT_S
        while mounts_below(self._runtime) and time.monotonic() < end_s:
            time.sleep(0.05)


def _call(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def _added(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if os.environ.get(key) != value}


def _small() -> Image:
    """A container that needs no more than one program."""
    members = [
        directory("bin"),
        file("bin/busybox", Path(BUSYBOX), mode=0o755),
        directory("etc"),
        file("etc/greeting", b"hello\n"),
        *(directory(name) for name in ("dev", "proc", "run", "sys", "tmp")),
    ]
    return Image([Layer(members)], {"Cmd": ["/bin/busybox", "sh"]})


def _written(image: Image, kept: Path) -> Written:
    folder = kept / "image-small"
    remove(folder)
    return write_layout(folder, image, tag=TAG)


def _job_image(kept: Path, wheels: Path) -> Written:
    """The image in an OCI layout; made once for a set of packages."""
    names = "\n".join(sorted(path.name for path in wheels.glob("*.whl")))
    digest = hashlib.sha256(f"{PACKAGES}{names}".encode()).hexdigest()[:16]
    folder = kept / f"image-{digest}"
    if folder.is_dir():
        return open_layout(folder, TAG)
    base = unpack(kept / "image-base", PACKAGES)
    with _scratch(kept / "image-work") as work:
        site = work / "site"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        found = ["--no-index", "--find-links", str(wheels), "--target", str(site)]
        done = _call([*pip, *found, *map(str, sorted(wheels.glob("*.whl")))], os.environ)
        if done.returncode:
            raise NotSupportedError(f"cannot install the image's packages: {done.stderr[-500:]}")
        places = ("dev", "proc", "run", "sys", "tmp")
        members: list[Member] = [*tree_members(base, ""), *(directory(name) for name in places)]
        layers = [Layer(members, level=6), Layer(list(tree_members(site, SITE)), level=6)]
        config = {"Cmd": ["/usr/bin/python3.11"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}
        made = work / "layout"
        write_layout(made, Image(layers, config), tag=TAG)
        made.rename(folder)
    return open_layout(folder, TAG)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove(folder)
