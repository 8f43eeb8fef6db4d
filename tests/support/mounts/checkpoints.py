"""Checkpoints for tests, and mounts of them that are gone afterwards for certain."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.manifest import Manifest, Pointer
from bootseer.stripedfs.format.stripe_layout import Layout, stripe_name
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.mounts.fuse import end_mount, python

CHUNK = 4096
WIDTH = 3
ODD_SIZES = (
    0,
    1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    WIDTH * CHUNK - 1,
    WIDTH * CHUNK,
    WIDTH * CHUNK + 1,
    11 * CHUNK + 77,
)
BOOTSEER = [sys.executable, "-m", "bootseer", "stripe"]
SMALL = WriteSettings(width=WIDTH, chunk_bytes=CHUNK)

SERVER = """
import dataclasses, json
from bootseer.stripedfs.mount import mount as mounting
from bootseer.stripedfs.mount.settings import MountSettings
from bootseer.stripedfs.write.write_settings import WriteSettings
given = json.loads(sys.argv[1])
if "writing" in given:
    given["writing"] = WriteSettings(**given["writing"])
def ready():
    print("ready", flush=True)
mounting.serve(MountSettings(**given), on_ready=ready)
"""


Tree = TypeVar("Tree", bound=StripedTree)


def tree_at(kind: type[Tree], store: Store, name: str, fetcher: Fetcher, **options: Any) -> Tree:
    """The tree of what a name on a store stands for."""
    return kind(store, name, namespace.look_up(store, name), fetcher, **options)


def content(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere and are always the same."""
    return random.Random(size_bytes * 1000 + seed).randbytes(size_bytes)


def put_bytes(
    store: Store, name: str, data: bytes, scratch: Path, settings: WriteSettings = SMALL
) -> None:
    """Store bytes as a striped checkpoint, small as they may be."""
    local = scratch / f"source-{os.getpid()}-{abs(hash(name))}"
    local.write_bytes(data)
    try:
        put_into(store, name, str(local), settings=settings)
    finally:
        local.unlink()


def put_sparse(
    root: Path, name: str, size_bytes: int, known: dict[int, bytes], *, chunk: int = 64 << 20
) -> None:
    """A striped file of holes with some bytes in it, made without writing the holes."""
    layout = Layout(size_bytes, chunk, WIDTH)
    version = f"v-20260101T000000Z-{'0' * 8}"
    folder = root / f"{name}.stripes" / version
    folder.mkdir(parents=True)
    for stripe in range(WIDTH):
        with (folder / stripe_name(stripe)).open("wb") as file:
            file.truncate(layout.stripe_length(stripe))
    chunks: dict[int, bytearray] = {}
    for offset, data in known.items():
        for number, byte in enumerate(data, offset):
            index, within = divmod(number, chunk)
            chunks.setdefault(index, bytearray(layout.chunk_length(index)))[within] = byte
    for index, chunk_bytes in chunks.items():
        place = layout.chunk_location(index)
        with (folder / stripe_name(place.stripe)).open("r+b") as file:
            file.seek(place.offset)
            file.write(chunk_bytes)
    lengths = {layout.chunk_length(i) for i in range(layout.chunk_count)}
    empty = {n: compute_digest(bytes(n)) for n in lengths}
    digests = b"".join(
        compute_digest(chunks[i]) if i in chunks else empty[layout.chunk_length(i)]
        for i in range(layout.chunk_count)
    )
    manifest = Manifest(layout, digests).encode()
    (folder / "manifest.json").write_bytes(manifest)
    pointer = Pointer("file", version, size_bytes, len(manifest), compute_digest(manifest))
    (root / f"{name}.stripes" / "CURRENT").write_bytes(pointer.encode())


@dataclasses.dataclass
class Served:
    """A mount served by another process, with what it logged."""

    directory: Path
    process: subprocess.Popen[str]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def workers(self) -> list[int]:
        """The supervisor's children."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(path).read_text().split()]


@contextlib.contextmanager
def served(
    url: str | Path,
    directory: Path,
    *,
    prepared: Callable[[], object] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Mount in another process; yields once it answers, and leaves nothing behind.

    `prepared` is called in it before its program begins.
    """
    directory.mkdir(exist_ok=True)
    log = directory.parent / f"{directory.name}.log"
    given = {"url": str(url), "mountpoint": str(directory), "log_file": str(log), **settings}
    process = python(SERVER, json.dumps(given), preexec_fn=prepared)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Served(directory, process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        end_mount(directory)
        if process.stdout is not None:
            process.stdout.close()


def store_of(folder: Path) -> Store:
    """The store in a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    return open_store(str(folder))


def stripe(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """`bootseer stripe …`, as people run it."""
    return subprocess.run(
        [*BOOTSEER, *map(str, words)], capture_output=True, text=True, timeout=120, **options
    )  # type: ignore[call-overload]
