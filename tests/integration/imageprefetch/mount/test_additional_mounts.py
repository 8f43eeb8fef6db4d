"""Further mounts of an image: their own hot sets are read ahead, and each has its own flags."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.hotset import local_packer
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
from tests.support.page_cache import held_in_memory, share_in_memory
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("docker-registry"),
    pytest.mark.usefixtures("page_cache_stays"),
]

FILES = some_files()
NAMES = sorted(FILES)
DEFAULT, OTHER, OWN, NEVER = NAMES[:6], NAMES[8:13], NAMES[16:20], NAMES[30:]


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("beside/plain", "1")
    hot = {"": DEFAULT, "other": OTHER, "most": NAMES}
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot=hot)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


def all_read_ahead(directory: str, paths: list[str]) -> AbstractContextManager[None]:
    return held_in_memory(Path(directory) / path for path in paths)


def alone(mounts: Mounts) -> None:
    """Wait until the process that read ahead has ended: one server is left."""
    until(lambda: len([name for name in mounts.left() if len(name) == 32]) == 1)


def test_its_published_hot_set_is_read_ahead_and_is_no_touch(
    mounts: Mounts, image: Published
) -> None:
    first = mounts.mount(image.ref, record=True)
    second = mounts.mount(image.ref, workload="other")
    assert second.shared
    with all_read_ahead(second.directory, OTHER + DEFAULT):
        assert not any(share_in_memory(Path(first.directory) / path) for path in NEVER)
        alone(mounts)
        mounts.umount(first)
        assert tree_of(second.directory) == FILES
    mounts.umount(second)
    assert mounts.gone()
    # What `tree_of` read alone: the pages of both hot sets were there.
    trace = TraceStore(ImageCache(str(mounts.cache)).trace_folder(image.digest)).load()
    assert trace is not None
    touched = {p for e in trace.extents for p in range(e.offset, e.offset + e.length, 4096)}
    assert not touched & {image.data_offset(path) // 4096 * 4096 + 8192 for path in OTHER}


def test_what_this_node_made_for_it_is_read_ahead(mounts: Mounts, image: Published) -> None:
    recorded = mounts.mount(
        image.ref, hot=False, record=True, workload="mine", traces=str(mounts.folder / "traces")
    )
    for path in OWN:
        (Path(recorded.directory) / path).read_bytes()
    server = mounts.server()
    mounts.umount(recorded)
    assert mounts.gone()
    local = ImageCache(str(mounts.cache))
    trace = TraceStore(mounts.folder / "traces").load("mine")
    assert trace is not None
    TraceStore(local.trace_folder(image.digest)).replace(trace)
    making = local_packer.PackJob(
        ref=f"{image.ref.rpartition(':')[0]}@{image.digest}",
        digest=image.digest,
        block_image=server.block_image,
        workload="mine",
        cache=str(mounts.cache),
        cache_limit_bytes=1 << 30,
        plain_http=None,
    )
    words = command_for(local_packer.__name__, json.dumps(dataclasses.asdict(making)))
    subprocess.run(words, check=True, timeout=120)
    first = mounts.mount(image.ref)
    assert mounts.mount(image.ref, workload="mine").shared
    with all_read_ahead(first.directory, OWN):
        pass


def test_one_that_names_blocks_alone_is_read_ahead_by_files(
    mounts: Mounts, image: Published
) -> None:
    first = mounts.mount(image.ref)
    mounts.mount(image.ref, workload="most")
    with all_read_ahead(first.directory, NAMES):
        pass


def test_it_keeps_nobody_from_unmounting(mounts: Mounts, own_registry: Any, tmp_path: Path) -> None:
    """The registry is gone in the middle: reading ahead would wait for a minute."""
    registry = own_registry()
    hot = {"other": NAMES[:30]}
    image = publish(registry.reference("beside/gone", "1"), FILES, tmp_path / "image", hot=hot)
    first = mounts.mount(image.ref, workload="none", hot=False)
    second = mounts.mount(image.ref, workload="other")
    registry.stop()
    mounts.umount(first)
    mounts.umount(second)
    assert mounts.gone(60)


@pytest.mark.parametrize("options", [{"workload": "other", "hot": False}, {"workload": ""}])
def test_nothing_is_read_ahead_unasked(
    mounts: Mounts, image: Published, options: dict[str, Any]
) -> None:
    first = mounts.mount(image.ref, hot=False)
    mounts.mount(image.ref, **options)
    alone(mounts)
    assert not any(share_in_memory(Path(first.directory) / path) for path in OTHER)
    assert os.listdir(first.directory)


def flags_of(directory: str) -> set[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4] == directory:
            return set(line.split()[5].split(","))
    raise AssertionError(f"nothing is mounted at {directory}")


def test_setuid_and_devices_work_where_they_are_wanted(mounts: Mounts, image: Published) -> None:
    """Each place has its own say, whoever mounted the image first."""
    for first in (True, False):
        one = mounts.mount(image.ref, nosuid=first)
        other = mounts.mount(image.ref, nosuid=not first)
        assert other.shared
        guarded, free = (one, other) if first else (other, one)
        assert {"ro", "nosuid", "nodev"} <= flags_of(guarded.directory)
        assert "ro" in flags_of(free.directory)
        assert not {"nosuid", "nodev"} & flags_of(free.directory)
        assert tree_of(guarded.directory) == FILES
        mounts.umount(one)
        mounts.umount(other)
        assert mounts.gone()
