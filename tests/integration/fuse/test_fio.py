"""fio over our mounts: what its jobs wrote they read back verified, in every way of reading."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts.fuse import end_mount, mounted
from tests.support.paths import DATA
from tests.support.programs.fuse_backend import backend_mount
from tests.support.trees.local_tree import LocalTree
from tests.support.trees.memory import WritableTree

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("fio")]

FIO = DATA / "fio"
READS = sorted(path.stem for path in FIO.glob("read-*.fio"))
MOST_JOBS = 8
JOBS = dict(zip(READS, (1, 2, 3, 4, 6, MOST_JOBS), strict=True))


def fio(
    job: str, directory: Path, scratch: Path, *, jobs: int = 1, size: str = "3m"
) -> tuple[int, int]:
    """Run a job file; returns fio's exit code and the errno of its first failed job, or 0."""
    words = ["--readonly"] if job.startswith("read-") else []
    done = subprocess.run(
        ["fio", "--output-format=json", *words, FIO / f"{job}.fio"],
        env={**os.environ, "DIRECTORY": str(directory), "JOBS": str(jobs), "SIZE": size},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # What fails is told before the JSON.
    text = done.stdout[done.stdout.find("{\n") :]
    errors = [job["error"] for job in json.loads(text)["jobs"]] if text.startswith("{") else []
    return done.returncode, next((number for number in errors if number), 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local files of eight jobs."""
    folder = tmp_path_factory.mktemp("saved")
    scratch = tmp_path_factory.mktemp("scratch")
    assert fio("write", folder, scratch, jobs=MOST_JOBS) == (0, 0)
    return folder


@pytest.fixture(scope="module", params=["buffered", "direct_io", "copied", "passthrough", "fusepy"])
def local(
    request: pytest.FixtureRequest, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Those files through a mount of their directory."""
    where, mode = tmp_path_factory.mktemp("mount"), request.param
    if mode == "fusepy":
        with backend_mount("fusepy", str(saved), where) as directory:
            yield directory
        return
    passes = mode == "passthrough"
    with (
        LocalTree(
            saved, mapped=mode != "copied", direct=mode == "direct_io", passthrough=passes
        ) as tree,
        mounted(tree, where, passthrough=passes) as (directory, faults),
    ):
        yield directory
    assert faults == []


@pytest.mark.parametrize("job", READS)
def test_files_of_a_directory(local: Path, tmp_path: Path, job: str) -> None:
    assert fio(job, local, tmp_path, jobs=JOBS[job]) == (0, 0)


def test_a_flipped_byte_is_found(saved: Path, tmp_path: Path) -> None:
    """The jobs do verify."""
    content = bytearray((saved / "saved.0").read_bytes())
    content[2_000_001] ^= 1
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "saved.0").write_bytes(content)
    with (
        LocalTree(tmp_path / "source") as tree,
        mounted(tree, tmp_path / "m") as (directory, _),
    ):
        for job in ("read-sequential", "read-direct-random", "read-mmap"):
            assert fio(job, directory, tmp_path) == (1, errno.EILSEQ), job


@pytest.fixture
def writable(tmp_path: Path) -> Iterator[Path]:
    with mounted(WritableTree(), tmp_path / "m", read_only=False) as (directory, faults):
        yield directory
    assert faults == []


def test_what_was_written_through_a_mount(writable: Path, tmp_path: Path) -> None:
    assert fio("write", writable, tmp_path, jobs=MOST_JOBS) == (0, 0)
    for job in READS:
        assert fio(job, writable, tmp_path, jobs=JOBS[job]) == (0, 0), job


def test_writing_in_any_order_is_refused(writable: Path, tmp_path: Path) -> None:
    assert fio("write-random", writable, tmp_path) == (1, errno.ESPIPE)


@contextlib.contextmanager
def striped(folder: Path, directory: Path, *words: str) -> Iterator[Path]:
    """`bootseer stripe mount` of a local store, in a process that dies with us."""
    directory.mkdir(exist_ok=True)
    command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "bootseer"]
    command += ["stripe", "mount", "--foreground", *words, f"file://{folder}", str(directory)]
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while not directory.is_mount():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield directory
        subprocess.run(["umount", directory], check=True)
        assert process.wait(30) == 0
    finally:
        end_mount(directory)
        process.kill()
        process.wait()


def test_checkpoints_saved_and_read_striped(tmp_path: Path) -> None:
    store, mount = tmp_path / "store", tmp_path / "m"
    store.mkdir()
    jobs, size = 4, "9m"  # more than one chunk, and an odd rest
    with striped(store, mount, "--rw") as directory:
        assert fio("write", directory, tmp_path, jobs=jobs, size=size) == (0, 0)
        assert fio("write-random", directory, tmp_path, size=size) == (1, errno.ESPIPE)
        assert fio("read-sequential", directory, tmp_path, jobs=jobs, size=size) == (0, 0)
    assert (store / "saved.0.stripes").is_dir()
    for words, reads in (([], READS), (["--buffered"], ["read-sequential", "read-mmap-random"])):
        with striped(store, mount, *words) as directory:
            for job in reads:
                assert fio(job, directory, tmp_path, jobs=jobs, size=size) == (0, 0), (words, job)
