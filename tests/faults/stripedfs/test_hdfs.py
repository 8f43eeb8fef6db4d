"""Checkpoints while the HDFS under them breaks: read and written through the whole stack.

Every test runs over WebHDFS and over hdfs-native. Memory for blocks is small, so that what was
not yet asked for when the fault comes must be fetched after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NoSpaceError,
    StoreUnavailableError,
)
from bootseer.imageprefetch.filemode.inotify import OpenWatcher
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store, WriteHints
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.labs.hadoop_tools import unread_bytes
from tests.support.mounts.checkpoints import served
from tests.support.mounts.fuse import in_time
from tests.support.store_faults import note_store_faults, wait_for_fault
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CHUNK = 1 << 20
SIZE = 24 * CHUNK + 77
FIRST = 3 * CHUNK + 5
LITTLE = CHUNK // 2
"""So short a read is not read ahead of: most of the file's blocks are yet unknown to the reader."""
PIECE = 256 << 10
ROT_EVERY = 64 << 10
STALL_S = 30.0
"""A hung DataNode holds a reader for at most this: half of HDFS's own time-outs, so it was we who
freed it. Nothing finer, for a busy machine is slow and not wrong."""
SCHEMES = pytest.mark.parametrize("scheme", ["webhdfs", "hdfs"])
TWICE = WriteSettings(width=3, chunk_bytes=CHUNK, replication=2)
ONCE = WriteSettings(width=3, chunk_bytes=CHUNK, replication=1)
# Hedging, the other replica and retries must do: an error of ours comes before any of HDFS's own
# time-outs (60 s and more) could have passed.
PATIENCE = FetchSettings(memory_bytes=8 << 20, demand_deadline_s=30.0)


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    # All DataNodes have one address here, so that one which serves WebHDFS takes another's replica
    # for as near as its own, and may ask a hung one for it: on real hosts it reads its own disk.
    return own_hdfs(datanodes=3, replication=2, extra={"dfs.client.socket-timeout": "1000"})


@pytest.fixture(autouse=True)
def whole_again(cluster: Any) -> Iterator[None]:
    yield
    cluster.restore()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with Fetcher(PATIENCE) as made:
        yield made


def root_of(cluster: Any, scheme: str) -> str:
    return f"{cluster.webhdfs_url if scheme == 'webhdfs' else cluster.hdfs_url}/faults"


@contextlib.contextmanager
def half_read(
    cluster: Any,
    scheme: str,
    data: Path,
    fetcher: Fetcher,
    settings: WriteSettings = TWICE,
    first_bytes: int = FIRST,
) -> Iterator[tuple[StripedFile, bytes, int]]:
    """A checkpoint of `data` whose start has been read, and the bytes that are still to come.

    The third value is the number of a DataNode that the start was read from.
    """
    before = {path.name for n in range(3) for path in cluster.block_files(n)}
    url = f"{root_of(cluster, scheme)}/{settings.replication}"
    stripedfs.put(str(data), url, settings=settings)
    with contextlib.closing(open_store(root_of(cluster, "webhdfs"))) as store:
        until(lambda: replicated(store, str(settings.replication), settings.replication))
    new = [path for n in range(3) for path in cluster.block_files(n) if path.name not in before]
    wanted = data.read_bytes()
    with OpenWatcher() as opens:
        for folder in {str(path.parent) for path in new}:
            opens.add(folder)

        def serving() -> list[int]:
            """The DataNodes that opened any of these blocks, the latest first."""
            names = {path.name for path in new}
            found = [Path(path) for path in list(opens.first_s) if os.path.basename(path) in names]
            folders = [server.folder for server in cluster.datanodes]
            return [n for p in reversed(found) for n in range(3) if folders[n] in p.parents]

        with stripedfs.open(url, fetcher=fetcher) as file:
            assert file.read(first_bytes) == wanted[:first_bytes]
            until(serving)
            yield file, wanted[first_bytes:], serving()[0]


def replicated(store: Store, name: str, count: int) -> bool:
    """Whether every stripe has so many replicas; one may come later."""
    folders = [one.name for one in store.list(f"{name}.stripes") if one.is_folder]
    stripes = [s.name for folder in folders for s in store.list(folder) if "stripe-" in s.name]
    places = [place for stripe in stripes for place in store.locations(stripe)]
    return len(stripes) >= 3 and all(len(place.replicas) == count for place in places)


@SCHEMES
def test_datanode_killed_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    """It dies while a request of the reader lies in its hands."""
    for _ in range(10):  # which replica is asked is left to chance
        with (
            half_read(cluster, scheme, data, fetcher) as (file, rest, serving),
            ThreadPoolExecutor(1) as pool,
        ):
            cluster.pause_datanode(serving)  # what it is asked from now on stays unanswered
            under_way = pool.submit(file.read)
            until(lambda: unread_bytes(cluster, serving) or under_way.done())  # noqa: B023
            struck = unread_bytes(cluster, serving) > 0 and not under_way.done()
            cluster.kill_datanode(serving)
            assert under_way.result() == rest
            if struck:
                return
        cluster.restore()
    raise AssertionError("no read was under way at the DataNode that died")


