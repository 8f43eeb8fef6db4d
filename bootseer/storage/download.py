"""A whole object into a local file, by parallel ranges of any store."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bootseer.errors import from_os_error
from bootseer.storage.attempt import Attempt
from bootseer.storage.base import Store
from bootseer.storage.retry import retrying

RETRY_S = 30.0


def download(store: Store, name: str, path: str) -> None:
    """Write the object to the new file `path`. What arrived is not verified here.

    Raises the store's errors, NoSpaceError when the file system cannot hold it; the file is then
    removed.
    """
    size = store.stat(name).size_bytes
    try:
        with _mapped(path, size) as memory:
            _fill(store, name, memory)
    except BaseException as error:  # part of an object must not look like one
        try:
            os.unlink(path)
        except OSError:
            pass  # never made, or already gone
        if isinstance(error, OSError):
            raise from_os_error(error, f"write {path}") from error
        raise


@contextmanager
def _mapped(path: str, size: int) -> Iterator[memoryview]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not size:
            yield memoryview(bytearray())
            return
        os.posix_fallocate(fd, 0, size)  # a full disk is an error here, not a SIGBUS later
        with mmap.mmap(fd, size) as mapped, memoryview(mapped) as memory:
            yield memory
    finally:
        os.close(fd)


def _fill(store: Store, name: str, memory: memoryview) -> None:
    preferred = store.preferred
    ranges = range(0, len(memory), preferred.range_bytes)

    def fetch(offset: int) -> None:
        with memory[offset : offset + preferred.range_bytes] as view:
            retrying(lambda: store.read_scatter(name, offset, [view], Attempt()), retry_s=RETRY_S)

    with ThreadPoolExecutor(min(preferred.streams, len(ranges)) or 1) as pool:
        for _ in pool.map(fetch, ranges):
            pass
