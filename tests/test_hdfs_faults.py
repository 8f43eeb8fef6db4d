"""Checkpoints while the HDFS under them breaks: read and written through the whole stack.

Every test runs over WebHDFS and over hdfs-native. Memory for blocks is small, so that what was
not yet asked for when the fault comes must be fetched after it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fuse_mounts import in_time
from stripe_faces import served

from bootseer import stripedfs
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NoSpaceError,
    StoreUnavailableError,
)
from bootseer.storage.base import WriteHints, open_store
from bootseer.storage.options import StoreOptions
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.settings import WriteSettings

pytestmark = pytest.mark.slow

CHUNK = 1 << 20
SIZE = 24 * CHUNK + 77
FIRST = 3 * CHUNK + 5
PIECE = 256 << 10
STALL_S = 5.0
"""No reader may stand still for as long as this because one DataNode hangs."""
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
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher, settings: WriteSettings = TWICE
) -> Iterator[tuple[StripedFile, bytes]]:
    """A checkpoint of `data` whose start has been read, and the bytes that are still to come."""
    url = f"{root_of(cluster, scheme)}/{settings.replication}"
    stripedfs.put(str(data), url, settings=settings)
    wanted = data.read_bytes()
    with stripedfs.open(url, fetcher=fetcher) as file:
        assert file.read(FIRST) == wanted[:FIRST]
        yield file, wanted[FIRST:]


@SCHEMES
def test_datanode_killed_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    with half_read(cluster, scheme, data, fetcher) as (file, rest):
        cluster.kill_datanode(0)
        assert file.read() == rest


@SCHEMES
def test_datanode_that_hangs_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    with half_read(cluster, scheme, data, fetcher) as (file, rest):
        cluster.pause_datanode(1)
        assert longest_pause_s(file.read, rest) < STALL_S


@pytest.mark.root
@SCHEMES
def test_datanode_that_hangs_under_a_mount(
    cluster: Any, scheme: str, data: Path, tmp_path: Path
) -> None:
    root, wanted = root_of(cluster, scheme), data.read_bytes()
    stripedfs.put(str(data), f"{root}/mounted", settings=TWICE)
    with served(root, tmp_path / "mnt", memory_bytes=PATIENCE.memory_bytes) as mount:

        def read() -> float:
            with (mount.directory / "mounted").open("rb", buffering=0) as file:
                assert file.read(FIRST) == wanted[:FIRST]
                cluster.pause_datanode(1)
                return longest_pause_s(file.read, wanted[FIRST:])

        assert in_time(read) < STALL_S


@SCHEMES
def test_namenode_restarted_in_the_middle_of_a_read(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    with half_read(cluster, scheme, data, fetcher) as (file, rest):
        cluster.namenodes[0].kill()
        cluster.namenodes[0].start()
        assert file.read() == rest


@SCHEMES
def test_safe_mode_lets_read_and_says_why_not_to_write(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    hasty = StoreOptions(retry_s=0.5)
    with half_read(cluster, scheme, data, fetcher) as (file, rest):
        cluster.safe_mode(True)
        assert file.read() == rest
        with pytest.raises(StoreUnavailableError, match="safe mode"):
            stripedfs.put(str(data), f"{root_of(cluster, scheme)}/new", options=hasty)


@SCHEMES
def test_put_waits_for_the_end_of_safe_mode(cluster: Any, scheme: str, data: Path) -> None:
    cluster.safe_mode(True)
    leave = threading.Timer(1.0, cluster.safe_mode, [False])
    leave.start()
    try:
        url = f"{root_of(cluster, scheme)}/patient"
        stripedfs.put(str(data), url, settings=TWICE)
    finally:
        leave.join()
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
def test_rot_of_one_replica_is_healed_by_another(
    cluster: Any, scheme: str, data: Path, fetcher: Fetcher
) -> None:
    before = {n: set(cluster.block_files(n)) for n in range(3)}
    url = f"{root_of(cluster, scheme)}/healed-{scheme}"
    stripedfs.put(str(data), url, settings=WriteSettings(width=3, chunk_bytes=CHUNK, replication=3))
    for path in set(cluster.block_files(0)) - before[0]:
        if path.stat().st_size > CHUNK:
            flip(path, path.stat().st_size // 2)
    with stripedfs.open(url, fetcher=fetcher) as file:
        assert file.read() == data.read_bytes()


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
