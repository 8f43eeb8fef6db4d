"""Hot sets that a node makes for itself: used at its next mount, right or not at all."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.trace import trace_file as traces
from bootseer.imageprefetch.hotset import local_hotsets, local_packer
from bootseer.imageprefetch.hotset.local_hotsets import LocalHotSet
from bootseer.imageprefetch.hotset.local_packer import PackJob
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.system.child_processes import command_for
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files()
HOT = sorted(FILES)[3:12]


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    hot = {"": sorted(FILES)[20:25]}
    ref = registry.reference("own/published", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot=hot)


def making(mounts: Mounts, image: Published, workload: str = "") -> PackJob:
    local = ImageCache(str(mounts.cache))
    kept = local.image(image.digest)
    return PackJob(
        ref=f"{image.ref.rpartition(':')[0]}@{image.digest}",
        digest=image.digest,
        block_image=kept.block_image if kept else "",
        workload=workload,
        cache=str(mounts.cache),
        cache_limit_bytes=1 << 30,
        plain_http=None,
    )


def make(job: PackJob) -> bool:
    """Have it made by its process, as mounts do: threads of ours would be in mounting's way."""
    folder = Path(ImageCache(job.cache).folder_of(job.digest), "own", job.workload)
    told = folder / "manifest.json"
    before = told.read_bytes() if told.exists() else b""
    words = command_for(local_packer.__name__, json.dumps(dataclasses.asdict(job)))
    subprocess.run(words, check=True, timeout=120)
    try:
        return told.read_bytes() != before
    except FileNotFoundError:
        return False


def found(mounts: Mounts, image: Published, workload: str = "") -> LocalHotSet | None:
    job = making(mounts, image, workload)
    return local_hotsets.find(ImageCache(job.cache), job.digest, workload, job.block_image)


def start(mounts: Mounts, image: Published, *paths: str, workload: str = "") -> str:
    """Mount, read these files, unmount; returns the hot set that was replayed."""
    mounted = mounts.mount(image.ref, record=True, workload=workload)
    for path in paths:
        assert (Path(mounted.directory) / path).read_bytes() == FILES[path]
    mounts.umount(mounted)
    assert mounts.gone()
    return mounted.hot_set


def packed(mounts: Mounts, image: Published, workload: str = "") -> LocalHotSet:
    """What the process that a server left behind makes."""
    for _ in range(9000):
        kept = found(mounts, image, workload)
        if kept is not None:
            return kept
        threading.Event().wait(0.01)
    raise AssertionError(f"nothing was packed: {mounts.log}")


def test_the_next_start_here_is_replayed_though_nobody_pushed(
    mounts: Mounts, own_registry: Any, tmp_path: Path
) -> None:
    registry = own_registry()
    image = publish(registry.reference("own/plain", "1"), FILES, tmp_path / "image")
    assert start(mounts, image, *HOT) == ""
    kept = packed(mounts, image)
    shutil.rmtree(mounts.cache / "blocks", ignore_errors=True)
    assert start(mounts, image) == kept.pack.digest
    shutil.rmtree(mounts.cache / "blocks", ignore_errors=True)
    registry.stop()  # so nothing but the pack has the bytes
    mounted = mounts.mount(image.ref)
    assert mounted.offline
    assert mounted.hot_set == kept.pack.digest
    for path in HOT:
        assert (Path(mounted.directory) / path).read_bytes() == FILES[path]


def test_a_workload_of_its_own_goes_before_the_published_default(
    mounts: Mounts, image: Published
) -> None:
    trace = full_trace(mounts, image, HOT, "mine")
    assert start(mounts, image, workload="mine") == image.packs[""]
    TraceStore(trace_folder(mounts, image)).replace(trace)
    assert make(making(mounts, image, "mine"))
    own = packed(mounts, image, "mine")
    assert start(mounts, image, *HOT, workload="mine") == own.pack.digest
    assert start(mounts, image) == image.packs[""]
    assert not local_packer.is_due(making(mounts, image, "mine"), trace)


def trace_folder(mounts: Mounts, image: Published) -> str:
    return ImageCache(str(mounts.cache)).trace_folder(image.digest)


def full_trace(
    mounts: Mounts, image: Published, paths: list[str], workload: str = ""
) -> traces.Trace:
    """What a cold start that reads these files leaves."""
    folder = mounts.folder / "traces"
    mounted = mounts.mount(image.ref, record=True, hot=False, workload=workload, traces=str(folder))
    for path in paths:
        (Path(mounted.directory) / path).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    trace = TraceStore(folder).load(workload)
    assert trace is not None
    return trace


def test_a_published_hot_set_stays_the_one_that_is_used(mounts: Mounts, image: Published) -> None:
    start(mounts, image, *HOT)
    assert start(mounts, image, *HOT) == image.packs[""]
    assert not list(mounts.cache.glob("images/*/own"))


@pytest.mark.parametrize("part", ["boot", "frame", "cut", "manifest"])
def test_a_damaged_pack_gives_no_wrong_byte(mounts: Mounts, image: Published, part: str) -> None:
    trace = full_trace(mounts, image, HOT, "mine")
    TraceStore(trace_folder(mounts, image)).replace(trace)
    assert make(making(mounts, image, "mine"))
    path = Path(packed(mounts, image, "mine").path)
    raw = bytearray(path.read_bytes())
    if part == "boot":
        raw[100] ^= 1
    elif part == "frame":
        raw[-100] ^= 1
    elif part == "cut":
        del raw[-1]
    else:
        (path.parent / "manifest.json").write_text("{}")
    path.write_bytes(raw)
    mounted = mounts.mount(image.ref, workload="mine")
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()
    assert local_packer.is_due(making(mounts, image, "mine"), trace) == (part != "boot")


def test_it_is_made_anew_when_starts_read_more(mounts: Mounts, image: Published) -> None:
    trace = full_trace(mounts, image, HOT[:4], "mine")
    store = TraceStore(trace_folder(mounts, image))
    store.replace(trace)
    assert make(making(mounts, image, "mine"))
    before = packed(mounts, image, "mine")
    assert not make(making(mounts, image, "mine"))
    for _ in range(3):  # what a single replayed start reads beside may be chance
        start(mounts, image, *HOT, workload="mine")
    for _ in range(9000):
        after = found(mounts, image, "mine")
        if after is not None and after.pack.digest != before.pack.digest:
            break
        threading.Event().wait(0.01)
    else:
        raise AssertionError("it was not made anew")
    assert after.pack.size_bytes > 2 * before.pack.size_bytes
    until(lambda: not Path(before.path).exists())


def test_neither_another_block_image_nor_a_replayed_start_alone_makes_one(
    mounts: Mounts, image: Published
) -> None:
    trace = full_trace(mounts, image, HOT, "mine")
    job = making(mounts, image, "mine")
    assert not local_packer.is_due(job, dataclasses.replace(trace, starts=0))
    assert local_packer.is_due(job, trace)
    TraceStore(trace_folder(mounts, image)).replace(trace)
    assert not make(dataclasses.replace(job, block_image=f"sha256:{'0' * 64}"))
    left = mounts.cache.joinpath("images", image.digest.replace(":", "-"), "own/mine/.x.tmp")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of one that was killed")
    assert make(job)
    assert not left.exists()
    other = f"sha256:{'0' * 64}"
    assert local_hotsets.find(ImageCache(job.cache), job.digest, "mine", other) is None
