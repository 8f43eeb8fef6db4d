"""Mounts with hot sets that are most of their image, or nothing like what the start reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import hotset_manifest
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import EMPTY_BYTES, Manifest, digest_of
from bootseer.storage.oci.media_types import OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Repository
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)

FILES = some_files()

NAMES = sorted(FILES)

HOT = {
    "empty": [],
    "random": random.Random(1).sample(NAMES, 12),
    "whole": random.Random(2).sample(NAMES, len(NAMES)),
}


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("whole/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot=HOT)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
@pytest.mark.parametrize("workload", sorted(HOT))
def test_whatever_the_hot_set_the_tree_is_right(mounts: Mounts, image: Published, workload: str):
    mounted = mounts.mount(image.ref, workload=workload)
    assert mounted.hot_set == image.packs[workload]
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_a_hot_set_of_another_image_is_not_used(
    mounts: Mounts, registry: Any, image: Published, tmp_path: Path
):
    other = {path: data[::-1] for path, data in FILES.items()}
    ref = registry.reference("whole/other", "1")
    made = publish(ref, other, tmp_path / "other")
    with open_repository(image.ref)[0] as theirs, open_repository(ref, push=True)[0] as ours:
        found = hotset_manifest.newest(
            theirs.referrers(image.digest), _block(theirs, image), "random"
        )
        manifest = theirs.manifest(found[0])
        assert isinstance(manifest, Manifest)
        foreign = hotset_manifest.parse_manifest(manifest)
        pack = theirs.blob(foreign.pack, limit_bytes=1 << 30)
        ours.push_blob(pack, foreign.pack.digest, len(pack))
        ours.push_blob(EMPTY_BYTES, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))
        # It lies: it says that it is of our block image.
        lie = dataclasses.replace(foreign, workload="", block_image=_block(ours, made))
        subject = ours.resolve(made.digest)
        ours.push_manifest(hotset_manifest.manifest_of(lie, subject), OCI_MANIFEST)
    mounted = mounts.mount(ref)
    assert not mounted.hot_set
    assert any("another block image" in note for note in mounted.notes)
    assert tree_of(mounted.directory) == other
    mounts.umount(mounted)


def _block(repository: Repository, image: Published) -> str:
    (block,) = repository.referrers(image.digest, media_types.BLOCK_IMAGE)
    return block.digest
