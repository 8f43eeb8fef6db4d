"""The cluster that other tests rely on: it serves, breaks on request, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessDeniedError, BootseerError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from tools.hdfs import class_archive
from tools.hdfs.class_training import make_archive
from tools.hdfs.process import COMMON, QUICK_START

pytestmark = pytest.mark.slow

ATTACH_AND_TELL = """
import sys
from tools.hdfs.shared import attach
with attach() as running:
    print(*running.datanode_pids, running.directory, flush=True)
    sys.stdin.read()
"""


def http(address: str, path: str, operation: str, method: str = "GET", **more: Any) -> bytes:
    scheme = "https" if "context" in more else "http"
    url = f"{scheme}://{address}/webhdfs/v1{path}?op={operation}"
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=30, **more) as answer:
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


@pytest.mark.debian("openjdk-17-jre-headless")
def test_shared_cluster_ends_with_its_last_user_even_when_killed(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)  # one of this test's own, too long for a socket's address
    folder.mkdir()
    environ = {**os.environ, "TMPDIR": str(folder)}
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
        make_archive()  # where set-up has not
        cluster = own_hdfs(datanodes=1)
        for server in (*cluster.namenodes, *cluster.datanodes):
            mapped = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
            assert str(class_archive.place()) in mapped
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


@pytest.mark.debian("openjdk-17-jre-headless")
def test_java_starts_without_an_archive_of_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "archive"
    monkeypatch.setattr(class_archive, "place", lambda: made)
    assert class_archive.options() == ()
    made.write_bytes(b"of another Java, or torn")
    command = ["java", *COMMON, *QUICK_START, *class_archive.options(), "-version"]
    assert subprocess.run(command, capture_output=True, check=True).stderr


@pytest.mark.debian("openjdk-17-jre-headless")
def test_a_script_in_javas_place_starts_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = shutil.which("java")
    assert java is not None
    script = tmp_path / "java"
    script.write_text(f'#!/bin/sh\nexec {java} "$@"\n', encoding="ascii")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert class_archive.options() == ()
    assert subprocess.run(["java", "-version"], capture_output=True, check=True).stderr


@pytest.fixture(scope="module")
def pair(own_hdfs: Any) -> Any:
    """Two NameNodes that serve TLS too."""
    return own_hdfs(datanodes=1, ha=True, tls=True)


def test_https_is_signed_by_the_clusters_own_authority(pair: Any) -> None:
    context = ssl.create_default_context(cafile=str(pair.ca_file))
    address = pair.https_addresses[pair.active()]
    http(address, "/x", "MKDIRS&user.name=root", "PUT", context=context)
    assert b'"DIRECTORY"' in http(address, "/x", "GETFILESTATUS", context=context)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        http(address, "/x", "GETFILESTATUS", context=ssl.create_default_context())


def test_a_standby_namenode_takes_over(pair: Any) -> None:
    first, second = pair.http_addresses
    put(first, "/kept", b"kept")
    with pytest.raises(urllib.error.HTTPError) as refused:
        http(second, "/kept", "OPEN")
    with refused.value as answer:
        assert b"StandbyException" in answer.read()
    pair.namenodes[0].kill()
    pair.make_active(1)
    assert http(second, "/kept", "OPEN") == b"kept"
    pair.restart_namenode(0)
    pair.make_active(0)
    assert http(first, "/kept", "OPEN") == b"kept"


def test_kerberos_knows_its_users_alone(own_hdfs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = own_hdfs(datanodes=1, kerberos=True)
    cluster.shell("-mkdir", "/alices")
    cluster.shell("-chown", "alice", "/alices")
    [address] = cluster.http_addresses
    with pytest.raises(urllib.error.HTTPError, match="401"):
        http(address, "/alices", "GETFILESTATUS&user.name=alice")
    for name, value in cluster.realm.environ("alice").items():
        monkeypatch.setenv(name, value)
    assert cluster.realm.login("alice").exists()
    for path, fate in (("/alices/x", "HTTP/1.1 200"), ("/x", "HTTP/1.1 403")):
        url = f"http://{address}/webhdfs/v1{path}?op=MKDIRS"
        asked = ["curl", "-sSi", "--negotiate", "-u", ":", "-X", "PUT", url]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert fate in said
    kerberos = StoreOptions(auth="kerberos", retry_s=1)
    store = open_store(f"{cluster.hdfs_url}/alices", kerberos)
    assert store.create("y", b"hers")
    assert store.read("y", limit_bytes=4) == b"hers"
    with pytest.raises(AccessDeniedError, match="alice"):
        open_store(f"{cluster.hdfs_url}/", kerberos).create("y", b"")
    monkeypatch.setenv("KRB5CCNAME", "FILE:/nowhere")
    with pytest.raises(BootseerError):
        open_store(f"{cluster.hdfs_url}/alices", kerberos).stat("y")
    cluster.stop()
