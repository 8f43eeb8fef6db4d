"""The store over pyarrow's file systems. Its libhdfs ships with clusters, so a local one stands in.

`NoClobber` gives that the one habit of HDFS which the store relies on: a move onto a name that is
taken fails.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from bootseer.errors import (
    AccessDeniedError,
    BusyError,
    NoSpaceError,
    NotSupportedError,
    StoreUnavailableError,
)
from bootseer.storage.hdfs.libhdfs_errors import from_libhdfs_error
from bootseer.storage.hdfs.libhdfs_store import LibhdfsStore
from bootseer.storage.hdfs.native_store import NativeStore
from bootseer.storage.open import open_store
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store
from bootseer.storage.urls import parse_url
from tests.contracts.storage.store_contract import StoreContract


class NoClobber(pyarrow.fs.FileSystemHandler):  # type: ignore[misc]
    """A local directory that moves as HDFS does; everything else as it is."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files = pyarrow.fs.SubTreeFileSystem(root, pyarrow.fs.LocalFileSystem())

    def get_type_name(self) -> str:
        return "no-clobber"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def get_file_info(self, paths: list[str]) -> Any:
        return self.files.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self.files.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.files.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self.files.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self.files.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self.files.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        source, target = self.root + src, self.root + dest
        if os.path.isdir(source):
            os.rename(source, target)
            return
        os.link(source, target)  # fails when the target is there, like HDFS's rename
        os.unlink(source)

    def copy_file(self, src: str, dest: str) -> None:
        self.files.copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self.files.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self.files.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self.files.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def normalize_path(self, path: str) -> str:
        return path


def store_in(folder: Path, options: StoreOptions = DEFAULTS) -> LibhdfsStore:
    folder.mkdir(exist_ok=True)
    files = pyarrow.fs.PyFileSystem(NoClobber(str(folder)))
    return LibhdfsStore(parse_url("hdfs://cluster/store"), options, files)


class TestArrowStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return store_in(tmp_path / "files")

    @pytest.fixture
    def twin(self, tmp_path: Path, store: Store) -> Store:
        return store_in(tmp_path / "files")


def test_a_machine_without_libhdfs_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", "/nowhere")
    with pytest.raises(NotSupportedError, match=r"HADOOP_HOME.*hdfs-native"):
        open_store("hdfs://namenode:8020/x", StoreOptions(hdfs_backend="arrow"))


def test_messages_of_the_cluster_find_their_class() -> None:
    denied = from_libhdfs_error(
        OSError("… org.apache.hadoop.security.AccessControlException: no"), "do it"
    )
    assert isinstance(denied, AccessDeniedError)
    full = from_libhdfs_error(OSError("… DSQuotaExceededException: The DiskSpace quota …"), "do it")
    assert isinstance(full, NoSpaceError)


def test_a_folder_whose_new_name_is_taken_meanwhile_is_not_told_as_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path / "files")
    store.create("f/x", b"1")
    twin, move = store_in(tmp_path / "files"), store.move

    def outrun(*words: Any, **wishes: Any) -> bool:
        twin.create("new/y", b"2")
        return move(*words, **wishes)

    monkeypatch.setattr(store, "move", outrun)
    with pytest.raises(BusyError, match="taken"):
        store.rename("f", "new")
    assert store.read("f/x", limit_bytes=1) == b"1"
    assert [s.name for s in twin.list("new")] == ["new/y"]


def test_a_move_is_done_though_its_answer_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path / "files", StoreOptions(stall_s=1))
    store.create("f/x", b"1")
    move, waits_s = NoClobber.move, [2.0]

    def late(self: NoClobber, src: str, dest: str) -> None:
        move(self, src, dest)
        if waits_s:
            time.sleep(waits_s.pop())

    monkeypatch.setattr(NoClobber, "move", late)
    store.rename("f", "new")
    assert not waits_s
    assert store.read("new/x", limit_bytes=1) == b"1"
    waits_s.append(2.0)
    assert store.create("y", b"2")
    assert not waits_s


def test_who_moved_the_same_folder_first_is_not_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path / "files")
    store.create("f/x", b"1")
    twin, move = store_in(tmp_path / "files"), store.move

    def outrun(*words: Any, **wishes: Any) -> bool:
        twin.rename("f", "new")
        return move(*words, **wishes)

    monkeypatch.setattr(store, "move", outrun)
    with pytest.raises(BusyError, match="taken"):
        store.rename("f", "new")
    assert [s.name for s in twin.list("new")] == ["new/x"]


def test_a_local_file_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    store = store_in(tmp_path / "files")
    with pytest.raises(StoreUnavailableError, match="read /proc/self/mem"):
        store.create_from_file("x", "/proc/self/mem")
    assert not list(store.list(""))
    assert not list(store.temporaries(""))


@pytest.mark.parametrize("backend", ["arrow", "native"])
def test_a_range_is_asked_for_again_while_the_cluster_is_away(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = store_in(tmp_path)
    if backend == "native":
        store = NativeStore.open("hdfs://127.0.0.1:1/")
    asked = []

    def failing_once(name: str, offset: int, buffers: Any, attempt: Any) -> None:
        asked.append(attempt)
        if len(asked) == 1:
            raise StoreUnavailableError("nobody answers")
        buffers[0][:] = b"12"

    monkeypatch.setattr(store, "read_scatter", failing_once)
    buffer = bytearray(2)
    store.read_range("x", 1, buffer)
    assert bytes(buffer) == b"12"
    assert asked[0] is not asked[1]


def test_one_attempt_is_not_repeated_inside_while_the_cluster_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who repeats attempts would else wait for the retries within each besides its own."""
    store = store_in(tmp_path / "files")
    store.create("x", b"0123")
    get_file_info, failures = NoClobber.get_file_info, ["first", "second"]

    def failing_twice(handler: NoClobber, paths: list[str]) -> Any:
        if failures:
            raise OSError(f"nobody answers the {failures.pop(0)}")
        return get_file_info(handler, paths)

    monkeypatch.setattr(NoClobber, "get_file_info", failing_twice)
    with pytest.raises(StoreUnavailableError, match="nobody answers the first"):
        store.read_scatter("x", 1, [memoryview(bytearray(2))], Attempt())
    assert failures == ["second"]
    buffer = bytearray(2)
    store.read_range("x", 1, buffer)
    assert bytes(buffer) == b"12"
    assert not failures


def test_a_pyarrow_without_hdfs_serves_other_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pyarrow.fs, "HadoopFileSystem", raising=False)
    with pytest.raises(NotSupportedError, match="pip install pyarrow"):
        open_store("hdfs://namenode:8020/x", StoreOptions(hdfs_backend="arrow"))
    assert store_in(tmp_path / "files").create("x", b"1")
