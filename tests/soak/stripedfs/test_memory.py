"""Memory stays within its budget, whatever is read and however often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import TESTS
from tests.support.programs.memory_worker import memory_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.slow

WORKER = TESTS / "support/programs/memory_worker.py"
MIB = 1 << 20
BUDGET = 64 * MIB
BESIDES = 40 * MIB  # stacks of threads, the interpreter's own heap; not a matter of the file's size
LARGE = (4 << 30) + 12_345
MARKS = {0: 1, (1 << 31) - 1: 2, (4 << 30) - 1: 3, (4 << 30) + 1: 4, LARGE - 1: 5}
PARTS = [(0, 12 * BUDGET), ((2 << 30) - MIB, (2 << 30) + MIB), ((4 << 30) - BUDGET, LARGE)]
"""What is read of it: far more than the budget, and across each border of a number's width."""
READ_BYTES = sum(end - start for start, end in PARTS)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A sparse file above 4 GiB with a few marks in it."""
    path = tmp_path / "store" / "large"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(LARGE)
        for position, mark in MARKS.items():
            file.seek(position)
            file.write(bytes([mark]))
    return path


def run(what: str, path: Path, **words: Any) -> dict[str, Any]:
    words = {"what": what, "url": str(path), "budget_bytes": BUDGET, "positions": [], **words}
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(words)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=280,
    )
    return json.loads(done.stdout)


def test_a_file_object_keeps_to_its_budget(large: Path):
    found = run("stream", large, positions=list(MARKS), parts=PARTS)
    assert found["read_bytes"] == READ_BYTES
    assert found["marks"] == list(MARKS.values())
    assert found["grown_bytes"] < BUDGET + BESIDES


@pytest.fixture
def mounted(large: Path, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """The store with the large file, mounted: its directory, and the worker's process."""
    place = tmp_path / "mounted"
    place.mkdir()
    bootseer = [sys.executable, "-m", "bootseer", "stripe"]
    options = ["--foreground", "--memory", str(BUDGET), "--for-pid", str(os.getpid())]
    server = subprocess.Popen([*bootseer, "mount", *options, str(large.parent), str(place)])
    try:
        while not os.path.ismount(place):
            assert server.poll() is None
            time.sleep(0.02)
        yield place, server.pid
    finally:
        subprocess.run(["umount", "-l", place], check=False)
        server.terminate()
        server.wait()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [pid, *(each for child in text.split() for each in family(int(child)))]


@pytest.mark.root
def test_a_mount_keeps_to_its_budget(mounted: tuple[Path, int]):
    place, pid = mounted
    total = 0
    with open(place / "large", "rb", buffering=0) as file:
        for position, mark in MARKS.items():
            assert os.pread(file.fileno(), 1, position) == bytes([mark])
        buffer = bytearray(MIB)
        for start, end in PARTS:
            at = file.seek(start)
            while at < end and (count := file.readinto(buffer)):
                at += count
            total += at - start
    assert total == READ_BYTES
    assert max(memory_bytes("VmHWM", str(each)) for each in family(pid)) < BUDGET + 2 * BESIDES


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "medium"
    path.parent.mkdir()
    path.write_bytes(os.urandom(4 * BUDGET))
    return path


@pytest.mark.parametrize("what", ["small", "held"])
def test_small_reads_leave_nothing_behind(medium: Path, what: str):
    found = run(what, medium, count=40_000, budget_bytes=BUDGET // 4)
    assert found["read_bytes"] == 40_000 * 4096
    assert found["grown_bytes"] < 4 * MIB


@pytest.mark.soak
@pytest.mark.parametrize("what", ["small", "held"])
def test_a_million_small_reads_leave_nothing_behind(medium: Path, what: str):
    found = run(what, medium, count=1_000_000, budget_bytes=BUDGET // 4)
    assert found["grown_bytes"] < 4 * MIB


@pytest.mark.root
def test_a_mount_tells_what_it_cost(medium: Path, tmp_path: Path):
    place, log = tmp_path / "mounted", tmp_path / "events.jsonl"
    place.mkdir()
    bootseer = [sys.executable, "-m", "bootseer", "stripe"]
    environ = {**os.environ, "BOOTSEER_EVENTS": str(log)}
    words = [*bootseer, "mount", "--for-pid", str(os.getpid()), str(medium.parent), str(place)]
    subprocess.run(words, env=environ, check=True)
    try:
        assert (place / "medium").read_bytes() == medium.read_bytes()
    finally:
        subprocess.run([*bootseer, "umount", str(place)], check=True)
    # the worker ends a moment after its mount
    until(lambda: log.exists() and b"fetch.stats" in log.read_bytes())
    lines = [json.loads(line) for line in log.read_text(encoding="ascii").splitlines()]
    told = [line["attributes"] for line in lines if line["name"] == "fetch.stats"]
    assert sum(each["bootseer.bytes"] for each in told) >= medium.stat().st_size
