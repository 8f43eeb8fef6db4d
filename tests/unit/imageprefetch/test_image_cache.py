"""What a node keeps of images beside their blocks: bounded, and never taken from who uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_cache import FRESH_S, ImageCache, KeptImage
from bootseer.imageprefetch.mount import server_registry

DIGESTS = [f"sha256:{letter * 64}" for letter in "abcd"]
SIZE = 100_000


@pytest.fixture
def store(tmp_path: Path) -> ImageCache:
    """Four images of `SIZE` bytes and a little, the first one mounted longest ago."""
    made = ImageCache(str(tmp_path))
    now = os.stat(tmp_path).st_mtime
    for number, digest in enumerate(DIGESTS):
        made.keep(digest, "meta", digest, b"m" * (SIZE // 2))
        own = Path(made.own_hot_set_folder(digest), "_default")
        own.mkdir(parents=True)
        (own / "pack-1").write_bytes(b"p" * (SIZE // 2))
        built = Path(made.folder_of(digest), "hotsets", "_default")
        built.mkdir(parents=True)
        (built / "pack-1").write_bytes(b"p" * SIZE)
        os.makedirs(made.trace_folder(digest))
        made.keep_image(digest, KeptImage("x", "x", 1, digest, digest))
        os.utime(os.path.join(made.folder_of(digest), "image.json"), (now, now - 100 + number))
    return made


def there(store: ImageCache) -> list[bool]:
    return [store.image(digest) is not None for digest in DIGESTS]


def test_the_least_recently_mounted_go_first(store: ImageCache) -> None:
    store.expire(limit_bytes=5 * SIZE)
    assert there(store) == [True] * 4
    store.mark_used(DIGESTS[0])
    store.expire(limit_bytes=int(2.5 * SIZE))
    assert there(store) == [True, False, False, True]
    assert sorted(os.listdir(store.folder_of(DIGESTS[1]))) == ["hotsets", "traces"]
    assert os.listdir(os.path.join(store.folder_of(DIGESTS[1]), "hotsets/_default"))


def test_an_image_mounted_before_the_clock_was_set_is_not_old(store: ImageCache) -> None:
    for digest, mounted in zip(DIGESTS[:2], (1000.0, 1.6e9), strict=True):
        os.utime(os.path.join(store.folder_of(digest), "image.json"), (mounted, mounted))
    store.expire()
    assert there(store) == [True, False, True, True]
    store.expire(limit_bytes=int(1.5 * SIZE))  # it counts as mounted at the first right time
    assert there(store) == [True, False, False, False]


def test_what_is_mounted_or_being_mounted_stays(store: ImageCache, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "run")
    os.mkdir(tmp_path / "run/images")

    def unused(digest: str) -> Any:
        return server_registry.lock_if_unused(str(tmp_path / "run"), digest)

    with server_registry.lock_image(str(tmp_path / "run"), DIGESTS[1]):
        store.expire([DIGESTS[0]], limit_bytes=0, lock_unused=unused)
    assert there(store) == [True, True, False, False]
    store.expire([DIGESTS[0]], limit_bytes=0, lock_unused=unused)
    assert there(store) == [True, False, False, False]


def test_what_cannot_be_removed_keeps_nothing_else(store: ImageCache) -> None:
    @contextmanager
    def broken(digest: str) -> Iterator[bool]:
        if digest == DIGESTS[0]:
            raise PermissionError
        yield True

    store.expire(limit_bytes=int(1.5 * SIZE), lock_unused=broken)
    assert there(store) == [True, False, False, False]


def test_what_the_registry_said_is_fresh_for_an_hour(store: ImageCache) -> None:
    assert not store.is_fresh(DIGESTS[0], "w")
    store.mark_asked(DIGESTS[0], "w")
    (asked,) = Path(store.folder_of(DIGESTS[0])).glob("asked-*")
    assert store.is_fresh(DIGESTS[0], "w")
    assert not store.is_fresh(DIGESTS[0], "another")
    assert not store.is_fresh(DIGESTS[1], "w")
    said_s = asked.stat().st_mtime
    os.utime(asked, (said_s, said_s - FRESH_S))
    assert not store.is_fresh(DIGESTS[0], "w")
    os.utime(asked, (said_s, said_s + FRESH_S))  # the clock was set back since
    assert not store.is_fresh(DIGESTS[0], "w")
    store.mark_asked(DIGESTS[0], "w")
    assert store.is_fresh(DIGESTS[0], "w")
    store.forget_asked(DIGESTS[0], "w")
    assert not store.is_fresh(DIGESTS[0], "w")
