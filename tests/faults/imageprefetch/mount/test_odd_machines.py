"""Mounted images against odds: clocks that jump, caches too small, users without rights."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.storage.oci import media_types
from tests.support import page_cache
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    noise,
    publish,
    some_files,
    tree_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(16, 300_000)
NAMES = sorted(FILES)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def image(own_registry: Any, tmp_path: Path) -> Published:
    ref = own_registry().reference("odds/image", "1")
    return publish(ref, FILES, tmp_path / "image", hot={"": NAMES[:6]})


def test_a_clock_that_jumps_changes_nothing(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock is a fake that jumps by years at every look; the machine's is everybody's."""
    years_s = 5 * 365 * 86_400
    jumps = itertools.cycle((years_s, -years_s, 0))
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + next(jumps) * 1_000_000_000)
    for _ in range(2):
        mounted = mounts.mount(image.ref, record=True, hot=False)
        assert tree_of(mounted.directory) == FILES
        mounts.umount(mounted)
        assert mounts.gone()
    folder = next((mounts.cache / "images").glob("sha256-*"))
    trace = TraceStore(folder / "traces").load("")
    assert trace is not None
    assert trace.starts == 2
    assert all(extent.starts_seen == 2 for extent in trace.extents)


def test_images_share_a_cache_that_is_too_small_for_one(
    mounts: Mounts, own_registry: Any, image: Published, tmp_path: Path
) -> None:
    other_files = {f"o/{path}": noise(len(data), path) for path, data in FILES.items()}
    other = publish(own_registry().reference("odds/other", "1"), other_files, tmp_path / "other")
    limit = {"cache_limit_bytes": 2 << 20, "fill": True}
    first, second = mounts.mount(image.ref, **limit), mounts.mount(other.ref, **limit)
    for _ in range(2):
        assert tree_of(first.directory) == FILES
        assert tree_of(second.directory) == other_files
        page_cache.drop()
    used = sum(path.stat().st_blocks * 512 for path in (mounts.cache / "blocks").rglob("data"))
    assert used <= limit["cache_limit_bytes"] * 1.2


def test_a_read_that_fails_is_told_by_an_event(
    mounts: Mounts, own_registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, events = own_registry(), tmp_path / "events"
    image = publish(registry.reference("odds/bad", "1"), FILES, tmp_path / "bad")
    with registry.blob_path(image.blobs[media_types.DATA]).open("r+b") as file:
        file.write(bytes(1 << 20))
    monkeypatch.setenv("BOOTSEER_EVENTS", str(events))
    mounted = mounts.mount(image.ref, deadline_s=5.0)
    with pytest.raises(OSError, match="Input/output error"):
        tree_of(mounted.directory)

    def faults() -> list[dict[str, Any]]:
        told = [json.loads(line) for p in events.iterdir() for line in p.read_text().splitlines()]
        return [one for one in told if one["name"] == "image.fault"]

    # Of reads that fail at once the first tells; another may be answered before that is written.
    fault = until(faults)[0]
    assert "input/output error" in json.dumps(fault)
    assert image.ref in json.dumps(fault)


def until_kept(cache: Path, size_bytes: int) -> None:
    """Wait until a cache has taken in what was read, which it does behind the readers."""
    until(lambda: sum(p.stat().st_blocks * 512 for p in cache.rglob("data")) >= size_bytes)


def test_a_mount_tells_where_its_bytes_came_from(
    mounts: Mounts, image: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(events))
    size = sum(map(len, FILES.values()))
    hot = sum(len(FILES[name]) for name in NAMES[:6])
    for _ in range(2):
        mounted = mounts.mount(image.ref, record=True, cache=str(tmp_path / "kept"))
        assert tree_of(mounted.directory) == FILES
        until_kept(tmp_path / "kept", size - hot)
        mounts.umount(mounted)
        assert mounts.gone()
    told = [json.loads(line) for p in events.iterdir() for line in p.read_text().splitlines()]
    told.sort(key=lambda one: one["time_unix_nano"])
    mine = [one["attributes"] for one in told if one["name"] == "image.reads"]
    first, second = mine[0], mine[-1]
    prefix = "bootseer.image.bytes."
    came = sum(first[f"{prefix}{kind}"] for kind in ("hot", "cold", "fill"))
    assert first[f"{prefix}hot"] >= hot
    assert size <= came <= size * 1.1
    assert first[f"{prefix}boot"] > 0
    assert first["bootseer.image.demand_misses"] > 0
    assert first["bootseer.image.blocked_s"] > 0
    assert second[f"{prefix}cold"] == 0
    assert second[f"{prefix}cache"] >= size - hot
    names = {one["name"] for one in told}
    assert {"image.mount", "image.replay", "image.reads", "image.record"} <= names


def test_root_without_the_capability_hears_of_the_ways_that_are_left(tmp_path: Path) -> None:
    bound = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    words = [sys.executable, "-m", "bootseer", "image", "mount", "localhost/x", str(tmp_path)]
    environ = {**os.environ, "BOOTSEER_RUNTIME": str(tmp_path / "runtime")}
    done = subprocess.run([*bound, *words], capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == NotSupportedError.exit_code
    assert "bootseer image files" in done.stderr
    assert not (tmp_path / "runtime").exists()
