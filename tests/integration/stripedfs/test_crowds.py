"""Many checkpoints in one folder, and many processes at one checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BusyError
from bootseer.storage.local import LocalStore
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.stripedfs.file import StripedFile
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.read.verify import verify
from bootseer.stripedfs.write.gc import collect_garbage
from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, served, store_of, stripe
from tests.support.mounts.fuse import in_time, python
from tests.support.samples.stripes import open_source

pytestmark = pytest.mark.slow

MANY = 2000
SIZE = 40 * CHUNK + 5
PUTS = 28

PUT = """
import json, time
from pathlib import Path
from tests.support.mounts.checkpoints import SMALL, content
from bootseer.errors import BusyError
from bootseer.storage.open import open_store
from bootseer.stripedfs.write.put import put_into
url, name, scratch, size, seeds, pause_s = sys.argv[1:]
store = open_store(url)
local = Path(scratch)
refused = 0
print("ready", flush=True)
sys.stdin.readline()
for seed in json.loads(seeds):
    local.write_bytes(content(int(size), seed))
    while True:
        try:
            put_into(store, name, str(local), settings=SMALL)
            break
        except BusyError as error:  # without a time of grace, gc may take a version at its birth
            assert "give gc a grace period" in str(error), error
            refused += 1
    time.sleep(float(pause_s))
print(refused, flush=True)
"""
READ = """
import time
from tests.support.mounts.checkpoints import content
from bootseer import stripedfs
from bootseer.errors import BootseerError
url, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
known = {content(size, seed): seed for seed in range(count)}
print("ready", flush=True)
sys.stdin.readline()
reads, refused, seen = 0, 0, set()
while count - 1 not in seen:
    try:
        with stripedfs.open(url) as file:
            seen.add(known[file.read()])
        reads += 1
    except BootseerError:
        refused += 1
    time.sleep(0.02)
print(reads, len(seen), refused, flush=True)
"""
GC = """
import time
from bootseer.storage.open import open_store
from bootseer.stripedfs.write.gc import collect_garbage
url, name, grace_s, over = sys.argv[1:]
store = open_store(url)
print("ready", flush=True)
sys.stdin.readline()
removed = 0
while not os.path.exists(over):
    removed += sum(1 for _ in collect_garbage(store, name, grace_s=float(grace_s)))
    time.sleep(0.01)
