"""Reads of a `--rw` mount that meet a rename of their file: they have its bytes, or an error."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import DeadlineError, NotFoundError
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Stat
from bootseer.stripedfs.mount.open_files import Complaints, OpenFiles
from bootseer.stripedfs.mount.write_tree import WritableTree
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.open import open_file
from tests.support.faulty_store import WrappedStore
from tests.support.mounts.checkpoints import (
    CHUNK,
    SMALL,
    content,
    put_bytes,
    served,
    store_of,
    tree_at,
)
from tests.support.mounts.fuse import in_time, mounted, refusal
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

STRIPED = 8 * CHUNK + 55
T = TypeVar("T")


class HeldStore(WrappedStore):
    """A FAKE store, for fault injection: holds renames once they are done, or reads before."""

    def __init__(self, root: Path) -> None:
        super().__init__(store_of(root))
        self.renaming, self.renamed = threading.Event(), threading.Event()
        self.renaming.set()
        self.reading, self.begun = threading.Event(), threading.Event()
        self.reading.set()
        self.silent = ""
        """The beginning of the names whose reads get no answer in time."""
        self.lost: list[str] = []
        """What was asked for under a name that it has no more."""

    def let_all_go(self) -> None:
        self.renaming.set()
        self.reading.set()

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)
        self.renamed.set()
        assert self.renaming.wait(60)

    def local_path(self, name: str) -> str | None:
        return None  # all that is read comes through here

    def stat(self, name: str) -> Stat:
        return self._noted(name, lambda: self.inner.stat(name))

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        self._hold(name)
        self._noted(name, lambda: self.inner.read_range(name, offset, buffer))

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._hold(name)
        self._noted(name, lambda: self.inner.read_scatter(name, offset, buffers, attempt, filled))

    def _hold(self, name: str) -> None:
        self.begun.set()
        if self.silent and name.startswith(self.silent):
            raise DeadlineError(f"{name} did not answer")
        assert self.reading.wait(60)

    def _noted(self, name: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except NotFoundError:
            self.lost.append(name)
            raise


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    return HeldStore(tmp_path / "store")


@pytest.fixture
def mount(store: HeldStore, tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    with Fetcher() as fetcher:
        tree = tree_at(WritableTree, store, "", fetcher, writing=SMALL)
        with mounted(tree, tmp_path / "mnt", read_only=False) as (directory, faults):
            yield directory, faults


@pytest.fixture
def pool(store: HeldStore) -> Iterator[ThreadPoolExecutor]:
    """Threads of this process's mount namespace; none of them hangs once the test has failed."""
    with ThreadPoolExecutor(2) as pool:
        try:
            yield pool
        finally:
            store.let_all_go()


def opened(directory: Path, size: int) -> int:
    """A file of `size` bytes, opened and not read."""
    (directory / "f").mkdir()
    (directory / "f" / "x").write_bytes(content(size))
    return os.open(directory / "f" / "x", os.O_RDONLY)


@pytest.mark.parametrize("what", ["f", "f/x"])
@pytest.mark.parametrize("size", [3, 400_000, STRIPED])
def test_a_read_during_a_rename_waits_for_its_end(
    store: HeldStore,
    mount: tuple[Path, list[str]],
    pool: ThreadPoolExecutor,
    size: int,
    what: str,
) -> None:
    """The store has renamed it, and the mount does not know where it lies now."""
    directory, faults = mount
    file = in_time(lambda: opened(directory, size))
    store.lost.clear()
    store.renamed.clear()
    store.renaming.clear()
    renaming = pool.submit(os.rename, directory / what, directory / "g")
    assert store.renamed.wait(60)
    reading = pool.submit(os.pread, file, size, 0)
    until(lambda: store.lost or reading.done())
    assert store.lost
    store.renaming.set()
    renaming.result(60)
    assert reading.result(60) == content(size)
    assert faults == []
    os.close(file)


