"""Where the job's checkpoint lies, striped and plain: in a directory, or on a real HDFS."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from bootseer.fuse.mount.mount_point import find_mount, unmount
from tools.machine import remove

NAME = "model.npz"
_FETCH = """
import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
"""


class Place(Protocol):
    """A store that holds the checkpoint for both sides."""

    @property
    def url(self) -> str:
        """The striped one, for bootseer."""

    def keep(self, file: Path) -> None:
        """Take a checkpoint that was just made."""

    def fetch(self, target: Path) -> list[str]:
        """The plain command that brings it to the node; empty: the job reads it where it is."""

    def plain_path(self, fetched: Path) -> Path:
        """What the job reads on the plain side."""

    def emulated(self) -> list[str]:
        """What about it is emulated, for the report."""


class Directory:
    """A directory that stands for a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return f"file://{self._root}/striped/{NAME}"

    def keep(self, file: Path) -> None:
        from bootseer.stripedfs import put

        self._root.mkdir(parents=True)
        put(str(file), self.url)
        file.rename(self._root / NAME)

    def fetch(self, target: Path) -> list[str]:
        return []

    def plain_path(self, fetched: Path) -> Path:
        return self._root / NAME

    def emulated(self) -> list[str]:
        return ["checkpoint store: a local directory"]


class Hdfs:
    """A NameNode and three DataNodes on this machine; read by WebHDFS."""

    def __init__(self, webhdfs_url: str) -> None:
        self._url = webhdfs_url

    @property
    def url(self) -> str:
        return f"{self._url}/checkpoints/striped/{NAME}"

    def keep(self, file: Path) -> None:
        from bootseer.storage.open import open_object
        from bootseer.stripedfs import put

        put(str(file), self.url)
        store, name = open_object(f"{self._url}/checkpoints/{NAME}")
        with open(file, "rb") as source, store.writer(name) as target:
            while chunk := source.read(8 << 20):
                target.write(chunk)
        store.close()
        file.unlink()

    def fetch(self, target: Path) -> list[str]:
        host = self._url.removeprefix("webhdfs://")
        address = f"http://{host}/webhdfs/v1/checkpoints/{NAME}?op=OPEN"
        return [sys.executable, "-c", _FETCH, address, str(target)]

    def plain_path(self, fetched: Path) -> Path:
        return fetched

    def emulated(self) -> list[str]:
        return ["HDFS: NameNode and three DataNodes on this machine, over loopback"]


@contextlib.contextmanager
def opened(kind: str, scratch: Path) -> Iterator[Place]:
    """The place of a kind: `local` or `hdfs`, whose servers run for so long."""
    if kind == "local":
        yield Directory(scratch / "checkpoints")
        return
    from tools.hdfs.cluster import Cluster

    place = scratch / "hdfs"
    place.mkdir(parents=True)
    with Cluster(place) as cluster:
        yield Hdfs(cluster.webhdfs_url)


def take_down(mountpoint: Path, fetched: Sequence[Path]) -> None:
    """Undo what a start left of its checkpoint: the mount ends with the job, but not at once."""
    if find_mount(str(mountpoint)) is not None:
        unmount(str(mountpoint), lazily=True)
    remove(mountpoint)
    for path in fetched:
        path.unlink(missing_ok=True)
