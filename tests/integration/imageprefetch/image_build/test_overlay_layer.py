"""A layer of what was changed in an overlay, put over the same image again: the same tree."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.entrypoint.container.root_overlay import mount_root
from bootseer.imageprefetch.image_build.overlay_layer import (
    MEDIA_TYPE,
    Changes,
    LayerFile,
    write_layer,
)
from bootseer.storage.oci.manifest import Descriptor, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import OCI_CONFIG, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.platforms import this_platform
from bootseer.system import mount_calls
from bootseer.system.mountinfo import is_mounted
from tests.support.trees.block_images import built_tree, facts

pytestmark = [pytest.mark.root, pytest.mark.slow]
CAPABILITY = b"\x01\x00\x00\x02\x00\x20\x00\x00" + bytes(12)


def make_lower(place: Path) -> None:
    (place / "a" / "deep").mkdir(parents=True)
    (place / "a" / "deep" / "old").write_bytes(b"old")
    (place / "a" / "gone").write_bytes(b"gone")
    (place / "a" / "kept").write_bytes(b"kept" * 5000)
    (place / "b").mkdir()
    (place / "b" / "x").write_bytes(b"x")
    (place / "c").write_bytes(b"a file")
    (place / "d").mkdir(mode=0o700)
    (place / "link").symlink_to("c")


def change(root: Path) -> None:
    """What installs do, and more."""
    (root / "a" / "gone").unlink()
    (root / "a" / "new").write_bytes(b"new" * 100_000)
    (root / "a" / "deep" / "old").write_bytes(b"changed")
    (root / "b" / "x").unlink()
    (root / "b").rmdir()
    (root / "b").mkdir()  # which hides all that was in it
    (root / "b" / "y").write_bytes(b"y")
    (root / "c").unlink()
    (root / "c").mkdir()
    (root / "c" / "inside").write_bytes(b"now a folder")
    (root / "d").chmod(0o750)
    (root / "empty").mkdir()
    os.link(root / "a" / "new", root / "a" / "twin")
    (root / "a" / "su").write_bytes(b"su")
    os.chown(root / "a" / "su", 1000, 2_000_000)
    (root / "a" / "su").chmod(0o6755)
    os.setxattr(root / "a" / "su", "user.mine", b"\xff\0binary")
    os.setxattr(root / "a" / "new", "security.capability", CAPABILITY)
    os.mkfifo(root / "pipe", 0o600)
    (root / "a" / "l").symlink_to("../c/inside")
    os.utime(root / "a" / "twin", ns=(1, 1_600_000_000_123_456_789))
    (root / "tmp").mkdir()
    (root / "tmp" / "scratch").write_bytes(b"not this")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("root", "again"):
        while is_mounted(str(tmp_path / name)):
            mount_calls.unmount(str(tmp_path / name), lazily=True)


def written(places: Path, leaves_out: Any = lambda path: path == "/tmp") -> LayerFile:
    make_lower(places / "lower")
    upper = mount_root([str(places / "lower")], str(places / "own"), str(places / "root"))
    change(places / "root")
    changes = Changes(upper, str(places / "lower"), leaves_out)
    return write_layer(changes, str(places / "layer.tar.zst"))


def push(registry: Any, name: str, layers: list[tuple[Path, str]]) -> str:
    """An image of layers, given as files with the digests of their tar bytes."""
    ref = f"{registry.host}/layers/{name}:1"
    config = {
        "os": "linux",
        "architecture": this_platform().architecture,
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
    }
    raw = json.dumps(config).encode()
    with open_repository(ref, push=True)[0] as repository:
        repository.push_blob(raw, digest_of(raw), len(raw))
        described = []
        for path, _ in layers:
            digest, size_bytes = digest_of(path.read_bytes()), path.stat().st_size
            repository.push_blob(str(path), digest, size_bytes)
            kind = MEDIA_TYPE if path.suffix == ".zst" else MEDIA_TYPE.removesuffix("+zstd")
            described.append(Descriptor(kind, digest, size_bytes))
        made = manifest_bytes(
            config=Descriptor(OCI_CONFIG, digest_of(raw), len(raw)), layers=described
        )
        repository.push_manifest(made, OCI_MANIFEST, "1")
    return ref


def test_container_programs_unpack_the_same(places: Path, registry: Any, podman: Any) -> None:
    """Podman, of the lower tree as one layer and ours above it."""
    layer = written(places)
    base = places / "base.tar"
    words = ["tar", "--xattrs", "-C", str(places / "lower"), "-cf", str(base), "."]
    subprocess.run(words, check=True)
    stored = [(base, digest_of(base.read_bytes())), (Path(layer.path), layer.diff_id)]
    ref = push(registry, "podman", stored)
    podman.pull(ref)
    with podman.mounted(ref) as theirs:
        assert compare(places / "root", theirs) == []
    assert layer.entries > 15


def test_its_block_image_over_the_same_tree_shows_the_same(places: Path, registry: Any) -> None:
    layer = written(places)
    ref = push(registry, "block", [(Path(layer.path), layer.diff_id)])
    with built_tree(ref, places / "built", for_overlay=True) as tree:
        lowers = [str(tree.root), str(places / "lower")]
        mount_root(lowers, str(places / "own2"), str(places / "again"))
        assert compare(places / "root", places / "again") == []
        mount_calls.unmount(str(places / "again"))


def compare(ours: Path, theirs: Path) -> list[Any]:
    """Differences but for what was left out, the root's own facts, and the times of folders."""
    found = []
    left, right = facts(ours), facts(theirs)
    for path in sorted(left.keys() | right.keys()):
        if path == b"" or path.split(b"/")[0] == b"tmp":
            continue
        one, other = dict(left.get(path, {})), dict(right.get(path, {}))
        unlike = (
            {"links", "mtime_ns"} if stat.S_ISDIR(int(one.get("mode", "0o0"), 8)) else {"links"}
        )
        found += [
            (path, key, one.get(key), other.get(key))
            for key in sorted(one.keys() | other.keys())
            if key not in unlike and one.get(key) != other.get(key)
        ]
    return found


def test_a_folder_in_which_nothing_was_changed_is_no_change(places: Path) -> None:
    """As when a runtime made files there that are left out."""
    make_lower(places / "lower")
    upper = mount_root([str(places / "lower")], str(places / "own"), str(places / "root"))
    (places / "root" / "a" / "deep" / "resolv.conf").write_bytes(b"")
    changes = Changes(upper, str(places / "lower"), lambda path: path.endswith("resolv.conf"))
    assert write_layer(changes, str(places / "layer")).entries == 0
