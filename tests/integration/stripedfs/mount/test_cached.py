"""Mounts that read from the node cache: block by block, and whole files by the kernel itself."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bootseer.blocks.cache import present_index
from bootseer.stripedfs.mount import passthrough_files
from bootseer.system import page_cache
from tests.support.mounts.checkpoints import CHUNK, Served, content, put_bytes, served, store_of
from tests.support.mounts.fuse import in_time, python
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 300 * CHUNK + 55
READS = [(0, 1), (5, 4096), (CHUNK - 1, 2), (7 * CHUNK, 3 * CHUNK), (SIZE - 70, 200), (SIZE, 9)]
RANDOM = """
import hashlib, random
wanted = open(sys.argv[2], "rb").read()
file = open(sys.argv[1], "rb", buffering=0)
print("open", flush=True)
for number in range(int(sys.argv[3])):
    at = random.randrange(len(wanted))
    size = random.choice((1, 4096, 70000))
    assert os.pread(file.fileno(), size, at) == wanted[at : at + size], (number, at, size)
print("right", flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE), tmp_path)
    (tmp_path / "store" / "plain").write_bytes(content(SIZE, 1))
    (tmp_path / "wanted").write_bytes(content(SIZE))
    return tmp_path / "store"


def objects(tmp_path: Path, name: str) -> list[Path]:
    return sorted((tmp_path / "cache").glob(f"*/{name}"))


def frozen(tmp_path: Path) -> list[Path]:
    return [
        path
        for path in objects(tmp_path, "present")
        if path.read_bytes()[: len(present_index.FROZEN)] == present_index.FROZEN
    ]


def check(path: Path, wanted: bytes) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset, size in READS:
            assert os.pread(fd, size, offset) == wanted[offset : offset + size]
    finally:
        os.close(fd)


@contextmanager
def stopped(mount: Served) -> Iterator[None]:
    """No process of the mount runs meanwhile."""
    pids = [*mount.workers(), mount.process.pid]
    assert len(pids) >= 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["ckpt", "plain"])
@pytest.mark.parametrize("direct_bytes", [0, 1 << 62])
def test_bytes_are_right_from_an_empty_a_part_and_a_whole_cache(
    root: Path, tmp_path: Path, name: str, direct_bytes: int
) -> None:
    wanted = content(SIZE, int(name == "plain"))
    settings = {"cache": str(tmp_path / "cache"), "direct_bytes": direct_bytes}
    with served(root, tmp_path / "mnt", **settings) as mount:
        path = mount.directory / name
        in_time(lambda: check(path, wanted))
        assert in_time(path.read_bytes) == wanted
        in_time(lambda: check(path, wanted))
        assert mount.said == ""
    with served(root, tmp_path / "mnt", **settings) as mount:
        in_time(lambda: check(mount.directory / name, wanted))
        assert in_time((mount.directory / name).read_bytes) == wanted
        assert mount.said == ""


def fill_and_freeze(root: Path, tmp_path: Path) -> None:
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        assert in_time((mount.directory / "ckpt").read_bytes) == content(SIZE)
        until(lambda: len(frozen(tmp_path)) == 1)
        assert mount.said == ""


def test_the_kernel_reads_a_whole_file_by_itself(root: Path, tmp_path: Path) -> None:
    fill_and_freeze(root, tmp_path)
    wanted = content(SIZE)
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        path = mount.directory / "ckpt"
        fd = os.open(path, os.O_RDONLY)
        past = os.open(path, os.O_RDONLY | os.O_DIRECT)
        page = mmap.mmap(-1, 1 << 16)
        try:
            with stopped(mount):
                for offset, size in READS:
                    assert (
                        in_time(lambda o=offset, s=size: os.pread(fd, s, o))
                        == (wanted[offset : offset + size])
                    )
                assert in_time(lambda: os.preadv(past, [page], 1 << 16)) == 1 << 16
                assert page[:] == wanted[1 << 16 : 2 << 16]
                with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                    assert in_time(lambda: mapped[:]) == wanted
        finally:
            os.close(fd)
            os.close(past)
        assert mount.said == ""


def is_whole(tmp_path: Path) -> bool:
    """Whether the cache has all blocks of its one object."""
    for path in objects(tmp_path, "present"):
        with path.open("rb") as file:
            identity = present_index.read_identity(file.fileno())
            return identity is not None and present_index.is_whole(file.fileno(), identity)
    return False


