"""The WebHDFS store on a real cluster: the contract, and what HDFS alone can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from tests.contracts.storage.store_contract import StoreContract

pytestmark = pytest.mark.slow


@pytest.fixture
def store(hdfs: Any, hdfs_folder: str) -> Iterator[Store]:
    opened = open_store(f"{hdfs.webhdfs_url}{hdfs_folder}/a%20store")
    opened.mkdir("made")
    opened.delete("made")
    yield opened
    opened.close()


@pytest.fixture
def twin(store: Store) -> Iterator[Store]:
    opened = open_store(store.url)
    yield opened
    opened.close()


class TestWebHdfsStore(StoreContract):
    no_names = "%:+"
    races = 2
    replacements = 4

    @pytest.fixture
    def store(self, store: Store) -> Store:
        return store

    @pytest.fixture
    def twin(self, twin: Store) -> Store:
        return twin
