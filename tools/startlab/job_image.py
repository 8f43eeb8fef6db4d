"""The image of the example's job: Debian's Python with pip, and packages that others have use for.

As images for training are, it holds far more than a start of this job reads.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from bootseer.errors import NotSupportedError
from tools.images.layout import Image, Layer, Written, open_layout, write_layout
from tools.images.members import Member, directory, file, symlink
from tools.images.real import tree_members
from tools.initimage.payload import DEBIAN, unpack
from tools.machine import remove

PACKAGES = (*DEBIAN, "libstdc++6", "gcc-12-base", "libgomp1", "dash")
OTHERS = ("pyarrow==25.0.0", "sympy==1.14.0", "networkx==3.6", "pillow==12.0.0")
"""What the job's starts do not read."""
SITE = "usr/local/lib/python3.11/dist-packages"
UNREAD = "opt/libraries"
TAG = "1"
PYTHON = "/usr/bin/python3.11"
_FILE_BYTES, _PIECE_BYTES = 64 << 20, 4 << 20


def make(kept: Path, unread_bytes: int = 0) -> Written:
    """The image in an OCI layout in `kept`; made once.

    With so many `unread_bytes` of random files besides, in a layer of their own.
    """
    text = f"{PACKAGES}{OTHERS}{unread_bytes}{Path(__file__).read_text(encoding='utf-8')}"
    folder = kept / f"job-image-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return open_layout(folder, TAG)
    base = unpack(kept / "job-image-base", PACKAGES)
    work = kept / "job-image-work"
    remove(work)
    try:
        site = work / "site"
        words = ["install", "-q", "--disable-pip-version-check", "--target", str(site)]
        _pip(*words, "pip", *OTHERS)
        places = [directory(name) for name in ("dev", "proc", "run", "sys", "root", "job", "ckpt")]
        more: list[Member] = [
            directory("tmp", mode=0o1777),
            symlink("usr/bin/python3", "python3.11"),
            file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
        ]
        layers = [
            Layer([*tree_members(base, ""), *places, *more], level=6),
            Layer(list(tree_members(site, SITE)), level=6),
        ]
        if unread_bytes:
            unread = _make_unread(work / "unread", unread_bytes)
            layers.append(Layer(list(tree_members(unread, UNREAD)), level=1))
        config = {
            "Cmd": [PYTHON],
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/root"],
        }
        write_layout(work / "layout", Image(layers, config), tag=TAG)
        (work / "layout").rename(folder)
    finally:
        remove(work)
    return open_layout(folder, TAG)


def _make_unread(folder: Path, size_bytes: int) -> Path:
    """Files that nothing reads, as most of a CUDA image's libraries."""
    folder.mkdir()
    for number, begin in enumerate(range(0, size_bytes, _FILE_BYTES)):
        with (folder / f"{number}.so").open("wb") as file:
            for piece in range(begin, min(begin + _FILE_BYTES, size_bytes), _PIECE_BYTES):
                file.write(os.urandom(min(_PIECE_BYTES, size_bytes - piece)))
    return folder


def _pip(*words: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotSupportedError(f"cannot install the image's packages: {done.stdout[-500:]}")
