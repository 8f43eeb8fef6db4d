"""A fail-over between NameNodes in the middle of reading and of writing a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.store_faults import note_store_faults, wait_for_fault

pytestmark = pytest.mark.slow

CHUNK = 1 << 20
SIZE = 30 * CHUNK + 1
SETTINGS = WriteSettings(width=2, chunk_bytes=CHUNK, replication=1)
SCHEMES = pytest.mark.parametrize("scheme", ["webhdfs", "hdfs"])


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    return own_hdfs(datanodes=2, ha=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


def root_of(cluster: Any, scheme: str) -> str:
    nodes = cluster.http_addresses if scheme == "webhdfs" else cluster.rpc_addresses
    return f"{scheme}://{','.join(nodes)}/ha"


def kill_active(cluster: Any) -> int:
    """The active NameNode dies at once, and none is active; the number of the other one."""
    old: int = cluster.active()
    assert old >= 0
    cluster.namenodes[old].kill()
    assert cluster.active() == -1
    return 1 - old


class KillActiveOnce:
    """Fault injection by a `Progress`: kills the active NameNode when the first bytes were sent."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._lock, self.other = cluster, threading.Lock(), -1

    def expect(self, size_bytes: int) -> None: ...

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            if self.other < 0:
                self.other = kill_active(self._cluster)


@pytest.fixture
def both_again(cluster: Any) -> Iterator[None]:
    yield
    for number, node in enumerate(cluster.namenodes):
        if not node.running():
            cluster.restart_namenode(number)


def test_name_service_of_a_configuration_folder(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(cluster.conf))
    store = open_store(f"{cluster.hdfs_url}/conf")
    assert store.url == "hdfs://lab/conf"
    assert store.create("x", b"found")
    assert store.read("x", limit_bytes=5) == b"found"


@SCHEMES
def test_fail_over_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, both_again: None
) -> None:
    """A reader meets that no NameNode is active, and goes on when the other one takes over."""
    url = f"{root_of(cluster, scheme)}/{scheme}"
    stripedfs.put(str(data), url, settings=SETTINGS)
    wanted = data.read_bytes()
    settings = FetchSettings(memory_bytes=8 << 20, demand_deadline_s=300.0, tries=1000)
    with (
        Fetcher(settings) as fetcher,
        stripedfs.open(url, fetcher=fetcher) as file,
        ThreadPoolExecutor(1) as pool,
    ):
        assert file.read(CHUNK // 2) == wanted[: CHUNK // 2]
        before = fetcher.stats.total().failures
        other = kill_active(cluster)
        under_way = pool.submit(file.read)
        try:
            wait_for_fault(under_way, lambda: fetcher.stats.total().failures > before)
        finally:
            cluster.make_active(other)
        assert under_way.result() == wanted[CHUNK // 2 :]


@SCHEMES
def test_fail_over_in_the_middle_of_a_put(
    cluster: Any, scheme: str, data: Path, both_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NameNode is active when some bytes have been sent, and the other one takes over then."""
    url, patient = f"{root_of(cluster, scheme)}/{scheme}-2", StoreOptions(retry_s=300.0)
    progress = KillActiveOnce(cluster)
    faults = note_store_faults(monkeypatch)

    def put() -> None:
        stripedfs.put(str(data), url, settings=SETTINGS, options=patient, progress=progress)

    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(put)
        try:
            wait_for_fault(under_way, lambda: progress.other >= 0 and faults)
        finally:
            cluster.make_active(max(progress.other, 0))
        under_way.result()
    with stripedfs.open(url) as file:
        assert file.read() == data.read_bytes()