@SCHEMES
def test_datanode_that_hangs_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    for _ in range(10):  # which replica is asked is left to chance
        with half_read(cluster, scheme, data, fetcher) as (file, rest, serving):
            cluster.pause_datanode(serving)
            assert longest_pause_s(file.read, rest) < STALL_S
            if unread_bytes(cluster, serving):
                return
        cluster.restore()
    raise AssertionError("the hanging DataNode was never asked for anything")


@pytest.mark.root
@SCHEMES
def test_datanode_that_hangs_under_a_mount(
    cluster: Any, scheme: str, data: Path, tmp_path: Path
) -> None:
    root, wanted = root_of(cluster, scheme), data.read_bytes()
    for turn in range(10):  # which replica is asked is left to chance
        stripedfs.put(str(data), f"{root}/mounted", settings=TWICE)
        mounted = served(root, tmp_path / f"mnt{turn}", memory_bytes=PATIENCE.memory_bytes)
        with mounted as mount:

            def read(path: Path = mount.directory / "mounted") -> float:
                with path.open("rb", buffering=0) as file:
                    assert file.read(FIRST) == wanted[:FIRST]
                    cluster.pause_datanode(1)
                    return longest_pause_s(file.read, wanted[FIRST:])

            assert in_time(read) < STALL_S
            if unread_bytes(cluster, 1):
                return
        cluster.restore()
    raise AssertionError("the hanging DataNode was never asked for anything")


@SCHEMES
def test_namenode_restarted_in_the_middle_of_a_read(cluster: Any, scheme: str, data: Path) -> None:
    """A reader meets its absence, and goes on when it is back."""
    patient = dataclasses.replace(PATIENCE, demand_deadline_s=300.0, tries=1000)
    with (
        Fetcher(patient) as fetcher,
        half_read(cluster, scheme, data, fetcher, first_bytes=LITTLE) as (file, rest, _),
        ThreadPoolExecutor(1) as pool,
    ):
        before = fetcher.stats.total().failures
        cluster.namenodes[0].kill()
        try:
            under_way = pool.submit(file.read)
            wait_for_fault(under_way, lambda: fetcher.stats.total().failures > before)
        finally:
            cluster.namenodes[0].start()
        assert under_way.result() == rest


