"""WebHDFS when a real cluster breaks: DataNodes die, hang and rot, the NameNode restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.imageprefetch.filemode.inotify import OpenWatcher
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store, WriteHints
from tests.support.labs.hadoop_tools import unread_bytes
from tests.support.store_faults import note_store_faults, wait_for_fault
from tests.support.waiting import until

pytestmark = pytest.mark.slow

BLOCK = 1 << 20
DATA = os.urandom(4 * BLOCK + 77)
ONCE = StoreOptions(retry_s=0.0, stall_s=10.0)


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    return own_hdfs(datanodes=2, replication=2, block_bytes=BLOCK)


@pytest.fixture
def store(cluster: Any, request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = open_store(f"{cluster.webhdfs_url}/{request.node.name}", ONCE)
    yield opened
    opened.close()


def put(store: Store, name: str, data: bytes, **hints: Any) -> None:
    with store.writer(name, WriteHints(**hints)) as writer:
        writer.write(data)


def read(store: Store, offset: int, size: int, **wishes: Any) -> bytes:
    buffer = bytearray(size)
    store.read_scatter("x", offset, [memoryview(buffer)], Attempt(**wishes))
    return bytes(buffer)


def write_much(writer: Any) -> None:
    for _ in range(100):
        writer.write(DATA)


def rot(paths: list[Path]) -> None:
    for path in paths:
        with path.open("r+b") as file:
            file.seek(BLOCK // 2)
            file.write(bytes(1000))


def test_rot_of_one_replica_is_healed_and_of_all_is_said(cluster: Any, store: Store) -> None:
    before = [set(cluster.block_files(n)) for n in range(2)]
    put(store, "x", DATA[:BLOCK])
    mine = [sorted(set(cluster.block_files(n)) - before[n]) for n in range(2)]
    assert [len(m) for m in mine] == [1, 1]
    rot(mine[0])
    with OpenWatcher() as opens:
        opens.add(str(mine[0][0].parent))
        for _ in range(20):  # which replica is asked first is left to chance
            for web in cluster.datanode_http_addresses:
                assert read(store, 0, BLOCK, prefer=web) == DATA[:BLOCK]
            if str(mine[0][0]) in opens.first_s:
                break
        assert str(mine[0][0]) in opens.first_s, "the rotten block was never read"
    store.delete("x")
    before = [set(cluster.block_files(n)) for n in range(2)]
    put(store, "x", DATA[:BLOCK], replication=1)
    rot([p for n in range(2) for p in set(cluster.block_files(n)) - before[n]])
    errors = set()
    for _ in range(3):
        buffer = bytearray(BLOCK)
        with pytest.raises(BootseerError) as caught:
            store.read_scatter("x", 0, [memoryview(buffer)], Attempt())
        errors.add((type(caught.value), str(caught.value).partition(":")[0]))
    assert {kind for kind, _ in errors} == {CorruptDataError}
    assert "is damaged at byte" in str(caught.value)


def test_a_hung_datanode_costs_the_stall_time_and_can_be_avoided(
    cluster: Any, store: Store
) -> None:
    put(store, "x", DATA)
    replicas = store.locations("x")[0].replicas
    assert len(replicas) == 2
    hung = cluster.datanode_http_addresses[0]
    assert read(store, 5, 100, prefer=hung) == DATA[5:105]
    cluster.pause_datanode(0)
    try:
        with pytest.raises(StoreUnavailableError, match=r"sent nothing for 0\.5 s"):
            read(store, 0, BLOCK, prefer=hung, stall_s=0.5)
        assert unread_bytes(cluster, 0) > 0  # it has our request, and has not gone on since
        # All are on one host here, so the other one may itself read from the hung one.
        done = 0
        while not done:
            attempt = Attempt(avoid=frozenset([hung]), stall_s=0.5)
            buffer = bytearray(100)
            try:
                store.read_scatter("x", 5, [memoryview(buffer)], attempt)
                done += buffer == DATA[5:105]
            except StoreUnavailableError:
                pass
            assert attempt.replica == cluster.datanode_http_addresses[1]
    finally:
        cluster.resume_datanode(0)


def test_a_datanode_killed_in_the_middle_of_a_read(cluster: Any, store: Store) -> None:
    big = DATA * 12  # more than the kernel's buffers hold
    put(store, "x", big, block_bytes=64 << 20)
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(48)]
    dead = cluster.datanode_http_addresses[0]
    try:
        with pytest.raises(StoreUnavailableError) as caught:
            store.read_scatter(
                "x",
                0,
                buffers,
                Attempt(prefer=dead),
                lambda number: None if number else cluster.kill_datanode(0),
            )
        assert dead in str(caught.value)
        with pytest.raises(StoreUnavailableError, match="not reachable"):
            read(store, 0, 100, prefer=dead)
        for _ in range(4):  # the NameNode still believes that the dead one lives
            wishes = {"avoid": frozenset([dead])}
            assert read(store, BLOCK, 3 * BLOCK, **wishes) == big[BLOCK : 4 * BLOCK]
    finally:
        cluster.start_datanode(0)


def test_a_datanode_killed_in_the_middle_of_a_write(cluster: Any, store: Store) -> None:
    put(store, "x", b"old")
    writer = store.writer("x", WriteHints(node=cluster.datanode_http_addresses[1], replication=1))
    writer.write(DATA)
    cluster.kill_datanode(1)
    try:
        with pytest.raises(StoreUnavailableError):
            write_much(writer)
        writer.abort()
    finally:
        cluster.start_datanode(1)
    assert store.read("x", limit_bytes=3) == b"old"


def test_a_killed_writer_leaves_a_hidden_temporary_and_the_old_object(
    cluster: Any, store: Store
) -> None:
    put(store, "x", b"old")
    program = f"""
