"""What a node keeps of mounted images beside their blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_cache import ImageCache
from tests.support.mounts.images import Mounts, mounts_below, publish, some_files, tree_of


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_a_mount_makes_room_and_leaves_who_is_mounted(
    mounts: Mounts, registry: Any, tmp_path: Path
) -> None:
    files = some_files(3, 9_000)
    images = []
    for name in "abc":
        ref = registry.reference(f"kept/{name}", "1")
        images.append(publish(ref, {**files, name: name.encode()}, tmp_path / name))
    store = ImageCache(str(mounts.cache))

    def kept() -> list[bool]:
        return [store.image(image.digest) is not None for image in images]

    stays = mounts.mount(images[0].ref)
    mounts.umount(mounts.mount(images[1].ref))
    for _ in range(1000):
        if kept()[:2] == [True, True]:
            break
        os.sched_yield()
    last = mounts.mount(images[2].ref, kept_limit_bytes=1)
    for _ in range(2000):
        if kept() == [True, False, True]:
            break
        mounts.server()
    assert kept() == [True, False, True]
    assert tree_of(stays.directory) == images[0].files
    assert tree_of(last.directory) == images[2].files