@SCHEMES
def test_safe_mode_lets_read_and_says_why_not_to_write(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    hasty = StoreOptions(retry_s=0.5)
    with half_read(cluster, scheme, data, fetcher) as (file, rest, _):
        cluster.safe_mode(True)
        assert file.read() == rest
        with pytest.raises(StoreUnavailableError, match="safe mode"):
            stripedfs.put(str(data), f"{root_of(cluster, scheme)}/new", options=hasty)


@SCHEMES
def test_put_waits_for_the_end_of_safe_mode(
    cluster: Any, scheme: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put is refused for safe mode, and goes on when that ends."""
    url, patient = f"{root_of(cluster, scheme)}/patient", StoreOptions(retry_s=300.0)
    cluster.safe_mode(True)
    faults = note_store_faults(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(stripedfs.put, str(data), url, settings=TWICE, options=patient)
        try:
            wait_for_fault(under_way, lambda: any("safe mode" in fault for fault in faults))
        finally:
            cluster.safe_mode(False)
        under_way.result()
    with stripedfs.open(url) as file:
        assert file.read() == data.read_bytes()


@SCHEMES
def test_rot_of_the_only_replica_is_an_error_never_wrong_bytes(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    before = {n: set(cluster.block_files(n)) for n in range(3)}
    url = f"{root_of(cluster, scheme)}/rotten-{scheme}"
    stripedfs.put(str(data), url, settings=ONCE)
    new = [p for n in range(3) for p in cluster.block_files(n) if p not in before[n]]
    rotten = max(new, key=lambda path: path.stat().st_size)
    flip(rotten, 3 * CHUNK + 1)
    wanted, right = data.read_bytes(), 0
    with stripedfs.open(url, fetcher=fetcher) as file:
        for at in range(0, SIZE, CHUNK):
            buffer = bytearray(min(CHUNK, SIZE - at))
            with contextlib.suppress(CorruptDataError):
                file.read_at(at, buffer)
                assert buffer == wanted[at : at + len(buffer)]
                right += 1
    assert right == 24  # all chunks but one


@SCHEMES
def test_rot_of_one_replica_is_healed_by_another(cluster: Any, scheme: str, data: Path) -> None:
    """All that one DataNode stores of a checkpoint is rotten, and it is asked for some of it."""
    before = set(cluster.block_files(0))
    url = f"{root_of(cluster, scheme)}/healed-{scheme}"
    stripedfs.put(str(data), url, settings=WriteSettings(width=3, chunk_bytes=CHUNK, replication=3))
    new = [path for path in cluster.block_files(0) if path not in before]
    rotten = [path for path in new if path.stat().st_size > CHUNK]
    assert len(rotten) == 3  # its replica of each stripe
    for path in rotten:
        whole = path.read_bytes()
        for at in range(0, len(whole), ROT_EVERY):
            flip(path, at)
        assert path.read_bytes() != whole
    asked: list[str] = []
    for _ in range(20):  # which replica is asked first is left to chance
        with OpenWatcher() as opens, Fetcher(PATIENCE) as fetcher:
            for path in rotten:
                opens.add(str(path.parent))
            with stripedfs.open(url, fetcher=fetcher) as file:
                assert file.read() == data.read_bytes()
        asked = [str(path) for path in rotten if str(path) in opens.first_s]
        if asked:
            break
    assert asked, "no rotten block was ever read"


@SCHEMES
def test_rot_that_hdfs_does_not_see(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    """A stripe of the right length with other bytes, and checksums that fit them."""
    url = f"{root_of(cluster, scheme)}/forged-{scheme}"
    stripedfs.put(str(data), url, settings=TWICE)
    store = open_store(root_of(cluster, scheme))
    [folder] = [s.name for s in store.list(f"forged-{scheme}.stripes") if s.is_folder]
    [stripe] = [s for s in store.list(folder) if s.name.endswith("stripe-00001")]
    forged = bytearray(stripe.size_bytes)
    store.read_range(stripe.name, 0, forged)
    forged[0] ^= 1
    with store.writer(stripe.name, WriteHints(replication=2)) as out:
        out.write(forged)
    with stripedfs.open(url, fetcher=fetcher) as file:
        assert file.read_at(0, bytearray(CHUNK)) == CHUNK
        with pytest.raises(CorruptDataError):
            file.read_at(CHUNK, bytearray(CHUNK))


@SCHEMES
def test_quota_leaves_the_old_checkpoint(cluster: Any, scheme: str, data: Path) -> None:
    folder = f"{root_of(cluster, scheme)}/quota-{scheme}"
    small = data.with_name("small")
    small.write_bytes(b"old" * 1000)
    stripedfs.put(str(small), f"{folder}/x", settings=ONCE)
    cluster.admin("-setSpaceQuota", "200m", f"/faults/quota-{scheme}")
    with pytest.raises(NoSpaceError, match="quota"):
        stripedfs.put(str(data), f"{folder}/x", settings=TWICE)
    with stripedfs.open(f"{folder}/x") as file:
        assert file.read() == b"old" * 1000


def test_user_without_permission(cluster: Any, data: Path) -> None:
    url = f"{root_of(cluster, 'webhdfs')}/private/x"
    stripedfs.put(str(data), url, settings=ONCE)
    cluster.shell("-chmod", "700", "/faults/private")
    alice = StoreOptions(user="alice")
    for forbidden in (
        lambda: stripedfs.put(str(data), url, options=alice),
        lambda: stripedfs.open(url, options=alice).close(),
    ):
        with pytest.raises(AccessDeniedError, match="alice"):
            forbidden()


def longest_pause_s(read: Callable[[int], bytes], wanted: bytes) -> float:
    """Read on by small pieces, all of them right; the longest time that one was waited for."""
    at, longest_s = 0, 0.0
    while at < len(wanted):
        began_s = time.monotonic()
        piece = read(PIECE)
        longest_s = max(longest_s, time.monotonic() - began_s)
        assert piece
        assert piece == wanted[at : at + len(piece)]
        at += len(piece)
    return longest_s


def flip(path: Path, at: int) -> None:
    """Change one byte of a DataNode's block file, behind its back."""
    with path.open("r+b") as file:
        file.seek(at)
        [old] = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 0x55]))


class Relay:
    """Fault injection: passes connections to a server on, until those that it has are `silenced`.

    They stay open and bring nothing any more, as behind a router that forgot them.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._generation, self.accepted = 0, 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        self._generation += 1

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._to)
                self.accepted += 1
                self._open += [ours, theirs]
                for ends in ((ours, theirs), (theirs, ours)):
                    threading.Thread(
                        target=self._pass, args=(*ends, self._generation), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, to: socket.socket, generation: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if generation == self._generation:
                    to.sendall(data)


def test_a_connection_to_the_namenode_that_brings_nothing_is_not_asked_again(hdfs: Any) -> None:
    """Each try waited on it, until none was left; of reads too."""
    relay = Relay("127.0.0.1", int(hdfs.hdfs_url.rpartition(":")[2].partition("/")[0]))
    try:
        url = f"hdfs://127.0.0.1:{relay.port}/relayed-{os.getpid()}"
        store = open_store(url, StoreOptions(stall_s=3.0, retry_s=60.0))
        assert store.create("x", b"found")
        for ask in (lambda: store.stat("x"), lambda: store.read("x", limit_bytes=5)):
            ask()
            before = relay.accepted
            relay.silence()
            ask()
            assert relay.accepted > before
    finally:
        relay.close()
