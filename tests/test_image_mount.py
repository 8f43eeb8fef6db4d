"""Mounting images lazily: the same bytes, one server an image, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_mounts import Mounts, Published, mounts_below, publish, some_files, tree_of

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files()


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    hot = {"": sorted(FILES)[:12], "other": sorted(FILES)[20:25]}
    ref = registry.reference("mounts/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot=hot)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


def test_a_mounted_image_has_the_files_of_the_image(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()
