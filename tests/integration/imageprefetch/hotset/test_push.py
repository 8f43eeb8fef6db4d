"""Hot sets published by several nodes: every start counts once, and the newest is the newest."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import hotset_manifest
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.imageprefetch import block_image_repo
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.image_hotsets import (
    RecordedImage,
    add_carried,
    open_fetcher,
    open_image,
)
from bootseer.imageprefetch.hotset.store import BuiltHotSet
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import Descriptor, Manifest, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from tests.support.mounts.images import Published, publish, some_files

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(6, 40_000)
PAGE = 4096
P, Q, R = 0, 8, 16


@pytest.fixture
def image(own_registry: Any, tmp_path: Path) -> Published:
    return publish(own_registry().reference("pushed/image", "1"), FILES, tmp_path / "image")


class Node:
    """One node's cache; starts are added as mounts do."""

    def __init__(self, cache: Path, ref: str) -> None:
        self.cache, self.ref = str(cache), ref

    def start(self, *pages: int) -> None:
        with open_image(self.ref, self.cache) as image:
            image.traces.add(self._trace(image, pages))

    def _trace(self, image: RecordedImage, pages: tuple[int, ...]) -> Trace:
        touched = tuple(Touched(page * PAGE, PAGE, 100 * n, 1) for n, page in enumerate(pages))
        source = image.parts.source
        return Trace(source.key, source.size_bytes, "", 1, touched)

    def build(self, *, push: bool = True) -> dict[int, int]:
        """Build and push; returns how many of the starts touched each page."""
        with open_image(self.ref, self.cache, push=True) as image:
            own, trace = image.own_trace(), image.trace()
            assert trace is not None
            with open_fetcher(self.cache) as fetcher:
                made, _ = store.pack(image.hot_sets, image.parts, trace, fetcher, level=1, own=own)
            if push:
                image.publish(made)
        self.starts = trace.starts
        return {
            page // PAGE: e.starts_seen
            for e in trace.extents
            for page in range(e.offset, e.offset + e.length, PAGE)
        }

    def push(self) -> BuiltHotSet:
        with open_image(self.ref, self.cache, push=True) as image:
            made = image.hot_sets.load()
            assert made is not None
            return image.publish(made)

    def published(self) -> list[tuple[Descriptor, hotset_manifest.HotSet]]:
        with open_image(self.ref, self.cache) as image:
            return store.list_published(image.repository, image.digest)


def test_a_start_counts_once_however_often_its_node_pushes(
    image: Published, tmp_path: Path
) -> None:
    one, other = Node(tmp_path / "a", image.ref), Node(tmp_path / "b", image.ref)
    one.start(P)
    other.start(Q)
    other.build()
    for _ in range(3):
        assert one.build() == {P: 1, Q: 1}
        assert one.starts == 2
    one.start(P, R)  # what is new counts, once too
    for _ in range(2):
        assert one.build() == {P: 2, Q: 1, R: 1}
        assert other.build() == {P: 2, Q: 1, R: 1}
        assert (one.starts, other.starts) == (3, 3)
    other.start(P)
    assert other.build() == {P: 3, Q: 1, R: 1}
    assert one.build(push=False) == {P: 3, Q: 1, R: 1}


def test_what_another_node_published_over_ours_is_merged_in_again(
    image: Published, tmp_path: Path
) -> None:
    one, other = Node(tmp_path / "a", image.ref), Node(tmp_path / "b", image.ref)
    one.start(P)
    other.start(Q)
    other.build(push=False)  # it does not know yet what comes before its push
    one.build()
    other.push()
    assert one.build() == {P: 1, Q: 1}
    assert one.starts == 2


def test_a_trace_that_was_begun_anew_counts_whole(image: Published, tmp_path: Path) -> None:
    one, other = Node(tmp_path / "a", image.ref), Node(tmp_path / "b", image.ref)
    one.start(P)
    one.start(P)
    one.build()
    other.start(Q)
    other.build()
    with open_image(image.ref, one.cache) as opened:
        opened.traces.path().write_bytes(b"damaged")
    assert one.build(push=False) == {P: 2, Q: 1}
    one.start(R)
    assert one.build() == {P: 2, Q: 1, R: 1}
    assert one.starts == 4
    with open_image(image.ref, one.cache) as opened:
        opened.traces.path().with_suffix(".pushed").write_bytes(b"damaged")
    assert one.build() == {P: 2, Q: 1, R: 1}


def test_what_was_merged_here_by_hand_is_not_counted_again(
    image: Published, tmp_path: Path
) -> None:
    one, other = Node(tmp_path / "a", image.ref), Node(tmp_path / "b", image.ref)
    one.start(P)
    other.start(Q)
    other.build()
    with open_image(image.ref, one.cache) as opened:
        found = opened.trace()
        assert found is not None
        opened.keep_trace(found)
    other.start(Q)
    other.build()
    assert one.build() == {P: 1, Q: 2}
    assert one.starts == 3


