"""Make the archive of Hadoop's classes from what a small cluster loads as it starts and serves."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from tools.hdfs import class_archive
from tools.hdfs.cluster import READY_S, Cluster
from tools.hdfs.jars import jars_folder


def make_archive() -> None:
    """Make it unless it is there: half a minute, 68 MB. Raises RuntimeError."""
    if class_archive.place().exists():
        return
    # The archive is renamed to its place, so it is made on the same file system.
    with tempfile.TemporaryDirectory(prefix="hdfs-", dir=jars_folder().parent) as scratch:
        lists = Path(scratch, "lists")
        lists.mkdir()
        _record(Path(scratch, "cluster"), lists)
        class_archive.write(sorted(lists.iterdir()), Path(scratch))


def _record(directory: Path, lists: Path) -> None:
    """Have a cluster with two NameNodes and TLS do a little of everything."""
    with Cluster(directory, datanodes=1, ha=True, tls=True, record_classes=lists) as cluster:
        file = directory / "file"
        file.write_bytes(bytes(100_000))
        cluster.shell("-put", str(file), "/file")
        cluster.shell("-cat", f"{cluster.webhdfs_url}/file")
        cluster.admin("-report")
        servers = (*cluster.datanodes, *cluster.namenodes)
        for server in servers:
            server.send(signal.SIGTERM)  # a list is whole when Java ends by itself
        for server in servers:
            server.wait(READY_S)
