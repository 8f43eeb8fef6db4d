"""The node cache under kill -9, power loss and several processes at once."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.cache import eviction, present_index
from bootseer.blocks.cache.node_cache import NodeCache
from tests.support.paths import ROOT, TESTS
from tests.support.programs.cache_worker import BLOCK, BLOCKS, OBJECTS, Numbered, check_all

pytestmark = pytest.mark.slow

WORKER = str(TESTS / "support/programs/cache_worker.py")
ROOMY = 1 << 30
TIGHT = 3 * BLOCKS * BLOCK  # half of the objects fit: every few blocks something is evicted


def start(directory: Path, limit_bytes: int, seed: int, count: int) -> subprocess.Popen[str]:
    words = [sys.executable, WORKER, str(directory), str(limit_bytes), str(seed), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def kill_in_the_middle(directory: Path, limit_bytes: int, seed: int) -> None:
    """Two workers on one cache; both are killed at a random moment."""
    workers = [start(directory, limit_bytes, seed * 2 + n, 0) for n in range(2)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0.0, 0.1))
        assert [worker.poll() for worker in workers] == [None, None]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()


def loop(directory: Path, limit_bytes: int, rounds: range) -> int:
    present = 0
    for seed in rounds:
        kill_in_the_middle(directory, limit_bytes, seed)
        found, corrupt = check_all(str(directory), limit_bytes)
        assert corrupt == 0, "a kill left an entry without its bytes"
        present += found
    for entry in directory.iterdir():
        if entry.name.startswith(eviction.NEW):
            os.utime(entry, (1, 1))
    eviction.survey(str(directory))
    assert all(len(e.name) == 40 or e.name == "usage" for e in directory.iterdir())
    return present


@pytest.mark.parametrize("limit_bytes", [ROOMY, TIGHT])
def test_kill_9_leaves_only_whole_blocks(tmp_path: Path, limit_bytes: int):
    assert loop(tmp_path / "cache", limit_bytes, range(5)) > BLOCKS


@pytest.mark.soak
@pytest.mark.parametrize("limit_bytes", [ROOMY, TIGHT])
def test_kill_9_again_and_again(tmp_path: Path, limit_bytes: int):
    assert loop(tmp_path / "cache", limit_bytes, range(100)) > BLOCKS


@pytest.mark.parametrize("limit_bytes", [ROOMY, TIGHT])
def test_processes_share_one_cache(tmp_path: Path, limit_bytes: int):
    workers = [start(tmp_path / "cache", limit_bytes, seed, 150) for seed in range(3)]
    found = [(worker.communicate(timeout=120)[0], worker.returncode) for worker in workers]
    counts = [json.loads(text.splitlines()[-1]) for text, _ in found]
    assert [code for _, code in found] == [0, 0, 0]
    assert all(count["hits"] > 20 for count in counts)
    assert all(count["corrupt"] == 0 for count in counts)
    with NodeCache.at(str(tmp_path / "cache"), limit_bytes) as cache:
        # What was about to be written when somebody counted may stand above the limit.
        assert cache.used_bytes() <= limit_bytes + 3 * (BLOCK + OBJECTS * 8192)


def filled(directory: Path) -> None:
    with NodeCache.at(str(directory), ROOMY) as cache:
        for number in range(OBJECTS):
            source = Numbered(number)
            with cache.open(source) as kept:  # type: ignore[arg-type]
                for index in range(BLOCKS):
                    kept.store(index, memoryview(bytearray(source.raw(index))))


@pytest.mark.parametrize("seed", range(6))
def test_pages_that_never_reached_the_disk_are_noticed(tmp_path: Path, seed: int):
    """After power loss any page of any file may be of any time, zeros or somebody else's."""
    directory, chance = tmp_path / "cache", random.Random(seed)
    filled(directory)
    for file in (f for name in ("data", "present") for f in directory.glob(f"*/{name}")):
        content = bytearray(file.read_bytes())
        for page in range(0, len(content), 512):
            if chance.random() < 0.2:
                size = len(content[page : page + 512])
                other = chance.choice([bytes(size), chance.randbytes(size)])
                content[page : page + 512] = other
        file.write_bytes(content[: chance.choice([len(content)] * 4 + [len(content) // 2])])
    present, corrupt = check_all(str(directory), ROOMY)
    assert corrupt > 0
    assert present < OBJECTS * BLOCKS
    filled(directory)
    assert check_all(str(directory), ROOMY) == (OBJECTS * BLOCKS, 0)


EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A small ext4 on a loop device: its mount point and its image."""
    image, mounted = tmp_path / "image", tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mounted.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
    try:
        yield mounted, image
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


@pytest.mark.root
def test_power_loss_on_a_real_file_system(disk: tuple[Path, Path]):
    mounted, image = disk
    for turn in range(3):
        filled(mounted / "cache")
        if turn:
            # Entries that reach the disk before their blocks: the worst order.
            for file in (mounted / "cache").glob("*/present"):
                fd = os.open(file, os.O_RDWR)
                os.fsync(fd)
                os.close(fd)
        fd = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, sys.byteorder))
        finally:
            os.close(fd)
        subprocess.run(["umount", mounted], check=True)
        # A copy: a mount namespace that was made meanwhile keeps the one that was shut down.
        used, image = image, image.with_name(f"image{turn}")
        subprocess.run(["cp", "--sparse=always", used, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
        check_all(str(mounted / "cache"), ROOMY)
    filled(mounted / "cache")
    assert check_all(str(mounted / "cache"), ROOMY)[0] == OBJECTS * BLOCKS


def test_who_holds_a_lock_stops_nobody(tmp_path: Path):
    """As a stopped process would: it holds the count's lock, then an object's, for ever."""
    source = Numbered(0)
    with NodeCache.at(str(tmp_path / "cache"), ROOMY) as cache:
        with cache.open(source) as kept:  # type: ignore[arg-type]
            kept.store(0, memoryview(bytearray(source.raw(0))))
            with open(tmp_path / "cache" / "usage", "r+b") as usage:
                fcntl.flock(usage, fcntl.LOCK_EX)
                kept.store(1, memoryview(bytearray(source.raw(1))))
                assert kept.missing(0, 2) == []
        identity = present_index.identity_of(source)  # type: ignore[arg-type]
        assert identity is not None
        with open(tmp_path / "cache" / identity.folder / "present", "r+b") as present:
            fcntl.flock(present, fcntl.LOCK_EX)
            with cache.open(source) as kept:  # type: ignore[arg-type]
                assert not kept.usable
        assert cache.stopped == ""
        with cache.open(source) as kept:  # type: ignore[arg-type]
            assert kept.present(0)


def test_a_claim_ends_with_its_process(tmp_path: Path):
    source = Numbered(0)
    script = """
import sys, time
sys.path.insert(0, sys.argv[2])
from tests.support.programs.cache_worker import Numbered
from bootseer.blocks.cache.node_cache import NodeCache
kept = NodeCache.at(sys.argv[1], 1 << 30).open(Numbered(0))
print(kept.claim(3), kept.claim(4), flush=True)
kept.unclaim(4)
print("one", flush=True)
time.sleep(600)
"""
    words = [sys.executable, "-c", script, str(tmp_path / "cache"), str(ROOT)]
    with (
        NodeCache.at(str(tmp_path / "cache"), ROOMY) as cache,
        cache.open(source) as kept,  # type: ignore[arg-type]
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "True True\n"
            assert child.stdout.readline() == "one\n"
            assert kept.claim(4)
            assert not kept.claim(3)
        finally:
            child.kill()
            child.wait()
        assert kept.claim(3)
        # Another file of our own is as foreign as another process.
        with cache.open(source) as again:  # type: ignore[arg-type]
            assert not again.claim(3)
            kept.unclaim(3)
            assert again.claim(3)
