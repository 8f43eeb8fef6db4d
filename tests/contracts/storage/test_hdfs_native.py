"""The HDFS store over hdfs-native: the contract on a real cluster, and what only HDFS does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import hdfs_native
import pytest

from bootseer.errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.hdfs.native_errors import from_native_error
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store, WriteHints
from tests.contracts.storage.store_contract import StoreContract

pytestmark = pytest.mark.slow


class TestHdfsStore(StoreContract):
    no_names = ":"
    races = 3
    replacements = 10

    @pytest.fixture
    def store(self, hdfs: Any, hdfs_folder: str) -> Store:
        return open_store(f"{hdfs.hdfs_url}{hdfs_folder}/store")

    @pytest.fixture
    def twin(self, store: Store) -> Store:
        return open_store(store.url)


@pytest.fixture
def store(hdfs: Any, hdfs_folder: str) -> Store:
    return open_store(f"{hdfs.hdfs_url}{hdfs_folder}")


def test_a_writer_that_was_given_up_asks_nobody_when_it_is_collected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in any thread, and a NameNode may answer late, or never."""
    closed: list[str] = []
    close = hdfs_native.FileWriter.close

    def noted(file: hdfs_native.FileWriter) -> None:
        closed.append(threading.current_thread().name)
        close(file)

    monkeypatch.setattr(hdfs_native.FileWriter, "close", noted)
    for name in ("x", "y"):
        out = store.writer(name)
        out.write(bytes(1000))
        if name == "x":
            out.abort()
        del out
    gc.collect()
    assert closed == []
    with store.writer("kept") as out:
        out.write(b"kept")
    gc.collect()
    assert closed == ["store-call"]
    assert store.read("kept", limit_bytes=4) == b"kept"


def test_blocks_are_places_and_ranges_cross_them(store: Store) -> None:
    data = os.urandom(1 << 20)
    with store.writer("big", WriteHints(block_bytes=256 << 10, replication=2)) as out:
        for at in range(0, len(data), 100_000):
            out.write(memoryview(data)[at : at + 100_000])
    assert [(p.offset, p.length) for p in store.locations("big")] == [
        (n * (256 << 10), 256 << 10) for n in range(4)
    ]
    buffers = [memoryview(bytearray(n)) for n in (0, 70_000, 1, 300_000, 0, 12_345, 0)]
    order: list[int] = []
    store.read_scatter("big", 123_456, buffers, Attempt(), order.append)
    assert b"".join(buffers) == data[123_456 : 123_456 + 382_346]
    assert order == list(range(len(buffers)))


def test_empty_object(store: Store) -> None:
    assert store.create("empty", b"")
    assert store.stat("empty").size_bytes == 0
    assert store.read("empty", limit_bytes=0) == b""
    assert [(p.offset, p.length) for p in store.locations("empty")] == [(0, 0)]


def test_version_changes_with_the_bytes(store: Store) -> None:
    store.replace("x", b"one")
    before = store.stat("x").version
    store.replace("x", b"two")
    assert before
    assert store.stat("x").version != before


@pytest.mark.parametrize("size", [70_000, 50_000, 90_000])
def test_a_reader_is_never_older_than_the_status(store: Store, size: int) -> None:
    """Another host puts a file in the place of one that is being read."""
    other = open_store(store.url)
    store.create("x", b"old" * 30_000)
    buffer = bytearray(size)
    store.stat("x")
    store.read_range("x", 0, memoryview(buffer)[:1000])
    other.replace("x", os.urandom(size))
    assert store.stat("x").size_bytes == size
    store.read_range("x", 0, buffer)
    assert buffer == other.read("x", limit_bytes=size)


def test_a_reader_in_use_while_its_file_is_replaced_is_not_kept(store: Store) -> None:
    other = open_store(store.url)
    store.create("x", b"old" * 30_000)
    parts = [memoryview(bytearray(n)) for n in (1000, 80_000)]

    def replaced(_: int) -> None:
        if store.stat("x").version == before:
            other.replace("x", b"new" * 30_000)
            store.stat("x")

    before = store.stat("x").version
    store.read_scatter("x", 0, parts, Attempt(), replaced)
    assert bytes(parts[0]) == (b"old" * 400)[:1000]
    store.read_range("x", 0, parts[0])
    assert bytes(parts[0]) == (b"new" * 400)[:1000]


