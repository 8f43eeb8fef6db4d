"""The images that test pods run, made from Debian's packages: one with Python and pip, one bare."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.initimage import ociimage, payload

ENVIRONMENT = ("PATH=/usr/local/bin:/usr/bin:/bin",)


def python_image(target: Path, work: Path, cache: Path) -> None:
    """Python 3.11 with pip and a busybox shell; runs as root, as many training images do.

    Made once and kept in `cache`: compiling it takes longer than a test, and without byte code
    every pip in a pod would.
    """
    kept = cache / "images" / f"python-{_key(cache)}.tar"
    if not kept.is_file():
        shutil.rmtree(kept.parent, ignore_errors=True)
        kept.parent.mkdir()
        unfinished = kept.with_suffix(f".{os.getpid()}")
        _write_python_image(unfinished, work, payload.unpack(cache))
        unfinished.replace(kept)
    shutil.copyfile(kept, target)


def _key(cache: Path) -> str:
    parts = [path.read_text("utf-8") for path in (Path(__file__), Path(payload.__file__))]
    parts.append((payload.unpack(cache) / ".complete").read_text("ascii"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _write_python_image(target: Path, work: Path, unpacked: Path) -> None:
    root = work / "python-root"
    for folder in ("usr/bin", "usr/lib", "lib", "lib64"):
        if (unpacked / folder).is_dir():
            shutil.copytree(unpacked / folder, root / folder, symlinks=True, dirs_exist_ok=True)
    for name in ("python3", "python"):
        (root / "usr/bin" / name).symlink_to("python3.11")
    site = root / "usr/lib/python3/dist-packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    more = ["--no-compile", "--target", str(site), "pip"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    for folder in ("usr/lib/python3.11", "usr/lib/python3"):
        payload.compile_tree(root, root / folder, unpacked, "/")
    _shell(root)
    run_as = ociimage.RunAs(["python3"], ENVIRONMENT, user="0:0")
    ociimage.write(target, root, "lab/python:1", run_as, level=1)


def bare_image(target: Path, work: Path) -> None:
    """A shell alone: no Python, no C library."""
    root = work / "bare-root"
    _shell(root)
    run_as = ociimage.RunAs([], ENVIRONMENT, user="0:0", command=["/bin/sh"])
    ociimage.write(target, root, "lab/bare:1", run_as, level=1)


def _shell(root: Path) -> None:
    """A static busybox, its names, and the few files that programs look for."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy2("/bin/busybox", root / "bin/busybox")
    listed = subprocess.run(["/bin/busybox", "--list"], check=True, capture_output=True, text=True)
    for name in listed.stdout.split():
        if name != "busybox" and not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to("busybox")
    for folder, mode in (("tmp", 0o1777), ("etc", 0o755), ("root", 0o700), ("proc", 0o555)):
        (root / folder).mkdir(exist_ok=True)
        (root / folder).chmod(mode)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n", encoding="ascii")
    (root / "etc/group").write_text("root:x:0:\n", encoding="ascii")