import sys
from bootseer.storage.open import open_store
writer = open_store({store.url!r}).writer("x")
writer.write(bytes(2 << 20))
print("half", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        until(lambda: list(store.temporaries("")))  # sending goes on beside the program
        process.send_signal(signal.SIGKILL)
    assert store.read("x", limit_bytes=3) == b"old"
    assert [s.name for s in store.list("")] == ["x"]
    [left] = store.temporaries("")
    store.delete(left.name)


def test_nothing_is_published_that_the_server_does_not_hold_whole(
    cluster: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataNode that loses the end of a stream closes it as a valid, shorter object."""
    put(store, "x", b"old")
    writer: Any = store.writer("x")
    writer.write(DATA)
    writer._written_bytes += 1
    with pytest.raises(StoreUnavailableError, match=f"{len(DATA)} of {len(DATA) + 1} bytes"):
        writer.close()
    assert store.read("x", limit_bytes=3) == b"old"
    assert not list(store.temporaries(""))


def test_quota(cluster: Any, store: Store) -> None:
    put(store, "x", b"old")
    path = store.url.partition(cluster.http_addresses[0])[2]
    cluster.admin("-setSpaceQuota", str(6 * BLOCK), path)
    for data in (DATA * 4, DATA + DATA[: 2 * BLOCK]):  # cut off, and found short at the end
        with pytest.raises(NoSpaceError, match=r"quota of .* leaves"):
            put(store, "x", data)
    assert store.read("x", limit_bytes=3) == b"old"
    cluster.admin("-clrSpaceQuota", path)
    cluster.admin("-setQuota", "2", path)
    with pytest.raises(NoSpaceError, match="quota"):
        store.mkdir("one more")
    assert [s.name for s in store.list("")] == ["x"]


def test_permissions(cluster: Any, store: Store) -> None:
    put(store, "x", DATA)
    alice = open_store(store.url, StoreOptions(user="alice", retry_s=0))
    assert alice.stat("x").size_bytes == len(DATA)
    for action in (
        lambda: alice.create("y", b""),
        lambda: put(alice, "x", b"1"),
        lambda: alice.delete("x"),
        lambda: alice.mkdir("d"),
        lambda: alice.rename("x", "z"),
    ):
        with pytest.raises(AccessDeniedError, match="alice"):
            action()
    alice.close()


def test_safe_mode_and_restart_are_waited_for(
    cluster: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "x", DATA)
    cluster.safe_mode(True)
    assert read(store, 1, 5) == DATA[1:6]
    with pytest.raises(StoreUnavailableError, match=r"[Ss]afe mode"):
        store.create("y", b"")
    patient = open_store(store.url, StoreOptions(retry_s=300))
    faults = note_store_faults(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        under_way: Future[Any] = pool.submit(patient.mkdir, "y")
        try:
            wait_for_fault(under_way, lambda: any("afe mode" in fault for fault in faults))
        finally:
            cluster.safe_mode(False)
        under_way.result()
        cluster.namenodes[0].kill()
        with pytest.raises(StoreUnavailableError, match="not reachable"):
            store.stat("x")
        faults.clear()
        under_way = pool.submit(patient.stat, "x")
        try:
            wait_for_fault(under_way, lambda: any("not reachable" in fault for fault in faults))
        finally:
            cluster.namenodes[0].start()
        assert under_way.result().size_bytes == len(DATA)
    patient.close()
    cluster.wait_ready()
    with pytest.raises(NotFoundError):
        store.stat("never")


def test_a_host_that_nobody_knows_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name service is a fake: the real one may be elsewhere."""

    def unknown(*words: object, **more: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    store = open_store("webhdfs://namenode:9870/", StoreOptions(retry_s=0.0))
    with pytest.raises(StoreUnavailableError, match=r"namenode:9870 .*no such host"):
        store.stat("x")
    store.close()
