"""Striped checkpoints on a real HDFS, by WebHDFS and by its own protocols."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import AccessDeniedError, NoSpaceError, NotFoundError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.stripedfs.read.get import get_from_store
from bootseer.stripedfs.read.listing import count_versions
from bootseer.stripedfs.read.namespace import look_up
from bootseer.stripedfs.read.verify import verify_in_store
from bootseer.stripedfs.write.gc import collect_garbage, remove_checkpoint
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.tree_writer import TreeWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.labs.hadoop_tools import dfsadmin
from tests.support.samples.stripes import local_tree, make_tree, read_back, sample
from tests.support.store_faults import note_store_faults
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CHUNK = 64 << 10
WISHES = WriteSettings(chunk_bytes=CHUNK, replication=1, keep_bytes=0)
SIZES = (0, 1, CHUNK - 1, CHUNK + 1, 6 * CHUNK, 40 * CHUNK + 7)


@pytest.fixture(params=["webhdfs", "hdfs"])
def url(request: pytest.FixtureRequest, hdfs: Any, hdfs_folder: str) -> str:
    """This test's own folder, by each of the two ways."""
    return getattr(hdfs, f"{request.param}_url") + hdfs_folder


@pytest.fixture
def store(url: str) -> Any:
    with_end = open_store(url)
    yield with_end
    with_end.close()


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(sample(40 * CHUNK + 7))
    return path