print(removed, flush=True)
"""


@contextlib.contextmanager
def running(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready, and waits for a line before it begins."""
    process = python(code, *words, stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def ended(process: subprocess.Popen[str]) -> list[str]:
    """What a process printed, which has to end well."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said.split()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of many checkpoints: one, linked as often as needed (nothing in it names it)."""
    folder = tmp_path_factory.mktemp("crowd")
    store = store_of(folder / "runs")
    put_bytes(store, "step-0000", content(2 * CHUNK), folder)
    first = folder / "runs/step-0000.stripes"
    inside = [path.relative_to(first) for path in sorted(first.rglob("*"))]
    for number in range(1, MANY):
        base = folder / f"runs/step-{number:04}.stripes"
        base.mkdir()
        for path in inside:
            if (first / path).is_dir():
                (base / path).mkdir()
            else:
                os.link(first / path, base / path)
    return folder / "runs"


def test_two_thousand_checkpoints_are_listed(crowd: Path) -> None:
    wanted = [f"step-{number:04}" for number in range(MANY)]
    done = stripe("ls", crowd, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["name"] for each in found] == [f"runs/{name}" for name in wanted]
    assert {each["size_bytes"] for each in found} == {2 * CHUNK}
    files = StripedFileSystem()
    assert files.ls(str(crowd), detail=False) == [f"{crowd}/{name}" for name in wanted]
    assert len(files.glob(f"{crowd}/step-1*")) == 1000


@pytest.mark.root
def test_two_thousand_checkpoints_are_listed_and_read_through_a_mount(
    crowd: Path, tmp_path: Path
) -> None:
    with served(crowd, tmp_path / "mnt") as mount:
        found = in_time(lambda: sorted(os.listdir(mount.directory)))
        assert found == [f"step-{number:04}" for number in range(MANY)]

        def sizes() -> set[int]:
            with os.scandir(mount.directory) as entries:
                return {entry.stat().st_size for entry in entries}

        assert in_time(sizes) == {2 * CHUNK}
        for name in random.sample(found, 20):
            assert in_time((mount.directory / name).read_bytes) == content(2 * CHUNK)


@pytest.mark.parametrize(("grace_s", "pause_s"), [(4.0, 0.25), (0.0, 0.0)])
def test_gc_takes_nothing_from_readers_and_writers(
    tmp_path: Path, grace_s: float, pause_s: float
) -> None:
    """Without any time of grace they may find a version gone, are told so, and try again."""
    store, url, over = store_of(tmp_path / "store"), tmp_path / "store", tmp_path / "over"
    put_bytes(store, "ckpt", content(SIZE, 0), tmp_path)
    seeds = list(range(1, PUTS))
    with (
        running(PUT, url, "ckpt", tmp_path / "w", SIZE, seeds, pause_s) as writer,
        running(READ, f"{url}/ckpt", SIZE, PUTS) as one,
        running(READ, f"{url}/ckpt", SIZE, PUTS) as two,
        running(GC, url, "ckpt", grace_s, over) as gc,
    ):
        begin(one, two, gc, writer)
        [refused] = ended(writer)
        found = [ended(reader) for reader in (one, two)]
        over.touch()
        [removed] = ended(gc)
    assert int(removed) > 0, "gc found nothing to take"
    for reads, seen, not_read in found:
        assert int(reads) >= int(seen) >= 2
        assert not grace_s or not_read == "0"
    assert not grace_s or refused == "0"
    assert open_whole(store, "ckpt") == content(SIZE, PUTS - 1)


def test_a_draft_that_gc_takes_at_its_birth_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notes are gone just before it gets its name, so that without grace it looks left."""
    store = store_of(tmp_path / "store")
    put_bytes(store, "ckpt", content(SIZE, 0), tmp_path)
    rename, taken = LocalStore.rename, []

    def late(self: LocalStore, old: str, new: str) -> None:
        taken.extend(
            each.name for each in collect_garbage(store_of(tmp_path / "store"), "ckpt", grace_s=0)
        )
        rename(self, old, new)

    monkeypatch.setattr(LocalStore, "rename", late)
    with pytest.raises(BusyError, match="give gc a grace period"):
        put_bytes(store, "ckpt", content(SIZE, 1), tmp_path)
    assert [name.rpartition("/")[2][:5] for name in taken] == [".tmp-"]
    assert open_whole(store, "ckpt") == content(SIZE, 0)


@pytest.fixture(params=["directory", "webhdfs", "hdfs"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store for many processes: a directory, or a real HDFS."""
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        return str(tmp_path / "store")
    cluster = request.getfixturevalue("hdfs")
    folder: str = request.getfixturevalue("hdfs_folder")
    return f"{getattr(cluster, f'{request.param}_url')}{folder}"


@pytest.mark.root
def test_of_two_writers_of_one_name_one_wins_whole(shared_url: str, tmp_path: Path) -> None:
    """Every put is a version of its own, and the last of one of them stays."""
    rounds = 3 if shared_url.startswith("/") else 2
    seeds = [list(range(rounds)), list(range(rounds, 2 * rounds))]
    with (
        running(PUT, shared_url, "ckpt", tmp_path / "a", SIZE, seeds[0], 0) as one,
        running(PUT, shared_url, "ckpt", tmp_path / "b", SIZE, seeds[1], 0) as two,
    ):
        begin(one, two)
        assert [ended(one), ended(two)] == [["0"], ["0"]], "no put was refused"
    store = open_store(shared_url)
    assert open_whole(store, "ckpt") in (content(SIZE, seeds[0][-1]), content(SIZE, seeds[1][-1]))
    assert verify(f"{shared_url}/ckpt").damages == ()
    kept = [stat.name for stat in store.list("ckpt.stripes") if stat.is_folder]
    assert len(kept) == 2 * rounds
    assert len(list(collect_garbage(store, "ckpt", grace_s=0.0))) == 2 * rounds - 1
    assert open_whole(store, "ckpt") in (content(SIZE, seeds[0][-1]), content(SIZE, seeds[1][-1]))
    store.close()


def open_whole(store: Store, name: str) -> bytes:
    with StripedFile(open_source(store, name)) as file:
        return file.read()
