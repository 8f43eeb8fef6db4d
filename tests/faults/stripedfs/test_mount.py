"""Mounts whose bytes are wrong, whose store goes, or whose server dies."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.web_servers import FakeServer, Request, serve_range
from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, served, store_of, stripe
from tests.support.mounts.fuse import in_time, python, refusal
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 30 * CHUNK + 55
FACES = {"direct": 0, "buffered": 1 << 62}
HASHER = """
import hashlib
for _ in range(int(sys.argv[2])):
    digest = hashlib.md5()
    with open(sys.argv[1], "rb", buffering=0) as file:
        while data := file.read(65536):
            digest.update(data)
    print(digest.hexdigest(), flush=True)
"""
READER = """
import hashlib
path, rounds, end = sys.argv[1:]
with open(rounds, "w", buffering=1) as told:
    while not os.path.exists(end):
        digest = hashlib.md5()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(65536):
                digest.update(data)
        print(digest.hexdigest(), file=told)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE), tmp_path)
    (tmp_path / "store" / "plain").write_bytes(content(SIZE, 1))
    return tmp_path / "store"


def flip(root: Path, chunk: int) -> None:
    """One wrong bit within a chunk, on the store."""
    path = next((root / "ckpt.stripes").glob(f"v-*/stripe-{chunk % 3:05d}"))
    data = bytearray(path.read_bytes())
    data[chunk // 3 * CHUNK + 99] ^= 4
    path.write_bytes(data)


def pread(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("face", FACES)
def test_a_wrong_byte_is_an_error_and_never_read(root: Path, tmp_path: Path, face: str) -> None:
    flip(root, 7)
    with served(root, tmp_path / "mnt", direct_bytes=FACES[face]) as mount:
        path = mount.directory / "ckpt"
        assert refusal(lambda: pread(path, 7 * CHUNK, 10)) == errno.EIO
        assert refusal(lambda: pread(path, 8 * CHUNK - 1, 1)) == errno.EIO
        assert refusal(path.read_bytes) == errno.EIO
        # A read from before it gives what is right, at most up to it.
        assert in_time(lambda: pread(path, 0, CHUNK)) == content(SIZE)[:CHUNK]
        got = in_time(lambda: pread(path, 20 * CHUNK, CHUNK))
        assert got == content(SIZE)[20 * CHUNK : 21 * CHUNK]
        assert "chunk 7 of" in mount.said
        assert "does not match its digest" in mount.said
        assert mount.said.count("does not match") == 1


@pytest.mark.parametrize("face", FACES)
def test_a_wrong_byte_under_a_mapping_ends_its_reader(
    root: Path, tmp_path: Path, face: str
) -> None:
    flip(root, 7)
    with served(root, tmp_path / "mnt", direct_bytes=FACES[face]) as mount:
        code = (
            "import mmap\n"
            "with open(sys.argv[1], 'rb') as file:\n"
            "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
            "print(mapped[20 * 4096], flush=True)\n"
            "mapped[7 * 4096 + 99]\n"
        )
        with python(code, mount.directory / "ckpt", stderr=subprocess.DEVNULL) as reader:
            said, _ = reader.communicate(timeout=60)
        assert said == f"{content(SIZE)[20 * CHUNK]}\n"
        assert reader.returncode == -signal.SIGBUS


def test_a_stripe_that_went_is_an_error(root: Path, tmp_path: Path) -> None:
    with served(root, tmp_path / "mnt") as mount:
        path = mount.directory / "ckpt"
        with path.open("rb", buffering=0) as file:
            next((root / "ckpt.stripes").glob("v-*/stripe-00002")).unlink()
            assert refusal(lambda: os.pread(file.fileno(), 10, 2 * CHUNK)) is not None
            assert in_time(lambda: os.pread(file.fileno(), 10, 0)) == content(SIZE)[:10]
        assert "stripe-00002" in mount.said


def test_a_plain_file_that_changes_is_an_error(root: Path, tmp_path: Path) -> None:
    with (
        served(root, tmp_path / "mnt") as mount,
        (mount.directory / "plain").open("rb", buffering=0) as file,
    ):
        (root / "plain").write_bytes(content(SIZE, 2))
        assert refusal(lambda: os.pread(file.fileno(), 10, 0)) == errno.EIO
        assert "changed while it was read" in mount.said


class Switched:
    """A FAKE web server of one file that can be told to hang, for fault injection."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.hangs = threading.Event()
        self.ended = threading.Event()
        self.server = FakeServer(self._answer)
        self.url = f"http://{self.server.authority}/file"

    def _answer(self, server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if self.hangs.is_set() and "range" in request.headers:
            self.ended.wait(60)
            return False
        if not request.target.endswith("/file"):
            sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        return serve_range(self.data, sock, request, ETag='"1"')


@pytest.fixture
def web() -> Iterator[Switched]:
    switched = Switched(content(4 << 20))
    with switched.server:
        yield switched
        switched.ended.set()


def test_a_store_that_hangs_gives_an_error_in_time(web: Switched, tmp_path: Path) -> None:
    with served(web.url, tmp_path / "mnt", deadline_s=1.5) as mount:
        path = mount.directory / "file"
        assert in_time(lambda: pread(path, 0, 100)) == web.data[:100]
        web.hangs.set()
        assert refusal(lambda: pread(path, 3 << 20, 100)) == errno.EIO
        web.hangs.clear()
        web.ended.set()
        assert in_time(lambda: pread(path, 3 << 20, 100)) == web.data[3 << 20 :][:100]


MOUNTER = """
from bootseer.errors import StoreUnavailableError
from bootseer.stripedfs.mount import mount as mounting
from bootseer.stripedfs.mount.settings import MountSettings
mounting.START_LIMIT_S = 1.0
url, place, log = sys.argv[1:]
try:
    mounting.mount(MountSettings(url=url, mountpoint=place, log_file=log))
except StoreUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("given", [True, False])
def test_the_log_that_a_mount_in_vain_points_to_is_there(tmp_path: Path, given: bool) -> None:
    def hang(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        server.ended.wait(60)
        return False

    (tmp_path / "mnt").mkdir()
    log = tmp_path / "log"
    with FakeServer(hang) as server:
        words = (f"http://{server.authority}/file", tmp_path / "mnt", log if given else "")
        with python(MOUNTER, *words) as mounter:
            assert in_time(mounter.wait, 30) == 0
            assert mounter.stdout is not None
            said = mounter.stdout.read().strip()
        assert server.requests, "nothing hung"
    to_do = f"see {log}" if given else "give --log-file FILE, or --foreground, to see why"
    assert said == f"mounting at {tmp_path / 'mnt'} took too long; {to_do}"
    assert log.exists() is given


def test_what_was_read_is_kept_on_the_node(web: Switched, tmp_path: Path) -> None:
    for _ in "12":
        with served(web.url, tmp_path / "mnt", cache=str(tmp_path / "cache")) as mount:
            assert in_time((mount.directory / "file").read_bytes) == web.data
        ranges = sum(1 for request in web.server.requests if "range" in request.headers)
        web.hangs.set()  # the second time no byte may be asked of the store
    assert ranges == sum(1 for request in web.server.requests if "range" in request.headers)


def test_a_reader_of_a_store_that_hangs_can_be_killed(web: Switched, tmp_path: Path) -> None:
    with served(web.url, tmp_path / "mnt", deadline_s=300) as mount:
        web.hangs.set()
        before, asked = len(web.server.requests), web.server.requests
        with python("open(sys.argv[1], 'rb').read()", mount.directory / "file") as reader:
            until(lambda: any("range" in request.headers for request in asked[before:]))
            assert reader.poll() is None
            reader.kill()
            assert in_time(reader.wait, 30) == -signal.SIGKILL


def test_a_store_that_died_gives_an_error_in_time(web: Switched, tmp_path: Path) -> None:
    with served(web.url, tmp_path / "mnt", deadline_s=1.5) as mount:
        path = mount.directory / "file"
        assert in_time(lambda: pread(path, 0, 100)) == web.data[:100]
        with path.open("rb", buffering=0) as file:
            web.server.__exit__(None, None, None)
            assert refusal(lambda: os.pread(file.fileno(), 100, 3 << 20)) == errno.EIO
            assert refusal(lambda: pread(path, 2 << 20, 100)) == errno.EIO  # opened anew
            assert in_time(path.stat).st_size == len(web.data)  # known from before
            assert mount.said


@pytest.mark.parametrize("face", FACES)
def test_readers_never_notice_that_the_server_was_killed(
    root: Path, tmp_path: Path, face: str
) -> None:
    """Each of four servers is killed under all readers, which open and read on by the next one."""
    end = tmp_path / "end"
    with (
        served(root, tmp_path / "mnt", direct_bytes=FACES[face]) as mount,
        contextlib.ExitStack() as stack,
    ):
        readers = {}
        for number, name in enumerate(("ckpt", "ckpt", "plain", "plain")):
            rounds = tmp_path / f"rounds{number}"
            reader = stack.enter_context(python(READER, mount.directory / name, rounds, end))
            readers[rounds] = (reader, name)
        stack.callback(end.touch)  # before they are waited for, however this ends

        def done() -> list[int]:
            return [len(path.read_text().split()) if path.exists() else 0 for path in readers]

        def wait_for_rounds(before: list[int]) -> None:
            """Until each reader has ended the round that it was in, and a whole one more."""
            until(lambda: all(map(int.__ge__, done(), (n + 2 for n in before))))

        wait_for_rounds(done())
        killed: list[int] = []
        for _ in range(4):
            until(lambda: mount.workers() and mount.workers()[0] not in killed)
            (worker,) = mount.workers()
            assert [reader.poll() for reader, _ in readers.values()] == [None] * 4
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)
            wait_for_rounds(done())
        end.touch()
        wanted = {"ckpt": content(SIZE), "plain": content(SIZE, 1)}
        for rounds, (reader, name) in readers.items():
            assert reader.wait(120) == 0
            assert set(rounds.read_text().split()) == {hashlib.md5(wanted[name]).hexdigest()}
        until(lambda: mount.said.count("another one takes over") == 4)


def test_unmounting_under_load_lets_open_files_be_read_on(root: Path, tmp_path: Path) -> None:
    with (
        served(root, tmp_path / "mnt") as mount,
        (mount.directory / "ckpt").open("rb", buffering=0) as file,
    ):
        with python(HASHER, mount.directory / "ckpt", 10_000) as reader:
            assert reader.stdout is not None
            wanted = reader.stdout.readline()
            assert stripe("umount", "--lazy", mount.directory).returncode == 0
            reader.wait(60)
            assert set(reader.stdout.read().split()) <= {wanted.strip()}
            assert reader.returncode == 1  # its next open found no file
        assert in_time(lambda: os.pread(file.fileno(), SIZE, 0)) == content(SIZE)
    until(lambda: mount.process.poll() is not None)


def test_very_many_small_reads_do_not_grow_the_server(root: Path, tmp_path: Path) -> None:
    reads = """
fds = [os.open(sys.argv[1] + "/" + name, os.O_RDONLY) for name in ("ckpt", "plain")]
for number in range(int(sys.argv[2])):
    os.pread(fds[number % 2], 16, number * 6007 % 120_000)
"""
    with served(root, tmp_path / "mnt", direct_bytes=0, memory_bytes=1 << 20) as mount:

        def run(count: int) -> int:
            with python(reads, mount.directory, count) as reader:
                assert reader.wait(300) == 0
            (worker,) = mount.workers()
            return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * 4096

        before = run(5_000)
        assert run(100_000) - before < 8 << 20


def test_memory_stays_within_its_budget_whatever_is_read(tmp_path: Path) -> None:
    """A file many times the budget, by several readers at once."""
    root = tmp_path / "store"
    root.mkdir()
    with (root / "plain").open("wb") as file:
        file.truncate(512 << 20)
    with served(root, tmp_path / "mnt", memory_bytes=32 << 20) as mount:
        (worker,) = mount.workers()

        def resident() -> int:
            return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * 4096

        before = resident()
        commands = ["cat", str(mount.directory / "plain")]
        readers = [subprocess.Popen(commands, stdout=subprocess.DEVNULL) for _ in range(3)]
        most = before
        while any(reader.poll() is None for reader in readers):
            most = max(most, resident())
            time.sleep(0.005)
        assert [reader.returncode for reader in readers] == [0, 0, 0]
        assert most - before < 64 << 20
