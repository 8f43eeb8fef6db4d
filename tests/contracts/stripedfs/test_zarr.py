"""zarr's own suite for stores, over the fsspec file system: chunks kept as striped files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.core.buffer import Buffer, cpu
from zarr.storage import FsspecStore
from zarr.testing.store import StoreTests

from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from tests.support.mounts.checkpoints import SMALL

pytestmark = pytest.mark.slow


class TestStriped(StoreTests[FsspecStore, cpu.Buffer]):
    """What zarr asks of any store; each test runs in an event loop (`tests/conftest.py`)."""

    store_cls = FsspecStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        files = StripedFileSystem(writing=SMALL)
        return {"fs": AsyncFileSystemWrapper(files, asynchronous=True), "path": f"{tmp_path}/z"}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> FsspecStore:  # theirs needs a plugin
        return asyncio.run(FsspecStore.open(**store_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> FsspecStore:
        return FsspecStore(**store_kwargs)

    async def get(self, store: FsspecStore, key: str) -> Buffer:
        with StripedFileSystem().open(f"{store.path}/{key}") as file:
            return self.buffer_cls.from_bytes(file.read())

    async def set(self, store: FsspecStore, key: str, value: Buffer) -> None:
        StripedFileSystem(writing=SMALL).pipe_file(f"{store.path}/{key}", value.to_bytes())

    def test_store_repr(self, store: FsspecStore) -> None:
        assert str(store.path) in repr(store)

    def test_store_supports_writes(self, store: FsspecStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: FsspecStore) -> None:
        assert store.supports_listing

    # These are of stores that can be asked without an event loop, which FsspecStore cannot.
    test_get_sync = test_get_sync_missing = None
    test_set_sync = test_delete_sync = test_delete_sync_missing = None


def test_arrays_lie_in_stripes_and_zarr_sees_nothing_of_it(tmp_path: Path) -> None:
    store = FsspecStore(
        AsyncFileSystemWrapper(StripedFileSystem(writing=SMALL), asynchronous=True),
        path=f"{tmp_path}/z",
    )
    array = zarr.create_array(
        store, name="a", shape=(4, 5000), chunks=(1, 5000), dtype="i4", compressors=None
    )
    array[:] = numpy.arange(20_000).reshape(4, 5000)
    assert os.listdir(tmp_path / "z/a/c/0") == ["0.stripes"]
    read = zarr.open_array(store, path="a", mode="r")
    assert (read[2] == numpy.arange(10_000, 15_000)).all()
    array[2] = 7
    assert (read[2] == 7).all()
