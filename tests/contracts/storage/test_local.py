"""The directory store: the contract, and what only a file system can do to it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import (
    AccessDeniedError,
    NoSpaceError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.local import LocalStore
from bootseer.storage.open import open_store
from bootseer.storage.read_only_store import ReadOnlyStore
from bootseer.storage.store import Store
from tests.contracts.storage.store_contract import StoreContract
from tests.support.mounts.tmpfs import tmpfs


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "store"))

    @pytest.fixture
    def twin(self, store: Store) -> Store:
        return open_store(store.url)


class TestWithoutHardLinks(StoreContract):
    """File systems such as exFAT or some FUSE ones refuse link(2)."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        return open_store(str(tmp_path / "store"))

    @pytest.fixture
    def twin(self, store: Store) -> Store:
        return open_store(store.url)


def test_urls(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b").url == f"file://{tmp_path}/a b"
    assert open_store("file://localhost/x").url == "file:///x"
    assert open_store("relative").url == f"file://{os.getcwd()}/relative"
    with pytest.raises(NotSupportedError, match=r"gopher:// is not supported; .*file://"):
        open_store("gopher://host/x")
    for bad in ("", "file://", "file://host/x"):
        with pytest.raises(UsageError):
            open_store(bad)


def test_repeated_link_whose_first_answer_was_lost_counts_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def linked_but_answers_exists(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", linked_but_answers_exists)
    assert LocalStore(str(tmp_path)).create("x", b"1")


def test_symlink_in_the_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/x").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreUnavailableError):
        LocalStore(str(tmp_path / "store")).read_range("x", 0, bytearray(1))


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.create("x", b"1")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.root
def test_full_disk_keeps_the_old_object(small_disk: Path) -> None:
    store = LocalStore(str(small_disk))
    store.replace("x", b"old")
    for action in (store.replace, store.create):
        with pytest.raises(NoSpaceError, match="free space"):
            action("x" if action == store.replace else "y", bytes(2 << 20))
    assert store.read("x", limit_bytes=3) == b"old"
    assert os.listdir(small_disk) == ["x"]


@pytest.mark.root
def test_read_only_store(small_disk: Path) -> None:
    store = LocalStore(str(small_disk))
    store.create("x", b"1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(AccessDeniedError, match="writable"):
        store.create("y", b"1")
    with pytest.raises(AccessDeniedError):
        store.delete("x")
    assert store.read("x", limit_bytes=1) == b"1"


def test_a_store_that_lacks_a_method_is_not_made() -> None:
    """Or the method would return None, as if it had done its work."""

    class Half(ReadOnlyStore):
        url = "half://store"

    with pytest.raises(TypeError, match="read_scatter"):
        Half()  # type: ignore[abstract]
