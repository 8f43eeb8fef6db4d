"""The file object: Python's rules for files, threads, forks and pickles."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import (
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.stripedfs import file as file_module
from bootseer.stripedfs import shared_fetcher
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.new_bytes import NewBytes
from bootseer.stripedfs.read.sources import open_plain_file
from tests.support.examples import examples
from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, store_of
from tests.support.mounts.fuse import in_time

SIZE = 9 * CHUNK + 123


IMPATIENT = StoreOptions(retry_s=0.1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE), tmp_path)
    return f"file://{tmp_path}/store/ckpt"


@pytest.fixture
def file(url: str) -> Iterator[StripedFile]:
    with stripedfs.open(url) as file:
        yield file


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(-1, 3 * CHUNK)),
            st.tuples(st.just("readinto"), st.integers(0, 3 * CHUNK)),
            st.tuples(st.just("seek"), st.integers(0, SIZE + CHUNK)),
            st.tuples(st.just("from_end"), st.integers(-SIZE, CHUNK)),
            st.tuples(st.just("line"), st.integers(-1, 500)),
        ),
        max_size=12,
    )
)
def test_it_behaves_as_a_file_of_these_bytes(
    file: StripedFile, steps: list[tuple[str, int]]
) -> None:
    model = io.BytesIO(content(SIZE))
    file.seek(0)
    for what, number in steps:
        for_each = []
        for each in (file, model):
            if what == "read":
                for_each.append(each.read(number))
            elif what == "readinto":
                buffer = bytearray(number)
                count = each.readinto(buffer)
                for_each.append(bytes(buffer[:count]))
            elif what == "seek":
                for_each.append(each.seek(number))
            elif what == "from_end":
                for_each.append(each.seek(number, os.SEEK_END))
            else:
                for_each.append(each.readline(number))
        assert for_each[0] == for_each[1]
        assert file.tell() == model.tell()


def test_it_tells_what_it_is(file: StripedFile, url: str) -> None:
    assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    assert file.size == SIZE
    assert (file.mode, file.name) == ("rb", url)
    with pytest.raises(io.UnsupportedOperation):
        file.write(b"x")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="before"):
        file.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        file.seek(0, 7)
    with pytest.raises(ValueError, match="no byte"):
        file.read_at(-1, bytearray(1))


def test_a_closed_file_refuses(url: str) -> None:
    file = stripedfs.open(url)
    file.close()
    file.close()
    for call in (file.read, file.tell, lambda: file.seek(0), lambda: file.read_at(0, bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            call()
    ended = stripedfs.open(url)
    ended.seek(SIZE)
    ended.close()
    for call in (ended.read, ended.readall, ended.peek, lambda: ended.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("size", [1, 40 << 10, 3 * CHUNK])
@pytest.mark.parametrize("cold", [True, False])
def test_memory_that_may_not_be_written_to_is_refused(
    file: StripedFile, size: int, cold: bool
) -> None:
    if not cold:
        file.read()
        file.seek(0)
    never = bytes(size)
    for call in (lambda: file.readinto(never), lambda: file.read_at(0, memoryview(never))):
        with pytest.raises(TypeError, match="read-only"):
            in_time(call)
    assert never == bytes(size)
    assert in_time(lambda: file.read(size)) == content(SIZE)[:size]


@pytest.mark.parametrize("name", ["ckpt", "plain"])
def test_an_offset_is_a_whole_number(url: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "store" / "plain").write_bytes(content(SIZE))
    with stripedfs.open(tmp_path / "store" / name) as file:
        buffer = bytearray(100)
        for call in (
            lambda: file.read_at(1.5, buffer),  # type: ignore[arg-type]
            lambda: file.seek(1.5),  # type: ignore[arg-type]
            lambda: file.read(1.5),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match="integer"):
                in_time(call)
        assert file.tell() == 0
        assert in_time(lambda: file.read_at(7, buffer)) == 100
        assert buffer == content(SIZE)[7:107]


def test_credentials_of_a_url_are_in_no_text_of_it(tmp_path: Path) -> None:
    store_of(tmp_path / "store").replace("plain", b"bytes")
    served = StripedFile(open_plain_file(store_of(tmp_path / "store"), "plain"), name="shown")
    assert repr(served) == "<StripedFile 'shown' of 5 bytes>"
    with pytest.raises(StoreUnavailableError) as caught:
        stripedfs.open("http://user:secret@127.0.0.1:1/x?token=secret", options=IMPATIENT)
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_folder_and_a_file_are_not_mistaken(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder"):
        stripedfs.open(str(tmp_path / "store"))
    with pytest.raises(UsageError, match="not a directory checkpoint"):
        stripedfs.open_tree(url)


def test_a_link_in_a_directory_is_no_object(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "real").write_bytes(content(SIZE))
    (store / "link").symlink_to("real")
    with pytest.raises(NotSupportedError, match=r"link to real.* name its target"):
        stripedfs.open(f"{store}/link")
    assert [found.name for found in open_store(str(store)).list("")] == ["real"]


def test_a_tree_is_opened_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x").write_bytes(content(SIZE))
    (folder / "link").symlink_to("a/x")
    (folder / "loop").symlink_to("loop")
    stripedfs.put(str(folder), f"{tmp_path}/store/tree")
    tree = stripedfs.open_tree(f"{tmp_path}/store/tree")
    assert sorted(tree.entries) == ["a", "a/x", "link", "loop"]
    for name in ("a/x", "link", "a/../link"):
        with StripedFile(tree.file(name)) as file:
            assert file.read() == content(SIZE)
    for name in ("loop", "a", "a/y"):
        with pytest.raises(NotFoundError):
            tree.file(name)


def test_a_seeded_program_gets_its_own_random_numbers(file: StripedFile) -> None:
    before = random.getstate()
    assert len(file.read()) == SIZE
    assert random.getstate() == before


def test_threads_read_at_their_own_places(file: StripedFile) -> None:
    whole, wrong = content(SIZE), []

    def run(seed: int) -> None:
        buffer = bytearray(777)
        for number in range(300):
            offset = (seed * 7919 + number * 104729) % SIZE
            count = file.read_at(offset, buffer)
            if buffer[:count] != whole[offset : offset + 777]:
                wrong.append(offset)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert file.tell() == 0


def test_a_pickle_opens_the_same_bytes_at_the_same_place(file: StripedFile) -> None:
    file.seek(100)
    with pickle.loads(pickle.dumps(file)) as other:
        assert other.tell() == 100
        assert other.read(50) == content(SIZE)[100:150]


def test_a_pickle_of_replaced_bytes_is_refused(file: StripedFile, tmp_path: Path) -> None:
    packed = pickle.dumps(file)
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE, seed=1), tmp_path)
    with pytest.raises(CorruptDataError, match="another one"):
        pickle.loads(packed)
    assert file.read() == content(SIZE)  # the old version is still whole


def test_a_pickle_releases_what_was_not_closed(url: str, no_collector: None) -> None:
    packed = pickle.dumps(stripedfs.open(url))
    assert file_module._dropped
    with pickle.loads(packed):
        assert not file_module._dropped


def test_bytes_are_taken_without_a_copy() -> None:
    size = 16 << 20
    tracemalloc.start()
    try:
        new = NewBytes(size)
        new.view[:4] = b"abcd"
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        taken = new.take(size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (taken[:4], len(taken)) == (b"abcd", size)
    assert peak - before < size // 2
    assert NewBytes(0).take(0) == b""
    assert len(NewBytes(10).take(3)) == 3


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector comes when it is called, and at no other moment."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("face", ["file", "fsspec", "blockcache"])
def test_the_collector_may_come_within_the_fetchers_own_lock(
    url: str, face: str, no_collector: None
) -> None:
    """It did in a thread that fetches, after a read that failed, and no read ended any more."""
    fetcher = Fetcher()

    def opened() -> Any:
        if face == "file":
            return stripedfs.open(url, fetcher=fetcher)
        cached = {"cache_type": "none"} if face == "blockcache" else {}
        return StripedFileSystem(fetcher=fetcher).open(url.removeprefix("file://"), **cached)

    def held() -> int:
        return sum(
            len(found.blocks) for found in fetcher._workers.scheduler.memory.objects.values()
        )

    file = opened()
    assert file.read(10) == content(SIZE)[:10]
    ring: list[Any] = [file]
    ring.append(ring)
    del file, ring
    assert held()

    def collect() -> int:
        with fetcher._workers.scheduler.lock:
            return gc.collect()

    assert in_time(collect)
    with opened() as after:  # whoever comes next lets go of what it had
        assert not held()
        assert after.read(10) == content(SIZE)[:10]
    assert not held()
    fetcher.close()


def test_what_a_maker_left_is_not_ended_by_its_fork(url: str, no_collector: None) -> None:
    """A client of HDFS, ended there, would wait for threads that the fork has not."""
    file = stripedfs.open(url)
    assert file.read(10) == content(SIZE)[:10]
    ring: list[Any] = [file]
    ring.append(ring)
    del file, ring
    gc.collect()
    assert file_module._dropped
    child = os.fork()
    if not child:
        try:
            file_module._release_dropped()
            os._exit(0 if file_module._inherited and not file_module._dropped else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file_module._release_dropped()
    assert not file_module._dropped
    assert not file_module._inherited


def test_no_thread_of_a_child_is_given_its_parents_fetcher(monkeypatch: pytest.MonkeyPatch):
    """Another thread makes the child's own in between the two looks of the first."""
    own, inherited = Fetcher(), Fetcher()

    class Meanwhile(shared_fetcher._Shared):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            self.fetcher, self.pid = own, os.getpid()  # after whatever is looked at first
            return found

    meanwhile = Meanwhile.__new__(Meanwhile)
    meanwhile.__dict__.update(vars(shared_fetcher._Shared()), fetcher=inherited, pid=-1)
    monkeypatch.setattr(shared_fetcher, "_shared", meanwhile)
    assert shared_fetcher.shared_fetcher() is own