def test_ranges_of_one_file_share_a_reader(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from hdfs_native import Client

    asked: list[str] = []
    read = Client.read
    monkeypatch.setattr(Client, "read", lambda self, path: asked.append(path) or read(self, path))
    store.create("x", bytes(1000))
    for at in range(0, 1000, 100):
        store.stat("x")
        store.read_range("x", at, bytearray(100))
    assert len(asked) == 1


def test_folders_are_moved_but_never_over_another(store: Store) -> None:
    store.create("a/x", b"1")
    store.rename("a", "deep/b")
    assert store.read("deep/b/x", limit_bytes=1) == b"1"
    store.mkdir("c")
    with pytest.raises(BusyError, match="choose another"):
        store.rename("deep/b", "c")
    store.create("file", b"2")
    with pytest.raises(UsageError, match="must both be directories"):
        store.rename("file", "c")
    with pytest.raises(NotFoundError):
        list(store.list("file"))
    with pytest.raises(BusyError):
        store.delete("deep/b")
    store.delete_tree("deep")
    with pytest.raises(NotFoundError):
        store.stat("deep")


def test_aborted_object_leaves_nothing(store: Store) -> None:
    store.create("x", b"old")
    out = store.writer("x")
    out.write(b"new" * 1000)
    out.abort()
    out.close()
    assert store.read("x", limit_bytes=3) == b"old"
    assert not list(store.temporaries(""))


def test_refused_where_the_user_may_not_write(store: Store, hdfs: Any) -> None:
    # The library takes its user from the environment, so another user is another process.
    store.mkdir("roots")
    code = (
        "import sys\n"
        "from bootseer.storage.open import open_store\n"
        "from bootseer.storage.options import StoreOptions\n"
        "from bootseer.errors import AccessDeniedError, UsageError\n"
        "store = open_store(sys.argv[1], StoreOptions(user='alice'))\n"
        "try: store.create('x', b'1')\n"
        "except AccessDeniedError as error: print(error)\n"
        "try: open_store(sys.argv[1], StoreOptions(user='bob'))\n"
        "except UsageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{store.url}/roots"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    denied, other = done.stdout.splitlines()
    assert "Permission denied: user=alice" in denied
    assert "one user" in other


def test_nobody_listens() -> None:
    store = open_store("hdfs://127.0.0.1:1/x", StoreOptions(retry_s=0.3))
    with pytest.raises(StoreUnavailableError, match="Connection refused"):
        store.stat("y")
    store.close()
    store.close()


def test_several_namenodes_are_tried_in_turn(store: Store, hdfs: Any, hdfs_folder: str) -> None:
    store.create("x", b"1")
    url = f"hdfs://127.0.0.1:1,{hdfs.rpc_addresses[0]}{hdfs_folder}"
    assert open_store(url).read("x", limit_bytes=1) == b"1"
    more = StoreOptions(hosts=(hdfs.rpc_addresses[0],))
    assert open_store(f"hdfs://127.0.0.1:1{hdfs_folder}", more).stat("x").size_bytes == 1


def test_given_up_while_it_reads(store: Store) -> None:
    store.create("x", bytes(10 << 20))
    attempt = Attempt()
    buffer = bytearray(10 << 20)

    def give_up(_: int) -> None:
        attempt.cancel()

    with pytest.raises(StoreUnavailableError, match="given up"):
        store.read_scatter(
            "x", 0, [memoryview(buffer)[:1000], memoryview(buffer)[1000:]], attempt, give_up
        )
    before = threading.active_count()
    with pytest.raises(StoreUnavailableError, match="given up"):
        store.read_scatter("x", 0, [memoryview(buffer)], attempt)
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('RPCError("org.apache.hadoop.security.AccessControlException", "no")', AccessDeniedError),
        ('RPCError("org.apache.hadoop.ipc.StandbyException", "no")', StoreUnavailableError),
        ('RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "no")', "NoSpace"),
        ('RPCError("java.io.IOException", "x could only be replicated to 0 nodes")', "NoSpace"),
        ('DataTransferError("All DataNodes failed")', StoreUnavailableError),
    ],
)
def test_foreign_errors(said: str, kind: type | str) -> None:
    error = from_native_error(RuntimeError(said + r"\n\tat org.apache.Stack"), "do it")
    assert type(error).__name__.startswith(kind if isinstance(kind, str) else kind.__name__)
    assert "\\tat" not in str(error)
    hidden = from_native_error(RuntimeError("no: delegation=SECRET&x"), "do it")
    assert "SECRET" not in str(hidden)


def test_a_process_may_end_while_it_reads(store: Store) -> None:
    """The library's threads must not meet an interpreter that is being taken down."""
    store.create("x", bytes(64 << 20))
    code = (
        "import contextlib, sys, threading, time\n"
        "from bootseer.errors import StoreUnavailableError\n"
        "from bootseer.storage.open import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "def read():\n"
        "    with contextlib.suppress(StoreUnavailableError):\n"
        "        while True: store.read_range('x', 0, bytearray(64 << 20))\n"
        "for _ in range(6): threading.Thread(target=read, daemon=True).start()\n"
        "time.sleep(float(sys.argv[2]))\n"
    )
    for pause_s in ("0.3", "0.35", "0.4"):
        subprocess.run([sys.executable, "-c", code, store.url, pause_s], check=True)
