"""Through mounts: what counts as a start of an image, and what its hot set holds for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.trace.trace_file import Trace
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher, open_image
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.mount.hotset_replay import replay
from bootseer.imageprefetch.record.trace_store import TraceStore
from tests.support import page_cache
from tests.support.mounts.images import Mounts, Published, mounts_below, publish, some_files

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(16, 100_000)
NAMES = sorted(FILES)
HOT, ODD = NAMES[2:10], NAMES[12]


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def image(own_registry: Any, tmp_path: Path) -> Published:
    return publish(own_registry().reference("counted/image", "1"), FILES, tmp_path / "image")


def start(mounts: Mounts, image: Published, *paths: str, **options: Any) -> str:
    """Mount, read, unmount; returns the hot set that was replayed."""
    mounted = mounts.mount(image.ref, record=True, **options)
    for path in paths:
        assert (Path(mounted.directory) / path).read_bytes() == FILES[path]
    mounts.umount(mounted)
    assert mounts.gone()
    return mounted.hot_set


def built(mounts: Mounts, image: Published, *, push: bool = False) -> str:
    """The digest of the pack that is made of all that is known."""
    cache = str(mounts.cache)
    with open_image(image.ref, cache, push=push) as opened:
        trace = opened.trace()
        assert trace is not None
        with open_fetcher(cache) as fetcher:
            made, _ = store.pack(opened.hot_sets, opened.parts, trace, fetcher, level=3)
        if push:
            store.push(opened.repository, made)
    return made.hot.pack.digest


def kept(mounts: Mounts, image: Published) -> Trace:
    found = TraceStore(ImageCache(str(mounts.cache)).trace_folder(image.digest)).load()
    assert found is not None
    return found


def test_twenty_warm_starts_leave_a_published_hot_set_as_it_was(
    mounts: Mounts, image: Published
) -> None:
    assert start(mounts, image, *HOT, hot=False) == ""
    pack = built(mounts, image, push=True)
    for turn in range(20):
        odd = [ODD] if turn == 7 else []
        assert start(mounts, image, *HOT[turn % 3 :], *odd) == pack
    trace = kept(mounts, image)
    assert trace.starts == 1
    odd_bytes = sum(e.length for e in trace.extents if e.replays_seen and not e.starts_seen)
    assert odd_bytes >= len(FILES[ODD])  # it was seen, and counts for what it is
    assert built(mounts, image) == pack


@pytest.mark.parametrize("loop", [False, True])
def test_a_look_and_a_replay_by_hand_are_no_full_starts(
    mounts: Mounts, image: Published, loop: bool
) -> None:
    start(mounts, image, *HOT, hot=False)
    pack = built(mounts, image, push=True)
    for _ in range(2):
        mounted = mounts.mount(image.ref, record=True, hot=False)
        with open(Path(mounted.directory) / ODD, "rb") as file:
            assert file.read(9) == FILES[ODD][:9]
        mounts.umount(mounted)
        assert mounts.gone()
    mounted = mounts.mount(image.ref, record=True, hot=False, loop=loop)
    places = {"cache": str(mounts.cache), "runtime_dir": str(mounts.runtime)}
    with page_cache.staying():
        replay(image.ref, mounted.directory, **places)
        hot = [Path(mounted.directory) / path for path in HOT]
        with page_cache.held_in_memory(hot, limit_s=0):  # a replay returns when all is there
            for path in (ODD, *HOT):
                assert (Path(mounted.directory) / path).read_bytes() == FILES[path]
    mounts.umount(mounted)
    assert mounts.gone()
    trace = kept(mounts, image)
    assert (trace.starts, trace.replays) == (1, 1)
    again = {
        p
        for e in trace.extents
        if e.replays_seen
        for p in range(e.offset, e.offset + e.length, 4096)
    }
    inside = {image.data_offset(path) // 4096 * 4096 + 8192 for path in HOT}
    assert not again & inside  # what was replayed is no touch
    assert built(mounts, image) == pack