@pytest.mark.parametrize("size", [3, 400_000, STRIPED])
def test_a_read_that_began_before_a_rename_ends_after_it(
    store: HeldStore, mount: tuple[Path, list[str]], pool: ThreadPoolExecutor, size: int
) -> None:
    directory, faults = mount
    file = in_time(lambda: opened(directory, size))
    store.lost.clear()
    store.begun.clear()
    store.reading.clear()
    reading = pool.submit(os.pread, file, size, 0)
    assert store.begun.wait(60)
    pool.submit(os.rename, directory / "f", directory / "g").result(60)
    store.reading.set()
    assert reading.result(60) == content(size)
    assert store.lost
    assert faults == []
    os.close(file)


def test_an_outage_is_told_though_a_rename_hangs(
    store: HeldStore, mount: tuple[Path, list[str]], pool: ThreadPoolExecutor
) -> None:
    """As found: reads of all files waited for the rename, however long it took."""
    directory, _ = mount

    def prepare() -> int:
        (directory / "other").write_bytes(b"x" * 400_000)
        (directory / "mine").write_bytes(b"y" * 400_000)
        return os.open(directory / "mine", os.O_RDONLY)

    file = in_time(prepare)
    store.silent = "mine"
    store.renamed.clear()
    store.renaming.clear()
    renaming = pool.submit(os.rename, directory / "other", directory / "new")
    assert store.renamed.wait(60)
    reading = pool.submit(lambda: refusal(lambda: os.pread(file, 400_000, 0)))
    assert reading.result(60) == errno.EIO
    assert not renaming.done()
    store.renaming.set()
    renaming.result(60)
    os.close(file)


def test_what_waits_for_a_rename_waits_for_no_later_one() -> None:
    told = threading.Event()
    with Fetcher() as fetcher, contextlib.ExitStack() as later:
        files = OpenFiles(fetcher, Complaints(None))
        with files.moves():
            met = files.renames()
            later.enter_context(files.moves())
            assert files.await_end(met, told.set)
            assert not told.is_set()
        assert told.wait(60)
        assert not files.await_end(met, told.clear)
        assert files.renames()
        files.close()


def test_what_is_outdated_stays_with_its_bytes_when_its_place_is_moved(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    for name in ("mine", "other"):
        put_bytes(store, name, content(400, len(name)), tmp_path)
    mine, other = (open_file(store, namespace.look_up(store, name)) for name in ("mine", "other"))
    with Fetcher() as fetcher:
        files = OpenFiles(fetcher, Complaints(None))
        handle = files.add(mine, "mine", "place")
        files.outdate("place")
        files.move("place", other, "other")
        assert files.drop(handle) is mine
        files.close()


def test_a_new_worker_reads_on_what_kept_its_name_and_nothing_else(tmp_path: Path) -> None:
    """It knows no inodes that the one before gave away itself; each name is found again."""
    root = tmp_path / "store"
    for name in ("kept", "moved", "below/x"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(name.encode() * 100)
    with served(root, tmp_path / "mnt", writable=True) as mount:
        directory = mount.directory

        def prepare() -> dict[str, int]:
            (directory / "saved").write_bytes(b"saved" * 100)
            names = ("kept", "moved", "below/x", "saved")
            files = {name: os.open(directory / name, os.O_RDONLY) for name in names}
            (directory / "moved").rename(directory / "new")
            (directory / "moved").write_bytes(b"other" * 100)
            (directory / "below").rename(directory / "above")
            return files

        files = in_time(prepare)
        (worker,) = mount.workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: worker not in mount.workers())
        assert in_time(lambda: os.pread(files["kept"], 400, 0)) == b"kept" * 100
        for name in ("moved", "below/x", "saved"):
            assert refusal(lambda name=name: os.pread(files[name], 9, 0)) == errno.ESTALE
        for name, there in {"new": "moved", "above/x": "below/x", "saved": "saved"}.items():
            assert in_time((directory / name).read_bytes) == there.encode() * 100
        for file in files.values():
            os.close(file)