@contextmanager
def passed(tmp_path: Path, path: Path) -> Iterator[int]:
    """A file that the kernel reads by itself, opened once all of it has been verified.

    A block is marked as verified only after the cache has it, so an opening may come too early.
    """
    opened: list[int] = []

    def is_passed() -> bool:
        opened.append(os.open(path, os.O_RDONLY))
        if not frozen(tmp_path):
            os.close(opened.pop())
        return bool(opened)

    try:
        until(is_passed)
        yield opened[0]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_the_kernel_reads_what_has_just_been_fetched_ahead(root: Path, tmp_path: Path) -> None:
    wanted, settings = content(SIZE), {"cache": str(tmp_path / "cache"), "prefetch": "ckpt"}
    with served(root, tmp_path / "mnt", **settings) as mount:
        until(lambda: is_whole(tmp_path))
        assert frozen(tmp_path) == []
        path = mount.directory / "ckpt"
        with passed(tmp_path, path) as file:
            with stopped(mount):
                assert in_time(lambda: os.pread(file, SIZE, 0)) == wanted
            first = mount.workers()[0]
            os.kill(first, signal.SIGKILL)
            until(lambda: mount.workers() and mount.workers()[0] != first)
            assert in_time(lambda: os.pread(file, SIZE, 0)) == wanted
            assert objects(tmp_path, "sealed") == []
        assert in_time(path.read_bytes) == wanted  # by a worker that has verified nothing yet
        until(lambda: len(objects(tmp_path, "sealed")) == 1)
        assert mount.said.count("another one takes over") == 1


def test_nothing_is_sealed_while_a_file_is_open_that_has_just_been_fetched(
    root: Path, tmp_path: Path
) -> None:
    """It would be read back from the disk beside the load of the next one."""
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        path = mount.directory / "ckpt"
        assert in_time(path.read_bytes) == content(SIZE)
        with passed(tmp_path, path) as file:
            time.sleep(passthrough_files.QUIET_S + 2.0)
            assert objects(tmp_path, "sealed") == []
            with stopped(mount):
                assert in_time(lambda: os.pread(file, SIZE, 0)) == content(SIZE)
        until(lambda: len(objects(tmp_path, "sealed")) == 1)


def test_a_file_that_is_served_keeps_its_pages_at_its_next_opening(
    root: Path, tmp_path: Path
) -> None:
    settings = {"cache": str(tmp_path / "cache"), "direct_bytes": 1 << 62}
    with served(root, tmp_path / "mnt", **settings) as mount:
        path = mount.directory / "ckpt"
        with path.open("rb", buffering=0) as first:
            assert in_time(lambda: os.pread(first.fileno(), SIZE, 0)) == content(SIZE)
            until(lambda: is_whole(tmp_path))
            for _ in range(20):  # its blocks are marked as verified in the first of these
                with path.open("rb", buffering=0) as second:
                    assert page_cache.count_cached_bytes(second.fileno(), 0, SIZE) >= SIZE
                    assert in_time(lambda: os.pread(second.fileno(), SIZE, 0)) == content(SIZE)
                time.sleep(0.1)
        assert mount.said == ""


def test_a_file_that_the_kernel_refuses_to_read_itself_keeps_its_pages(
    root: Path, tmp_path: Path
) -> None:
    """It reads none that lies on a stacked file system, such as a container's root."""
    stacked, upper, work = (tmp_path / name for name in ("stacked", "upper", "work"))
    for folder in (stacked, upper, work):
        folder.mkdir()
    options = f"lowerdir={root},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "none", "-o", options, stacked], check=True)
    settings = {"cache": str(stacked / "cache"), "direct_bytes": 1 << 62}
    try:
        with served(root, tmp_path / "mnt", **settings) as mount:
            path = mount.directory / "ckpt"
            assert in_time(path.read_bytes) == content(SIZE)

            def is_refused() -> bool:
                with path.open("rb", buffering=0) as again:
                    assert page_cache.count_cached_bytes(again.fileno(), 0, SIZE) >= SIZE
                return bool(frozen(stacked))  # it was frozen to be handed to the kernel

            until(is_refused)
            assert is_refused()
            assert mount.said == ""
    finally:
        subprocess.run(["umount", stacked], check=True)


def test_open_files_outlive_a_server_that_is_killed(root: Path, tmp_path: Path) -> None:
    fill_and_freeze(root, tmp_path)
    wanted = content(SIZE)
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        path = mount.directory / "ckpt"
        with path.open("rb", buffering=0) as file:
            first = mount.workers()[0]
            os.kill(first, signal.SIGKILL)
            until(lambda: mount.workers() and mount.workers()[0] != first)
            assert in_time(lambda: os.pread(file.fileno(), 5000, 7000)) == wanted[7000:12000]
            in_time(lambda: check(path, wanted))
        in_time(lambda: check(path, wanted))
        assert mount.said.count("another one takes over") == 1


