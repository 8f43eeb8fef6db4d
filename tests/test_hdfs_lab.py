"""The cluster that other tests rely on: it serves, breaks on request, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ATTACH_AND_TELL = """
import sys
from tools.hdfs.shared import attach
with attach() as running:
    print(*running.datanode_pids, running.directory, flush=True)
    sys.stdin.read()
"""


def http(address: str, path: str, operation: str, method: str = "GET", data: bytes = b"") -> bytes:
    url = f"http://{address}/webhdfs/v1{path}?op={operation}"
    request = urllib.request.Request(url, method=method, data=data or None)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def put(address: str, path: str, data: bytes) -> None:
    request = urllib.request.Request(
        f"http://{address}/webhdfs/v1{path}?op=CREATE&user.name=root", method="PUT"
    )

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        urllib.request.build_opener(Stay()).open(request, timeout=30)
        raise AssertionError("the NameNode took the bytes itself")
    except urllib.error.HTTPError as answer:
        with answer:
            where = answer.headers["Location"]
    urllib.request.urlopen(
        urllib.request.Request(where, method="PUT", data=data), timeout=30
    ).close()


def test_shared_cluster_serves_bytes(hdfs: Any, hdfs_folder: str) -> None:
    put(hdfs.http_addresses[0], f"{hdfs_folder}/x", b"some bytes")
    assert http(hdfs.http_addresses[0], f"{hdfs_folder}/x", "OPEN") == b"some bytes"


def test_shared_cluster_ends_with_its_last_user_even_when_killed(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # one of this test's own
    users = [
        subprocess.Popen(
            [sys.executable, "-c", ATTACH_AND_TELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for _ in range(2)
    ]
    try:
        said = [str(user.stdout and user.stdout.readline()) for user in users]
        assert said[0] == said[1]
        *pids, directory = said[0].split()
        assert len(pids) == 3
        users[0].communicate("")
        assert all(is_running(int(pid)) for pid in pids)
        users[1].send_signal(signal.SIGKILL)
        while any(is_running(int(pid)) for pid in pids) or os.path.exists(directory):
            time.sleep(0.05)
    finally:
        for user in users:
            user.kill()
            user.communicate()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestFaultsOnRequest:
    def test_datanode_and_namenode_come_back_with_their_blocks(self, own_hdfs: Any) -> None:
        cluster = own_hdfs(datanodes=1)
        address = cluster.http_addresses[0]
        put(address, "/x", b"kept")
        assert [p.read_bytes() for p in cluster.block_files(0)] == [b"kept"]
        cluster.kill_datanode(0)
        cluster.start_datanode(0)
        assert http(address, "/x", "OPEN") == b"kept"
        cluster.restart_namenode()
        assert http(address, "/x", "OPEN") == b"kept"
        cluster.safe_mode(True)
        with pytest.raises(urllib.error.HTTPError) as refused:
            http(address, "/y", "MKDIRS&user.name=root", "PUT")
        refused.value.close()
        cluster.safe_mode(False)
        http(address, "/y", "MKDIRS&user.name=root", "PUT")
        cluster.pause_datanode(0)
        cluster.stop()
        assert not any(s.running() for s in (*cluster.datanodes, *cluster.namenodes))