def test_files_of_odd_sizes_go_there_and_back(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for size in SIZES:
        (source / str(size)).write_bytes(sample(size))
    put_into(store, "ck", str(source), settings=WISHES)
    with Fetcher() as fetcher:
        assert verify_in_store(store, "ck", fetcher).damages == ()
        get_from_store(store, look_up(store, "ck"), str(tmp_path / "out"), fetcher)
    assert local_tree(tmp_path / "out") == local_tree(source)


def test_odd_names_and_links(store: Store, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src")
    put_into(store, "ck", str(source), settings=WriteSettings(chunk_bytes=4096))
    with Fetcher() as fetcher:
        get_from_store(store, look_up(store, "ck"), str(tmp_path / "out"), fetcher)
    assert local_tree(tmp_path / "out") == local_tree(source)


def test_replacing_collecting_and_removing(store: Store, big: Path) -> None:
    put_into(store, "f", str(big), settings=WISHES)
    with StripedWriter.begin(store, "f", WISHES) as out:
        out.write(b"second")
    assert read_back(store, "f") == b"second"
    assert count_versions(store, "f") == 2
    assert len(list(collect_garbage(store, "f", grace_s=3600))) == 0
    (gone,) = collect_garbage(store, "f", grace_s=0)
    assert gone.reason == "unreferenced version"
    assert read_back(store, "f") == b"second"
    assert count_versions(store, "f") == 1
    remove_checkpoint(store, "f")
    with pytest.raises(NotFoundError):
        store.stat("f.stripes")


def test_ranks_publish_a_directory_together(store: Store) -> None:
    with TreeWriter.begin(store, "ck", WISHES) as tree:
        for rank in range(2):
            other = TreeWriter.join(store, "ck", WISHES, token=tree.token)
            with other, other.open_file(f"rank{rank}") as file:
                file.write(sample(5 * CHUNK, rank))
        tree.publish()
    with Fetcher() as fetcher:
        report = verify_in_store(store, "ck", fetcher)
    assert (report.files, report.damages) == (2, ())


def test_two_writers_at_once(store: Store, url: str) -> None:
    datas = [sample(20 * CHUNK, seed) for seed in (1, 2)]
    start = threading.Barrier(2)

    def write(data: bytes) -> None:
        own = open_store(url)
        with StripedWriter.begin(own, "f", WISHES) as out:
            start.wait()
            out.write(data)
        own.close()

    threads = [threading.Thread(target=write, args=(data,)) for data in datas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_back(store, "f") in datas
    assert count_versions(store, "f") == 2


def test_a_put_that_was_killed_leaves_the_old_one_and_goes_on(
    store: Store, url: str, tmp_path: Path
) -> None:
    """Kills count that found some stripes stored and others not."""
    with StripedWriter.begin(store, "f", WISHES) as out:
        out.write(b"old")
    source = tmp_path / "f"
    source.write_bytes(sample(16 << 20))
    words = [sys.executable, "-m", "bootseer", "stripe", "put", str(source), f"{url}/f"]
    words += ["--chunk", "1M", "--width", "16", "--jobs", "2", "--json"]
    chance, killed = random.Random(7), 0
    for _ in range(20):
        if killed == 3:
            break
        before, enough = _stored_stripes(store), chance.randint(1, 10)
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as child:
            while len(_stored_stripes(store) - before) < enough and child.poll() is None:
                time.sleep(0.005)
            child.kill()
        assert child.returncode in (0, -signal.SIGKILL)
        if child.returncode and 0 < len(_stored_stripes(store) - before) < 16:
            killed += 1
            assert read_back(store, "f") == b"old"
        elif read_back(store, "f") != b"old":
            assert read_back(store, "f") == source.read_bytes()
            with StripedWriter.begin(store, "f", WISHES) as out:
                out.write(b"old")
    assert killed == 3, "puts end too early to be killed"
    done = subprocess.run(words, capture_output=True, check=True)
    assert json.loads(done.stdout)["size_bytes"] == 16 << 20
    assert read_back(store, "f") == source.read_bytes()


def _stored_stripes(store: Store) -> set[tuple[str, float]]:
    """The stripes of `f` that no version has yet: each one's own name and time."""
    found: set[tuple[str, float]] = set()
    for draft in store.temporaries("f.stripes"):
        with contextlib.suppress(NotFoundError):  # a draft that is taken over is renamed
            for stat in store.list(draft.name):
                name = stat.name.rpartition("/")[2]
                if name.startswith("stripe-") and stat.size_bytes:
                    found.add((name, stat.mtime_s))
    return found


def test_a_quota_stops_a_put_and_leaves_the_old_one(
    hdfs: Any, hdfs_folder: str, store: Store, big: Path
) -> None:
    with StripedWriter.begin(store, "f", WISHES) as out:
        out.write(b"old")
    # HDFS counts a whole block of 128 MiB for each object that is being written.
    dfsadmin(hdfs, "-setSpaceQuota", str(100 << 20), hdfs_folder)
    with pytest.raises(NoSpaceError):
        put_into(store, "f", str(big), settings=WISHES)
    assert list(store.temporaries("f.stripes")) == []
    assert count_versions(store, "f") == 1
    assert read_back(store, "f") == b"old"


def test_another_user_is_refused(
    hdfs: Any, hdfs_folder: str, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library takes the user from the environment, which is put back after the test.
    monkeypatch.delenv("HADOOP_USER_NAME", raising=False)
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
    for scheme in ("webhdfs", "hdfs"):
        url = getattr(hdfs, f"{scheme}_url")
        owner = open_store(f"{hdfs.webhdfs_url}{hdfs_folder}")
        owner.mkdir("private")
        stranger = open_store(f"{url}{hdfs_folder}/private", StoreOptions(user="mallory"))
        with pytest.raises(AccessDeniedError):
            put_into(stranger, "f", str(big), settings=WISHES)
        assert list(owner.list("private")) == []
        stranger.close()
        owner.close()


class _KillOnce:
    """Fault injection by a `Progress`: kills a DataNode that has written some of a stripe."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._lock, self.killed = cluster, threading.Lock(), -1
        # What an earlier kill left in part stays with its DataNode for a while.
        self._before = {file for n in self._numbers() for file in cluster.block_files(n)}

    def expect(self, size_bytes: int) -> None: ...

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            if self.killed < 0:
                until(self._stopped_in_part)
                self._cluster.kill_datanode(self.killed)

    def _stopped_in_part(self) -> bool:
        """Stop a DataNode that is being written to; one that was quicker goes on."""
        for number in self._writing():
            self._cluster.pause_datanode(number)
            if number in self._writing():
                self.killed = number
                return True
            self._cluster.resume_datanode(number)
        return False

    def _writing(self) -> list[int]:
        """The DataNodes that hold some of a block that is not whole yet."""
        return [n for n in self._numbers() if any(map(_in_part, self._new_files(n)))]

    def _new_files(self, number: int) -> list[Path]:
        return [file for file in self._cluster.block_files(number) if file not in self._before]

    def _numbers(self) -> range:
        return range(len(self._cluster.datanodes))


def _in_part(block_file: Path) -> bool:
    """Whether a DataNode is still being sent this block."""
    with contextlib.suppress(FileNotFoundError):
        return "rbw" in block_file.parts and block_file.stat().st_size > 0
    return False


def test_a_datanode_killed_under_a_put(
    own_hdfs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some of a stripe, whose rest it is sent in vain."""
    cluster = own_hdfs(datanodes=3)
    (tmp_path / "f").write_bytes(sample(12 << 20))
    wishes = WriteSettings(chunk_bytes=1 << 20, width=3, replication=1)
    for url in (cluster.webhdfs_url, cluster.hdfs_url):
        # A folder each: what the earlier put left may have its only replica on the killed one.
        store, progress = open_store(f"{url}/{urlsplit(url).scheme}"), _KillOnce(cluster)
        with monkeypatch.context() as patch:
            faults = note_store_faults(patch)
            put_into(store, "f", str(tmp_path / "f"), settings=wishes, progress=progress)
        assert progress.killed >= 0
        assert faults
        assert read_back(store, "f") == sample(12 << 20)
        store.close()
        cluster.start_datanode(progress.killed)
        cluster.wait_ready()
