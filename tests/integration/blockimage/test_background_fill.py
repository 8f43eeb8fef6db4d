"""The background fill of an image that is mounted."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_cache import ImageCache
from tests.support.mounts.images import mounts_below, publish, some_files


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_a_server_holds_the_images_turn(registry: Any, tmp_path: Path) -> None:
    with mounts_below(tmp_path) as mounts:
        ref = registry.reference("fill/turn", "1")
        image = publish(ref, some_files(4, 50_000), tmp_path / "image")
        mounts.mount(image.ref, fill=True)
        lock = Path(ImageCache(str(mounts.cache)).fill_lock(image.digest))
        for _ in range(2000):
            if lock.exists():
                with lock.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return
            threading.Event().wait(0.01)
    raise AssertionError("nobody holds it")
