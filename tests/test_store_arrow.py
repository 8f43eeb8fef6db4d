"""The store over pyarrow's file systems. Its libhdfs ships with clusters, so a local one stands in.

`NoClobber` gives that the one habit of HDFS which the store relies on: a move onto a name that is
taken fails.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from storage_contract import StoreContract

from bootseer.errors import (
    AccessDeniedError,
    BusyError,
    NoSpaceError,
    NotSupportedError,
    StoreUnavailableError,
)
from bootseer.storage.hdfs.libhdfs_errors import from_libhdfs_error
from bootseer.storage.hdfs.libhdfs_store import LibhdfsStore
from bootseer.storage.open import open_store
from bootseer.storage.options import DEFAULTS, StoreOptions
from bootseer.storage.store import Store
from bootseer.storage.urls import parse_url


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


def store_in(folder: Path) -> LibhdfsStore:
    folder.mkdir(exist_ok=True)
    files = pyarrow.fs.PyFileSystem(NoClobber(str(folder)))
    return LibhdfsStore(parse_url("hdfs://cluster/store"), DEFAULTS, files)


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


def test_a_folder_is_not_reported_as_renamed_when_its_new_name_was_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path / "files")
    store.create("f/x", b"1")
    monkeypatch.setattr(store, "move", lambda *_, **__: False)
    with pytest.raises(BusyError, match="taken"):
        store.rename("f", "new")


def test_a_source_file_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    store = store_in(tmp_path / "files")
    with pytest.raises(StoreUnavailableError, match="read /proc/self/mem"):
        store.create_from_file("x", "/proc/self/mem")
    assert not list(store.list(""))
    assert not list(store.temporaries(""))
