"""Checkpoints for tests, and a reader of the format that shares nothing with ours but its text.

`whole` and `tree_of` follow docs/stripe-format.md on a local store with json and file reads alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.storage.local import LocalStore, LocalWriter
from bootseer.storage.open import open_store
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import NO_HINTS, Store, WriteHints
from bootseer.stripedfs.read import open as opening
from bootseer.stripedfs.read.cat import stream_file
from bootseer.stripedfs.read.get import GetReport, get_from_store
from bootseer.stripedfs.read.namespace import look_up
from bootseer.stripedfs.read.sources import FileSource
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings

CHUNK = 4096
ONE_BY_ONE = WriteSettings(chunk_bytes=CHUNK, width=4, jobs=1, keep_bytes=0)
QUICK = FetchSettings(tries=1, backoff_s=0.001)


def sample(size: int, seed: int = 0) -> bytes:
    """Bytes that repeat nowhere, always the same for one size and seed."""
    return hashlib.shake_128(f"{seed}".encode()).digest(size)


def open_source(store: Store, name: str) -> FileSource:
    """Open a file by its name. Raises UsageError for a folder or a directory checkpoint."""
    return opening._check_file(store, name, opening.open_any(store, name))


def read_back(store: Store, name: str) -> bytes:
    """All bytes through our own reader."""
    with Fetcher() as fetcher:
        return b"".join(bytes(view) for view in stream_file(open_source(store, name), fetcher))


def version_folder(store: Path, name: str) -> Path:
    """The current version's folder."""
    pointer = json.loads((store / f"{name}.stripes/CURRENT").read_bytes())
    return store / f"{name}.stripes" / pointer["current"]


def whole(store: Path, name: str) -> bytes:
    """A striped file's bytes, every digest checked."""
    pointer = json.loads((store / f"{name}.stripes/CURRENT").read_bytes())
    assert (pointer["format"], pointer["version"], pointer["kind"], pointer["of"]) == (
        "bootseer.stripes",
        1,
        "pointer",
        "file",
    )
    folder = store / f"{name}.stripes" / pointer["current"]
    data = (folder / "manifest.json").read_bytes()
    assert len(data) == pointer["manifest_bytes"]
    assert xxhash.xxh3_128_hexdigest(data) == pointer["manifest_digest"]
    return _striped(folder, json.loads(data), pointer["size_bytes"])


def _striped(folder: Path, manifest: dict, size: int) -> bytes:
    assert manifest["size_bytes"] == size
    chunk, width = manifest["chunk_bytes"], manifest["width"]
    stripes = [(folder / f"stripe-{n:05d}").read_bytes() for n in range(width)]
    assert [len(s) for s in stripes] == manifest["stripe_bytes"]
    digests = base64.b64decode(manifest["chunks"])
    out = []
    for index in range(-(-size // chunk)):
        start = index // width * chunk
        piece = stripes[index % width][start : start + chunk]
        assert xxhash.xxh3_128_digest(piece) == digests[16 * index : 16 * index + 16]
        out.append(piece)
    return b"".join(out)


def tree_of(store: Path, name: str) -> dict[str, object]:
    """A directory checkpoint: path -> bytes of a file, None for a folder, text for a link."""
    pointer = json.loads((store / f"{name}.stripes/CURRENT").read_bytes())
    folder = store / f"{name}.stripes" / pointer["current"]
    data = (folder / "manifest.json").read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) == pointer["manifest_digest"]
    found: dict[str, object] = {}
    for entry in json.loads(data)["entries"]:
        kind, path = entry["type"], entry["path"]
        if kind == "folder":
            found[path] = None
        elif kind == "link":
            found[path] = f"-> {entry['target']}"
        elif kind == "plain":
            body = (folder / entry["object"]).read_bytes()
            assert xxhash.xxh3_128_hexdigest(body) == entry["digest"]
            found[path] = body
        else:
            text = (folder / entry["object"] / "manifest.json").read_bytes()
            assert xxhash.xxh3_128_hexdigest(text) == entry["digest"]
            found[path] = _striped(folder / entry["object"], json.loads(text), entry["size_bytes"])
    return found


def local_tree(root: Path) -> dict[str, object]:
    """The same of a local directory."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        for each in folders + files:
            path = Path(folder) / each
            key = os.path.relpath(path, root)
            if path.is_symlink():
                found[key] = f"-> {os.readlink(path)}"
            else:
                found[key] = None if path.is_dir() else path.read_bytes()
    return found


def make_tree(root: Path, *, seed: int = 0) -> Path:
    """A directory with everything a checkpoint may hold."""
    for folder in ("empty", "sub/deep", "odd %:?#[]", ".hidden"):
        (root / folder).mkdir(parents=True)
    (root / "model.bin").write_bytes(sample(9 * CHUNK + 5, seed))
    (root / "sub/exact").write_bytes(sample(CHUNK, seed + 1))
    (root / "sub/deep/small.json").write_bytes(b'{"a": 1}')
    (root / "sub/nothing").write_bytes(b"")
    (root / "odd %:?#[]/näme ~").write_bytes(sample(3 * CHUNK - 1, seed + 2))
    (root / ".hidden/.x").write_bytes(b"dot")
    (root / "sub/link").symlink_to("../model.bin")
    (root / "sub/exact").chmod(0o640)
    (root / "sub/deep").chmod(0o750)
    os.utime(root / "model.bin", ns=(10**18 + 7, 10**18 + 7))
    return root


def leftovers(store: Path, name: str) -> list[str]:
    """What lies in a checkpoint's folder besides the pointer and the current version."""
    base = store / f"{name}.stripes"
    current = version_folder(store, name).name if (base / "CURRENT").exists() else ""
    return sorted(p.name for p in base.iterdir() if p.name not in ("CURRENT", current))


def everything_in(store: Path, name: str) -> Iterator[Path]:
    """Every object of the current version."""
    return (p for p in sorted(version_folder(store, name).rglob("*")) if p.is_file())


def opened(path: Path) -> Store:
    """The store at a local path."""
    return open_store(str(path))


class Watched(LocalStore):
    """Fault injection: `before(name)` is called before an object is written or read."""

    def __init__(self, root: Path, before: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(str(root))
        self.before = before
        self.begun: list[str] = []

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
        self.before(name)
        self.begun.append(name.rpartition("/")[2])
        return super().writer(name, hints)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self.before(name)
        super().read_scatter(name, offset, buffers, attempt, filled)


def get_quickly(store: LocalStore, name: str, to: Path, **more: bool) -> GetReport:
    """Copy a checkpoint, each request tried once."""
    with Fetcher(QUICK) as fetcher:
        return get_from_store(store, look_up(store, name), str(to), fetcher, **more)


def store_sample(tmp_path: Path, size: int = 40 * CHUNK + 1) -> bytes:
    """Store the same bytes striped as `f` and plainly as `plain`; returns them."""
    data = sample(size, 3)
    with StripedWriter.begin(opened(tmp_path / "s"), "f", ONE_BY_ONE) as out:
        out.write(data)
    (tmp_path / "s/plain").write_bytes(data)
    return data
