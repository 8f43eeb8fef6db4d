"""Layers unpacked by the snapshotter, compared with what podman makes of the same image."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.snapshotter import layer_unpacker
from bootseer.storage.oci.config import diff_ids_of
from bootseer.storage.oci.open import open_repository
from tests.support.samples.images import (
    Image,
    Repeated,
    device,
    directory,
    fifo,
    file,
    hardlink,
    opaque,
    symlink,
    whiteout,
    write_layout,
)

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("podman")]

LAYERS = [
    [
        directory("bin", mode=0o755),
        file("bin/tool", b"tool" * 5000, mode=0o755),
        hardlink("bin/same", "bin/tool"),
        file("bin/setuid", b"s", mode=0o4755, uid=5),
        symlink("bin/link", "../etc/none"),
        directory("gone"),
        file("gone/x", b"x"),
        directory("covered"),
        file("covered/old", b"old"),
        file("big", Repeated(b"abcdefg", 3_000_000)),
        file("both", b"low"),
    ],
    [
        whiteout("gone"),
        directory("covered"),
        opaque("covered"),
        file("covered/new", b"new"),
        file("both", b"high"),
        device("null", "char", 1, 3),
        fifo("pipe"),
        directory("sticky", mode=0o1777),
        file(b"odd-\xff", b"name", uid=1000, gid=1001),
        file("empty", b""),
    ],
]


def shown(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """All that a program can see of each name."""
    out = {}
    inodes: dict[int, bytes] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            inside = os.path.relpath(path, os.fsencode(root))
            content: bytes = b""
            if stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            links = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
            device_number = status.st_rdev if stat.S_ISCHR(status.st_mode) else 0
            first = inodes.setdefault(status.st_ino, inside)
            owner = (status.st_uid, status.st_gid, status.st_mode, int(status.st_mtime))
            out[inside] = (*owner, links > 1 and first, device_number, content)
    return out


def unpacked(ref: str, layers: int, target: Path) -> Path:
    target.mkdir()
    repository, parsed = open_repository(ref)
    with repository:
        manifest = repository.image(parsed.version)[1]
        config = repository.blob(manifest.config, limit_bytes=1 << 20)
        opened = [
            (layer.digest, layer_unpacker.layer_source(repository, layer.digest, diff_id))
            for layer, diff_id in zip(manifest.layers, diff_ids_of(config), strict=True)
        ][:layers]
        layer_unpacker.unpack(opened, str(target))
    return target


def test_what_is_unpacked_is_what_podman_unpacks(
    registry: Any, podman: Any, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    ref = registry.push(layout.source, "snap/unpack", "1")
    podman.pull(ref)
    with podman.mounted(ref) as tree:
        theirs = shown(Path(tree))
    ours = shown(unpacked(ref, 2, tmp_path / "tree"))
    for name in (b"proc", b"sys", b"dev", b"run"):  # podman may make these
        theirs.pop(name, None)
    assert ours.keys() == theirs.keys()
    assert {k: v for k, v in ours.items() if theirs[k] != v} == {}


def test_the_first_layers_alone(registry: Any, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    ref = registry.push(layout.source, "snap/first", "1")
    tree = unpacked(ref, 1, tmp_path / "tree")
    assert (tree / "gone/x").read_bytes() == b"x"
    assert (tree / "both").read_bytes() == b"low"
    assert os.stat(tree / "bin/setuid").st_mode & 0o7777 == 0o4755
    assert not list(tmp_path.glob("content-*"))


def test_a_damaged_layer_is_never_a_tree(own_registry: Any, tmp_path: Path) -> None:
    registry = own_registry()
    layout = write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    ref = registry.push(layout.source, "snap/damaged", "1")
    path = registry.blob_path(layout.layers()[0].digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptDataError):
        unpacked(ref, 2, tmp_path / "tree")
    assert not list(tmp_path.glob("content-*"))


def test_a_layer_that_leads_out_is_refused(registry: Any, tmp_path: Path) -> None:
    layers = [[symlink("out", str(tmp_path)), file("out/escaped", b"!"), file("../up", b"!")]]
    layout = write_layout(tmp_path / "layout", Image(layers), tag="1")
    ref = registry.push(layout.source, "snap/hostile", "1")
    with pytest.raises(CorruptDataError, match="leads out"):
        unpacked(ref, 1, tmp_path / "tree")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "up").exists()
