"""A fail-over between NameNodes in the middle of reading and of writing a checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.storage.base import open_store
from bootseer.stripedfs.settings import WriteSettings

pytestmark = pytest.mark.slow

CHUNK = 1 << 20
SIZE = 30 * CHUNK + 1
SETTINGS = WriteSettings(width=2, chunk_bytes=CHUNK, replication=1)


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


def failing_over(cluster: Any) -> threading.Thread:
    """The active NameNode dies at once; a little later the other one is told to take over."""
    old = 0 if cluster.active() == 0 else 1
    cluster.namenodes[old].kill()
    return threading.Thread(target=cluster.make_active, args=(1 - old,))


@pytest.fixture
def both_again(cluster: Any) -> Callable[[], None]:
    def start() -> None:
        for number, node in enumerate(cluster.namenodes):
            if not node.running():
                cluster.restart_namenode(number)

    return start


def test_name_service_of_a_configuration_folder(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(cluster.conf))
    store = open_store(f"{cluster.hdfs_url}/conf")
    assert store.url == "hdfs://lab/conf"
    assert store.create("x", b"found")
    assert store.read("x", limit_bytes=5) == b"found"


@pytest.mark.parametrize("scheme", ["webhdfs", "hdfs"])
def test_fail_over_in_the_middle(
    cluster: Any, scheme: str, data: Path, both_again: Callable[[], None]
) -> None:
    url = f"{root_of(cluster, scheme)}/{scheme}"
    stripedfs.put(str(data), url, settings=SETTINGS)
    wanted = data.read_bytes()
    settings = FetchSettings(memory_bytes=8 << 20, demand_deadline_s=40.0)
    with Fetcher(settings) as fetcher, stripedfs.open(url, fetcher=fetcher) as file:
        assert file.read(CHUNK + 1) == wanted[: CHUNK + 1]
        over = failing_over(cluster)
        over.start()
        assert file.read() == wanted[CHUNK + 1 :]
        over.join()
    both_again()
    over = failing_over(cluster)
    over.start()
    stripedfs.put(str(data), f"{url}-2", settings=SETTINGS)
    over.join()
    both_again()
    with stripedfs.open(f"{url}-2") as file:
        assert file.read() == wanted