@pytest.mark.parametrize("name", ["ckpt", "plain"])
def test_random_readers_never_notice_that_the_server_was_killed(
    root: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "wanted").write_bytes(content(SIZE, int(name == "plain")))
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache"), direct_bytes=0) as mount:
        path = mount.directory / name
        assert in_time(path.read_bytes) == (tmp_path / "wanted").read_bytes()
        with python(RANDOM, path, tmp_path / "wanted", 20_000) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
            killed: set[int] = set()
            while len(killed) < 3:
                workers = mount.workers()
                if workers and workers[0] not in killed:
                    assert reader.poll() is None, "the reader was done before the fault"
                    os.kill(workers[0], signal.SIGKILL)
                    killed.add(workers[0])
            said, _ = reader.communicate(timeout=120)
        assert said == "right\n"
        assert reader.returncode == 0
        assert mount.said.count("another one takes over") == 3


@pytest.mark.parametrize("sealed", [False, True])
def test_a_wrong_block_of_the_cache_is_never_read(root: Path, tmp_path: Path, sealed: bool) -> None:
    if sealed:
        fill_and_freeze(root, tmp_path)
    else:
        with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
            assert in_time((mount.directory / "ckpt").read_bytes) == content(SIZE)
    (data,) = objects(tmp_path, "data")
    with data.open("r+b") as file:  # what an unclean stop leaves behind
        file.seek(17 * CHUNK + 5)
        before = file.read(1)
        file.seek(17 * CHUNK + 5)
        file.write(bytes([before[0] ^ 1]))
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        fd = os.open(mount.directory / "ckpt", os.O_RDONLY)
        try:
            wanted = content(SIZE)[17 * CHUNK : 18 * CHUNK]
            assert in_time(lambda: os.pread(fd, CHUNK, 17 * CHUNK)) == wanted
        finally:
            os.close(fd)
        assert in_time((mount.directory / "ckpt").read_bytes) == content(SIZE)


def test_what_the_kernel_reads_is_not_evicted_while_open(root: Path, tmp_path: Path) -> None:
    fill_and_freeze(root, tmp_path)
    with served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        with (mount.directory / "ckpt").open("rb", buffering=0) as file:
            (present,) = objects(tmp_path, "present")
            with present.open("r+b") as other:
                with pytest.raises(BlockingIOError) as refused:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                assert refused.value.errno == errno.EWOULDBLOCK
            assert in_time(lambda: os.pread(file.fileno(), 10, 0)) == content(SIZE)[:10]

        def unpinned() -> bool:
            with present.open("r+b") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            return True

        until(unpinned)


def test_a_file_replaced_while_it_is_open_keeps_its_bytes(root: Path, tmp_path: Path) -> None:
    fill_and_freeze(root, tmp_path)
    with (
        served(root, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount,
        (mount.directory / "ckpt").open("rb", buffering=0) as file,
    ):
        put_bytes(store_of(root), "ckpt", content(SIZE, 3), tmp_path)
        assert in_time(lambda: os.pread(file.fileno(), SIZE, 0)) == content(SIZE)


@pytest.mark.parametrize("size", [5000, 40 * CHUNK])
@pytest.mark.parametrize("most", [100, 101])
def test_many_open_files_leave_the_server_descriptors(tmp_path: Path, size: int, most: int) -> None:
    """Each held some of the cache's, until the store was asked in vain for want of a further one.

    Of an odd number the cache left one, of an even number none.
    """
    store = tmp_path / "store"
    store.mkdir()
    wanted = [content(size, number) for number in range(60)]
    for number, data in enumerate(wanted):
        (store / str(number)).write_bytes(data)
    with served(store, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
        (worker,) = mount.workers()
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (most, most))
        paths = [mount.directory / str(number) for number in range(60)]
        with ExitStack() as held:

            def look() -> None:
                for path, data in zip(paths, wanted, strict=True):
                    assert held.enter_context(path.open("rb")).read() == data

            in_time(look)
            assert 60 < len(os.listdir(f"/proc/{worker}/fd")) < most - most // 5
        assert mount.said == ""


def test_a_server_takes_as_many_descriptors_as_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with served(tmp_path / "store", tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
            (worker,) = mount.workers()
            now = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert now == (before[1], before[1])
