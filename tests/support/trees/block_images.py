"""Block images as trees on disk: built, unpacked and mounted without a server, and compared.

with built_tree(layout_ref, tmp_path) as tree: ...      # build, mount, umount
assert differences(tree, other_tree) == []
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from bootseer.blocks.table import Codec, Table, Unpacker, parse
from bootseer.imageprefetch.image_build.builder import BuildReport, BuildSettings, build_image
from bootseer.storage.oci import media_types
from bootseer.storage.oci.open import open_repository

_LARGE = 1 << 30


class Tree(NamedTuple):
    """A mounted block image. `meta` and `data` are its files, unpacked."""

    root: Path
    meta: Path
    data: Path
    report: BuildReport


@contextlib.contextmanager
def built_tree(ref: str, folder: Path, **settings: Any) -> Iterator[Tree]:
    """Build the block image of `ref`, fetch it back from there, and mount it."""
    folder.mkdir(parents=True, exist_ok=True)
    report = build_image(BuildSettings(ref=ref, cache_dir=str(folder / "cache"), **settings))
    meta, data = fetch(settings.get("to") or ref, report.block_image, folder)
    with mounted(meta, data, folder / "tree"):
        yield Tree(folder / "tree", meta, data, report)


def fetch(ref: str, digest: str, folder: Path) -> tuple[Path, Path]:
    """A block image's metadata and raw data as files, every block checked."""
    with open_repository(ref)[0] as repository:
        manifest = repository.manifest(digest)
        parts = {layer.media_type: layer for layer in manifest.layers}
        blobs = {kind: repository.blob(layer, limit_bytes=1 << 32) for kind, layer in parts.items()}
    meta, data = folder / "meta", folder / "data"
    meta.write_bytes(zstandard.ZstdDecompressor().decompress(blobs[media_types.META]))
    unpack(parse(blobs[media_types.TABLE]), blobs[media_types.DATA], data)
    return meta, data


def unpack(table: Table, stored: bytes, path: Path) -> None:
    """Write the raw data that a table describes; zeros stay holes."""
    unpacker = Unpacker()
    with path.open("wb") as out:
        out.truncate(table.size_bytes)
        for number in range(table.blocks):
            block = table[number]
            at = number * table.block_bytes
            raw = bytearray(min(table.block_bytes, table.size_bytes - at))
            taken = memoryview(stored)[block.offset : block.offset + block.length]
            if block.codec is Codec.ZSTD:
                unpacker.unpack(taken, memoryview(raw), f"block {number}")
            else:
                raw[:] = taken
            assert hashlib.sha256(raw).digest() == block.digest
            if any(raw):
                out.seek(at)
                out.write(raw)


@contextlib.contextmanager
def mounted(meta: Path, data: Path, at: Path) -> Iterator[None]:
    """Mount EROFS metadata from a file, with its one data device as another."""
    at.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    words = (os.fsencode(meta), os.fsencode(at), b"erofs", 1, b"device=" + os.fsencode(data))
    if libc.mount(*words):
        raise OSError(ctypes.get_errno(), "mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


Facts = dict[str, Any]


def facts(root: Path) -> dict[bytes, Facts]:
    """Everything that can be told of a tree, by path; files of a GiB and more by their ends."""
    out: dict[bytes, Facts] = {}
    first: dict[tuple[int, int], bytes] = {}
    top = os.fsencode(root)
    stack = [b""]
    while stack:
        path = stack.pop()
        whole = os.path.join(top, path) if path else top
        about = os.lstat(whole)
        kind = stat.S_IFMT(about.st_mode)
        found: Facts = {
            "mode": oct(about.st_mode),
            "owner": (about.st_uid, about.st_gid),
            "mtime_ns": about.st_mtime_ns,
            "xattrs": _xattrs(whole),
        }
        if kind == stat.S_IFDIR:
            names = os.listdir(whole)
            stack += [path + b"/" + name if path else name for name in names]
            assert len(set(names)) == len(names)
        else:
            found["links"] = about.st_nlink  # overlayfs counts hidden names too
            found["same_as"] = first.setdefault((about.st_dev, about.st_ino), path)
        if kind == stat.S_IFREG:
            found["size"] = about.st_size
            found["content"] = _content(whole, about.st_size)
        elif kind == stat.S_IFLNK:
            found["target"] = os.readlink(whole)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            found["device"] = (os.major(about.st_rdev), os.minor(about.st_rdev))
        out[path] = found
    groups: dict[bytes, bytes] = {}
    for path in sorted(out):  # names of one inode by the first in order, however listed
        if "same_as" in out[path]:
            out[path]["same_as"] = groups.setdefault(out[path]["same_as"], path)
    return out


def differences(
    ours: Path, theirs: Path, *, besides: frozenset[tuple[bytes, str]] = frozenset()
) -> list[str]:
    """What two trees differ in; `besides` are (path, fact) that may."""
    left, right = facts(ours), facts(theirs)
    out = [f"only ours: {path!r}" for path in sorted(left.keys() - right.keys())]
    out += [f"only theirs: {path!r}" for path in sorted(right.keys() - left.keys())]
    names = collections.Counter(found.get("same_as") for found in left.values())
    for path, found in left.items():
        if "links" in found and found["links"] != names[found["same_as"]]:
            out.append(f"{path!r} has {found['links']} links and {names[found['same_as']]} names")
    for path in sorted(left.keys() & right.keys()):
        for key in sorted((left[path].keys() | right[path].keys()) - {"links"}):
            a, b = left[path].get(key), right[path].get(key)
            if a != b and (path, key) not in besides:
                out.append(f"{path!r} {key}: {a!r}, not {b!r}")
    return out


def _xattrs(path: bytes) -> dict[str, bytes]:
    names = os.listxattr(path, follow_symlinks=False)
    hidden = ("trusted.overlay.", "user.overlay.")
    return {
        name: os.getxattr(path, name, follow_symlinks=False)
        for name in names
        if not name.startswith(hidden)
    }


def _content(path: bytes, size: int) -> str:
    with open(path, "rb") as source:
        if size < _LARGE:
            return hashlib.file_digest(source, "sha256").hexdigest()
        ends = source.read(1 << 16)
        source.seek(-(1 << 16), os.SEEK_END)
        return hashlib.sha256(ends + source.read()).hexdigest()
