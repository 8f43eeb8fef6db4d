"""What the agent publishes of recorded starts, and when it publishes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.image_hotsets import open_image
from bootseer.imageprefetch.hotset.publication import publish_recorded
from tests.support.mounts.images import Mounts, Published, mounts_below, publish, some_files

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(16, 100_000)
NAMES = sorted(FILES)
HOT, OTHER = NAMES[2:10], NAMES[12]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Mounts, Mounts]]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with mounts_below(tmp_path / "one") as one, mounts_below(tmp_path / "two") as two:
        yield one, two


@pytest.fixture
def image(own_registry: Any, tmp_path: Path) -> Published:
    return publish(own_registry().reference("published/image", "1"), FILES, tmp_path / "image")


def start(node: Mounts, image: Published, *paths: str) -> str:
    """Mount, read, unmount; returns the hot set that was replayed."""
    mounted = node.mount(image.ref, record=True)
    for path in paths:
        assert (Path(mounted.directory) / path).read_bytes() == FILES[path]
    node.umount(mounted)
    assert node.gone()
    return mounted.hot_set


def published(node: Mounts, image: Published) -> list[int]:
    """The packed bytes of each published hot set, the newest first."""
    with open_image(image.ref, str(node.cache)) as opened:
        digest, block_image = opened.digest, opened.parts.block_image
        found = store.list_published(opened.repository, digest, block_image)
        return [hot.pack.size_bytes for _, hot in found]


def test_the_first_node_publishes_for_all_others(
    nodes: tuple[Mounts, Mounts], image: Published, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = nodes
    assert start(one, image, *HOT) == ""
    assert published(one, image) == []
    publish_recorded(str(one.cache), False)
    (size_bytes,) = published(one, image)
    assert size_bytes >= len(HOT) * 100_000
    publish_recorded(str(one.cache), False)
    assert start(two, image, *HOT) != ""
    publish_recorded(str(two.cache), False)
    assert published(two, image) == [size_bytes]
    assert capfd.readouterr().err == ""


def test_what_nobody_has_published_is_published_too(
    nodes: tuple[Mounts, Mounts], image: Published
) -> None:
    one, two = nodes
    start(one, image, *HOT)
    start(two, image, *HOT, OTHER)
    publish_recorded(str(one.cache), False)
    publish_recorded(str(two.cache), False)
    newest, oldest = published(two, image)
    assert newest >= oldest + 100_000


def test_a_registry_that_is_away_is_told(
    own_registry: Any,
    nodes: tuple[Mounts, Mounts],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    registry = own_registry()
    image = publish(registry.reference("published/image", "1"), FILES, tmp_path / "image")
    start(nodes[0], image, *HOT)
    registry.stop()
    publish_recorded(str(nodes[0].cache), False)
    said = capfd.readouterr().err
    assert said.startswith(f"bootseer: no hot set of {image.ref} is published: ")
    publish_recorded(str(tmp_path / "nowhere"), False)
    assert capfd.readouterr().err == ""
