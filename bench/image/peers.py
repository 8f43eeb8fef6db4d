"""The peers of `bench.image`: whole pulls, stargz, and a plain EROFS on the local disk.

What takes minutes to make (eStargz images, the EROFS) is made once and kept beside the image.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.image.lab import WORK, Lab, Start, measured
from tools import stargz
from tools.containerd.server import Containerd
from tools.images import real
from tools.images.layout import Written
from tools.podman import Podman, mounts_below
from tools.registry import Registry

REPOSITORY = "bench/image"
STOCK, LAZY = "stock", "lazy"
RECORD_S = {"numpy+pyarrow": 12, "torch": 25}
READY_TIMEOUT_S = 30.0


def optimised(work: str) -> str:
    """The tag of the eStargz image that was optimised for this program."""
    return f"optimised-{work.replace('+', '-')}"


# Whole pulls.


def podman_pull(lab: Lab, work: str) -> Start:
    """`podman run` with nothing local."""
    lab.podman.forget_images()
    words = ["run", "--rm", "--quiet", "--cgroup-parent", f"/{lab.group}"]
    image = lab.peers.reference(REPOSITORY, STOCK)
    command = lab.podman.command(*words, image, "python3", "-c", WORK[work])
    return measured(lab, command, environment=lab.podman.environment)


def containerd_pull(lab: Lab, work: str) -> Start:
    """`ctr images pull`, `ctr run` with nothing local; layers are unpacked by `unpigz`."""
    if not shutil.which("unpigz"):
        raise RuntimeError("containerd unpacks twice as slowly without unpigz: install pigz")
    image = lab.peers.reference(REPOSITORY, STOCK)
    with lab.folder("c") as folder, Containerd(folder) as server:
        pull = server.command("images", "pull", "--plain-http", image)
        return measured(lab, pull, server.command(*_run(lab), image, "one", *_program(work)))


def stargz_pull(lab: Lab, work: str, tag: str) -> Start:
    """`ctr-remote images rpull` and a run from what comes lazily; the snapshotter is a new one."""
    return stargz_run(lab, tag, (), _program(work))


def stargz_run(lab: Lab, tag: str, options: Sequence[str], words: Sequence[str]) -> Start:
    """The same with further options of `ctr run`, for any command."""
    image = lab.peers.reference(REPOSITORY, tag)
    with (
        lab.folder("s") as folder,
        stargz_server(folder) as socket,
        Containerd(folder / "c", snapshotters={"stargz": socket}) as server,
    ):
        pull = server.command("images", "rpull", "--plain-http", image, program="ctr-remote")
        run = [*_run(lab), "--snapshotter", "stargz", *options, image, "one", *words]
        return measured(lab, pull, server.command(*run))


@contextlib.contextmanager
def stargz_server(folder: Path) -> Iterator[Path]:
    """The stargz snapshotter with its state below `folder`; yields its socket."""
    socket, root = folder / "s.sock", folder / "stargz"
    root.mkdir()
    with (folder / "stargz.log").open("wb") as log:
        words = [str(stargz.program()), "--address", str(socket), "--root", str(root)]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + READY_TIMEOUT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > until:
                said = (folder / "stargz.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"stargzd does not answer: {said}")
            time.sleep(0.02)
        yield socket
    finally:
        process.terminate()
        process.wait()
        for path in mounts_below(folder):
            subprocess.run(["umount", "-l", path], check=False, stderr=subprocess.DEVNULL)


def _run(lab: Lab) -> list[str]:
    # Below our group, so that what the container uses is counted too.
    return ["run", "--rm", "--cgroup", f"/{lab.group}/one"]


def _program(work: str) -> list[str]:
    return ["python3", "-c", WORK[work]]


# The local disk.


def cold_disk(lab: Lab, work: str, image: Path) -> Start:
    """A plain EROFS of the whole image, none of it in memory: mount and run."""
    forget(image)
    with lab.folder("e") as folder, erofs(image, folder):
        return run_rootfs(lab, folder, work)


def warm_disk(lab: Lab, work: str, image: Path) -> Start:
    """The same, mounted and run once before: all that the program reads is in memory."""
    with lab.folder("e") as folder, erofs(image, folder):
        run_rootfs(lab, folder, work)
        return run_rootfs(lab, folder, work)


def run_rootfs(lab: Lab, root: Path, work: str) -> Start:
    """A container on a tree under a throw-away overlay."""
    return measured(lab, rootfs_command(lab, root, work), environment=lab.podman.environment)


def rootfs_command(lab: Lab, root: Path, work: str) -> list[str]:
    """The words of `run_rootfs`."""
    words = ["run", "--rm", "--cgroup-parent", f"/{lab.group}", "--rootfs", f"{root}:O"]
    return lab.podman.command(*words, *_program(work))


def forget(path: Path) -> None:
    """Drop a file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def erofs(image: Path, folder: Path) -> Iterator[None]:
    """Mount an EROFS file read-only; by mount(2), as util-linux would put a loop device between."""
    libc = ctypes.CDLL(None, use_errno=True)
    readonly = 1
    if libc.mount(bytes(image), bytes(folder), b"erofs", readonly, None):
        raise OSError(ctypes.get_errno(), f"mount {image}: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        # The container's overlay may be let go of a moment later.
        for _ in range(200):
            if not libc.umount2(bytes(folder), 0):
                break
            time.sleep(0.02)
        else:
            subprocess.run(["umount", "-l", folder], check=True)


# What is made once.


def prepare(image: Written) -> tuple[Path, Path]:
    """The peers' registry storage and the plain EROFS of an image; made where not there yet."""
    place = real.cache() / f"peers-{image.digest[7:19]}"
    with (real.cache() / "peers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            _make(image, place)
            (place / "done").touch()
    return place / "registry", place / "plain.erofs"


def _make(image: Written, place: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        with Registry(scratch / "r", storage=place / "registry") as registry:
            stock = registry.push(image.source, REPOSITORY, STOCK)
            with Podman(scratch / "p", trusted=[registry.host]) as podman:
                podman.pull(stock)
                with podman.mounted(stock) as tree:
                    words = ["mkfs.erofs", "--quiet", str(place / "plain.erofs"), str(tree)]
                    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            _convert(registry, scratch, stock)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(registry: Registry, scratch: Path, stock: str) -> None:
    """Make the lazily loading images: one as it is, one optimised for each program."""
    kinds = {LAZY: ["--no-optimize"]}
    for work, seconds in RECORD_S.items():
        arguments = json.dumps(_program(work))
        kinds[optimised(work)] = ["--period", str(seconds), "--entrypoint", "[]"]
        kinds[optimised(work)] += ["--args", arguments]
    with Containerd(scratch / "c") as server:
        server("images", "pull", "--plain-http", stock)
        for tag, options in kinds.items():
            made = registry.reference(REPOSITORY, tag)
            level = ("--estargz-compression-level", str(real.GZIP_LEVEL))
            words = ["images", "optimize", "--oci", *level, *options, stock, made]
            server(*words, program="ctr-remote", timeout_s=900)
            server("images", "push", "--plain-http", made)
            server("images", "rm", "--sync", made)