def test_what_was_carried_over_counts_once(image: Published, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image.ref)
    node.start(P, Q)
    with open_image(image.ref, node.cache) as opened:
        carried = opened.own_trace()
        assert carried is not None
    known = add_carried(None, carried)
    assert add_carried(known, carried).starts == 1
    assert add_carried(dataclasses.replace(known, extents=()), carried).starts == 2


def shifted(days: float) -> str:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@pytest.mark.parametrize("days", [0.5, 900])
def test_what_is_pushed_is_the_newest_though_a_clock_was_ahead(
    image: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    """The clock of the first node is a fake that is ahead; the machine's is everybody's."""
    one, other = Node(tmp_path / "a", image.ref), Node(tmp_path / "b", image.ref)
    one.start(P)
    with monkeypatch.context() as patched:
        patched.setattr(hotset_manifest, "now", lambda: shifted(days))
        one.build()
    assert len(one.published()) == 1
    assert one.published()[0][1].created > shifted(0.4)
    for pages in ((Q,), (Q, R)):
        other.start(*pages)
        other.build()
        made = other.push()  # again, which changes nothing
        newest, hot = other.published()[0]
        assert (newest.digest, hot.created) == (made.digest, made.hot.created)
        assert hot.created < shifted(1)
        with open_image(image.ref, other.cache) as opened:
            listed = opened.repository.referrers(opened.digest)
            found = hotset_manifest.choose(opened.repository, listed, opened.parts.block_image)
        assert found is not None
        assert found[0].digest == made.digest
    assert len(other.published()) == 3


def test_moments_that_are_none_are_the_oldest() -> None:
    moments = ["9999", shifted(2), "", "2020-01-01T00:00:00Z", hotset_manifest.now(), shifted(0.5)]
    assert hotset_manifest.age(shifted(0.9)) > max(map(hotset_manifest.age, moments))
    after = hotset_manifest.moment_after(moments)
    assert (
        max(map(hotset_manifest.age, moments))
        < hotset_manifest.age(after)
        < hotset_manifest.age(shifted(0.6))
    )
    assert hotset_manifest.now() <= hotset_manifest.moment_after([]) < shifted(0.1)


def of_kind(kind: str, name: bytes, **annotations: str) -> Descriptor:
    return Descriptor("application/json", digest_of(name), 1, annotations, kind)


@pytest.mark.parametrize("bare", [False, True])
def test_of_two_block_images_the_one_with_hot_sets_is_taken(bare: bool) -> None:
    """The repository is a fake that only tells what the list leaves out."""
    blocks = sorted(
        (of_kind(media_types.BLOCK_IMAGE, bytes([n])) for n in range(3)),
        key=lambda b: b.digest,
    )
    told = {media_types.BLOCK_IMAGE_NOTE: blocks[2].digest, media_types.WORKLOAD_NOTE: "train"}
    hot = dataclasses.replace(of_kind(media_types.HOT_SET, b"hot"), annotations=told)

    class Telling:
        def manifest(self, descriptor: Descriptor) -> Descriptor:
            return hot if descriptor.digest == hot.digest else descriptor

    listed = dataclasses.replace(hot, annotations={}, artifact_type="") if bare else hot
    for some in itertools.permutations([*blocks, listed]):
        found = block_image_repo.find_block_image(Telling(), some)  # type: ignore[arg-type]
        assert found == blocks[2]
    for some in itertools.permutations(blocks):
        assert block_image_repo.find_block_image(Telling(), some) == blocks[0]  # type: ignore[arg-type]
    assert block_image_repo.find_block_image(Telling(), [listed]) is None  # type: ignore[arg-type]


def test_a_second_block_image_takes_nobodys_hot_set_away(image: Published, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image.ref)
    node.start(P)
    node.build()
    for number in range(3):  # of which some have lower digests
        with open_repository(image.ref, push=True)[0] as repository:
            listed = repository.referrers(image.digest, media_types.BLOCK_IMAGE)
            first = repository.manifest(listed[0])
            assert isinstance(first, Manifest)
            assert first.subject is not None
            again = manifest_bytes(
                config=first.config,
                layers=first.layers,
                subject=first.subject,
                artifact_type=media_types.BLOCK_IMAGE,
                annotations={"made": f"by another zstd, {number}"},
            )
            repository.push_manifest(again, OCI_MANIFEST)
        assert node.build(push=False) == {P: 1}
    assert len(node.published()) == 1
    with open_image(image.ref, str(tmp_path / "b")) as opened:
        assert opened.parts.block_image == node.published()[0][1].block_image
