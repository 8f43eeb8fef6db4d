"""A real HDFS for tests. Ask for these fixtures by name; every test module has them.

`hdfs`         One cluster (a NameNode, three DataNodes, replication 1) shared by all tests of all
               workers: started by the first that asks (about 7 s), ended after the last. It is a
               `tools.hdfs.shared.Running`: `hdfs.webhdfs_url` ("webhdfs://127.0.0.1:port"),
               `hdfs.hdfs_url`, `hdfs.datanode_http_addresses`, `hdfs.conf` (a HADOOP_CONF_DIR), …
               Never harm it: no kills, no safe mode.
`hdfs_folder`  A path such as "/t/3f…" that is this test's own there, made mode 777 and removed
               after it: f"{hdfs.webhdfs_url}{hdfs_folder}".
`own_hdfs`     A function that starts a cluster of the test's own to break, with the options of
               `tools.hdfs.cluster.Cluster`; it is stopped after the module:
               `cluster = own_hdfs(datanodes=2, replication=2)`. Costs 7 s: share one a module.
               It offers kill_datanode, pause_datanode, resume_datanode, start_datanode,
               restart_namenode, safe_mode, make_active, admin (dfsadmin), block_files, …

A cluster that cannot start fails the test. Mark such modules `pytest.mark.slow`. The superuser is
root (whoever runs the tests); other users ("user.name=alice") meet real permission checks.
"""

from __future__ import annotations

import getpass
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Any]:
    from tools.hdfs.shared import attach

    with attach() as running:
        yield running


@pytest.fixture
def hdfs_folder(hdfs: Any) -> Iterator[str]:
    path = f"/t/{uuid.uuid4().hex}"
    _ask(hdfs, path, "PUT", "MKDIRS&permission=777")
    yield path
    _ask(hdfs, path, "DELETE", "DELETE&recursive=true")


@pytest.fixture(scope="module")
def own_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    from tools.hdfs.cluster import Cluster

    started: list[Cluster] = []

    def start(**options: Any) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("hdfs"), **options)
        started.append(cluster)
        return cluster.start()

    yield start
    for cluster in started:
        cluster.stop()


def _ask(hdfs: Any, path: str, method: str, operation: str) -> None:
    user = getpass.getuser()
    url = f"http://{hdfs.http_addresses[0]}/webhdfs/v1{path}?op={operation}&user.name={user}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(url, method=method), timeout=30).close()
