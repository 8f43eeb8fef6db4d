"""WebHDFS over TLS on a cluster with two NameNodes that change places while it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessDeniedError, StoreUnavailableError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store
from tests.support.labs.web_servers import certificates
from tests.support.store_faults import note_store_faults, wait_for_fault

pytestmark = pytest.mark.slow

DATA = os.urandom(8 << 20)


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    return own_hdfs(datanodes=1, ha=True, tls=True)


@pytest.fixture
def store(cluster: Any, request: pytest.FixtureRequest) -> Iterator[Store]:
    options = StoreOptions(ca_file=str(cluster.ca_file), retry_s=300, connect_s=2)
    hosts = ",".join(cluster.https_addresses)
    opened = open_store(f"swebhdfs://{hosts}/{request.node.name}", options)
    with opened.writer("x") as writer:
        for at in range(0, len(DATA), 300_000):
            writer.write(DATA[at : at + 300_000])
    yield opened
    opened.close()


def read(store: Store, offset: int, size: int, **wishes: Any) -> bytes:
    buffer = bytearray(size)
    store.read_scatter("x", offset, [memoryview(buffer)], Attempt(**wishes))
    return bytes(buffer)


def test_all_bytes_go_over_tls(store: Store, cluster: Any) -> None:
    assert store.url.startswith("webhdfss://")
    [web] = store.locations("x")[0].replicas
    assert web not in cluster.datanode_http_addresses
    assert store.write_nodes() == [web]
    attempt = Attempt()
    whole = bytearray(len(DATA))
    store.read_scatter("x", 0, [memoryview(whole)], attempt)
    assert whole == DATA
    assert attempt.replica == web
    assert read(store, 9, 99, prefer=web) == DATA[9:108]
    assert store.create("y", b"small")
    assert not store.create("y", b"other")


def test_a_foreign_authority_is_not_believed(store: Store, cluster: Any, tmp_path: Path) -> None:
    other, _, _ = certificates(tmp_path)
    for ca_file in ("", str(other)):
        stranger = open_store(store.url, StoreOptions(ca_file=ca_file, retry_s=0))
        with pytest.raises(AccessDeniedError, match=r"not trusted.*ca_file"):
            stranger.stat("x")
        stranger.close()


def test_the_active_one_is_found_and_remembered(cluster: Any, store: Store) -> None:
    secure = {"ca_file": str(cluster.ca_file), "retry_s": 0.0}
    path = store.url.rpartition("/")[2]
    first, second = cluster.https_addresses
    standby = open_store(f"webhdfss://{second}/{path}", StoreOptions(**secure))
    with pytest.raises(StoreUnavailableError, match="stand-by; name the others"):
        standby.stat("x")
    standby.close()
    options = StoreOptions(**secure, hosts=(first,))
    both = open_store(f"webhdfss://{second}/{path}", options)
    assert both.stat("x").size_bytes == len(DATA)
    assert both.read("x", limit_bytes=len(DATA)) == DATA
    both.close()


def test_fail_over_in_the_middle_of_reading_and_writing(
    cluster: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read goes on without a NameNode; all else meets its absence, and waits for the other."""
    assert read(store, 0, 5) == DATA[:5]
    [web] = store.locations("x")[0].replicas
    buffers = [memoryview(bytearray(1 << 20)) for _ in range(8)]
    filled: list[int] = []
    writer = store.writer("y")
    writer.write(DATA)

    def fail_over(number: int) -> None:
        filled.append(number)
        if number == 0:
            cluster.namenodes[0].kill()

    def go_on() -> None:
        assert store.stat("x").size_bytes == len(DATA)
        assert read(store, 1 << 20, 1000) == DATA[1 << 20 : (1 << 20) + 1000]
        assert read(store, 77, 1000, prefer=web) == DATA[77:1077]
        writer.write(DATA)
        writer.close()
        assert store.read("y", limit_bytes=2 * len(DATA)) == DATA * 2
        store.rename("y", "z")
        store.mkdir("d")

    try:
        store.read_scatter("x", 0, buffers, Attempt(), fail_over)
        assert filled == list(range(8))
        assert b"".join(buffers) == DATA
        assert not cluster.namenodes[0].running()
        faults = note_store_faults(monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(go_on)
            try:
                wait_for_fault(under_way, lambda: faults)
            finally:
                cluster.make_active(1)
            under_way.result()
    finally:
        cluster.restart_namenode(0)
