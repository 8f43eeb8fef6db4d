"""fsspec and file objects over a real web server: chains without aiohttp, and own connections."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.errors import CorruptDataError
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.write.put import put_into
from tests.support.labs.web_servers import nginx, open_sockets
from tests.support.mounts.checkpoints import CHUNK, SMALL, content, put_bytes, store_of

pytestmark = pytest.mark.debian("nginx-light")

SIZE = 5 * CHUNK + 9
WIDE = 100 * CHUNK
PRELUDE = "import sys\nsys.modules['aiohttp'] = None\nimport fsspec\n"


@pytest.fixture(scope="module")
def www(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "www").mkdir()
    (folder / "www/plain").write_bytes(content(SIZE, seed=1))
    put_bytes(store_of(folder / "www/dir"), "ckpt", content(SIZE), folder)
    put_bytes(store_of(folder / "www/dir"), "wide", content(WIDE), folder)
    (folder / "run/deep").mkdir(parents=True)
    (folder / "run/nine").write_bytes(b"nine")
    (folder / "run/deep/large").write_bytes(content(SIZE, seed=2))
    put_into(store_of(folder / "www/dir"), "run", str(folder / "run"), settings=SMALL)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder / "www"


@pytest.fixture(scope="module")
def port(www: Path) -> Iterator[int]:
    server = f"listen 127.0.0.1:PORT; root {www}; keepalive_timeout 600;"
    with nginx(www.parent / "run", server) as port:
        yield port


def said(code: str, *words: str) -> str:
    """What a Python without aiohttp prints, or the last line of its error."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *words], capture_output=True, text=True, check=False
    )
    return (done.stderr or done.stdout).strip().rpartition("\n")[2]


READ = """
with fsspec.open(sys.argv[1]) as file:
    print(file.read() == open(sys.argv[2], "rb").read())
"""
REGISTER = "from bootseer.stripedfs.fs import register; register()\n"


@pytest.mark.parametrize(
    ("prefix", "first"), [("striped://", ""), ("striped::", REGISTER), ("", REGISTER)]
)
@pytest.mark.parametrize("name", ["dir/ckpt", "plain"])
def test_a_web_address_is_read_without_aiohttp(
    port: int, tmp_path: Path, prefix: str, first: str, name: str
) -> None:
    (tmp_path / "same").write_bytes(content(SIZE, seed=int(name == "plain")))
    url = f"{prefix}http://127.0.0.1:{port}/{name}"
    assert said(first + READ, url, f"{tmp_path}/same") == "True"


def test_ranges_leave_no_connection_when_their_file_system_is_closed(port: int) -> None:
    """Each file system reads by its own store, not by that of the one before, which was closed."""
    address = f"http://127.0.0.1:{port}/dir/wide"
    data, before = content(WIDE), open_sockets()
    for number in range(10):
        starts = range(number * CHUNK, WIDE - 10, 10 * CHUNK)  # chunks that nobody has read yet
        fs = StripedFileSystem(target_protocol="http")
        got = fs.cat_ranges([address] * len(starts), list(starts), [n + 10 for n in starts])
        assert got == [data[n : n + 10] for n in starts]
        assert open_sockets() - before, "it has connections that it keeps"
        fs.close()
        until_s = time.monotonic() + 10  # one may be given back after its last byte was taken
        while (left := open_sockets() - before) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not left


def write_plain(path: Path, data: bytes, mtime_s: int) -> None:
    """Put a file in another's place. If both have one length, nginx goes by whole seconds."""
    draft = path.with_name("draft")
    draft.write_bytes(data)
    draft.chmod(0o644)
    os.utime(draft, (mtime_s, mtime_s))
    draft.rename(path)


@pytest.mark.parametrize("name", ["plain-key", "key"])
def test_keys_of_caches_change_with_a_file_and_with_nothing_else(
    port: int, www: Path, name: str
) -> None:
    url, seen = f"http://127.0.0.1:{port}/dir/{name}", set()
    with contextlib.closing(StripedFileSystem(target_protocol="http")) as fs:
        for seed in range(3):
            if name == "key":
                put_bytes(store_of(www / "dir"), name, content(SIZE, seed), www.parent)
            else:
                write_plain(www / "dir" / name, content(SIZE, seed), 1_700_000_000 + seed)
            assert fs.cat_file(url) == content(SIZE, seed)
            keys = {fs.ukey(url), fs.checksum(url), fs.ukey(url)}
            with contextlib.closing(StripedFileSystem(target_protocol="http")) as another:
                assert keys == {another.ukey(url)} == {another.checksum(f"striped::{url}")}
            seen |= keys
    assert len(seen) == 3


def test_without_a_version_nothing_is_kept_by_its_key(www: Path) -> None:
    """All such files had one key, for ever: nothing."""
    server = f"listen 127.0.0.1:PORT; root {www}; etag off; add_header Last-Modified '';"
    with nginx(www.parent / "bare", server) as port:
        url = f"http://127.0.0.1:{port}/plain"
        with contextlib.closing(StripedFileSystem(target_protocol="http")) as fs:
            assert "ETag" not in fs.info(url)
            keys = [fs.ukey(url), fs.checksum(url), fs.ukey(url)]
    assert all(keys)
    assert len(set(keys)) == 3


def test_files_of_a_directory_checkpoint_are_read(port: int) -> None:
    root = f"http://127.0.0.1:{port}/dir"
    with contextlib.closing(StripedFileSystem(target_protocol="http")) as fs:
        assert fs.find(f"{root}/run") == [f"{root}/run/deep/large", f"{root}/run/nine"]
        assert fs.cat_file(f"striped::{root}/run/nine") == b"nine"
        assert fs.info(f"{root}/run/nine")["size"] == 4
        assert fs.isdir(f"{root}/run/deep")
        assert fs.ls(f"{root}/run/deep", detail=False) == [f"{root}/run/deep/large"]
        with fs.open(f"{root}/run/deep/large") as file:
            assert file.read() == content(SIZE, seed=2)
        for missing in ("run/ten", "run/deep/ten", "none/nine", "ckpt/nine"):
            assert not fs.exists(f"{root}/{missing}")
            with pytest.raises(FileNotFoundError):
                fs.open(f"{root}/{missing}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_distributed_checkpoint_from_the_web(
    port: int, www: Path, tmp_path: Path
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weights": torch.arange(50_000, dtype=torch.float32)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    put_into(store_of(www / "dir"), "dcp", str(tmp_path / "dcp"), settings=SMALL)
    code = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
state = {"weights": torch.zeros(50_000)}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
print(torch.equal(state["weights"], torch.arange(50_000, dtype=torch.float32)))
"""
    assert said(REGISTER + code, f"striped::http://127.0.0.1:{port}/dir/dcp") == "True"


def test_a_chain_through_fsspecs_own_http_says_what_that_lacks() -> None:
    assert "aiohttp" in said(READ, "striped::http://127.0.0.1:9/x", os.devnull)


def test_an_http_of_fsspec_that_works_is_left_alone() -> None:
    code = "fsspec.register_implementation('http', fsspec.get_filesystem_class('memory'), True)\n"
    tell = "print(*(fsspec.get_filesystem_class(p).__name__ for p in ('http', 'https')))"
    assert said(code + REGISTER + tell) == "MemoryFileSystem StripedHttp"


# --- connections ------------------------------------------------------------------------------


def sockets_to(port: int) -> set[str]:
    """This process's connections to a port of ours, by the inodes of their sockets."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    there = {w[9] for w in lines if w[2] == f"0100007F:{port:04X}" and w[3] == "01"}
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing's own
            continue
    return {inode for inode in there if f"socket:[{inode}]" in mine}


def test_a_file_from_a_pickle_closes_the_store_that_it_opened(port: int) -> None:
    url = f"http://127.0.0.1:{port}/dir/ckpt"
    files = StripedFileSystem(target_protocol="http")
    with stripedfs.open(url) as first, files.open(url) as second:
        packed = [pickle.dumps(first), pickle.dumps(second)]
    files.close()
    before = sockets_to(port)
    for each in packed:
        with pickle.loads(each) as again:
            assert again.read() == content(SIZE)
            assert sockets_to(port) - before
        assert not sockets_to(port) - before


def test_a_pickle_of_replaced_bytes_leaves_no_connection(port: int, www: Path) -> None:
    url = f"http://127.0.0.1:{port}/dir/replaced"
    put_bytes(store_of(www / "dir"), "replaced", content(SIZE), www.parent)
    with stripedfs.open(url) as file:
        packed = pickle.dumps(file)
    put_bytes(store_of(www / "dir"), "replaced", content(SIZE, seed=2), www.parent)
    before = sockets_to(port)
    with pytest.raises(CorruptDataError, match="another one"):
        pickle.loads(packed)
    assert not sockets_to(port) - before


def _read_in_child(
    files: StripedFileSystem, url: str, port: int, inherited: set[str], results: object
) -> None:
    right = files.cat_file(url) == content(SIZE)
    results.put((right, bool(sockets_to(port) - inherited)))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_forked_child_takes_no_connection_of_its_parent(port: int) -> None:
    url = f"http://127.0.0.1:{port}/dir/ckpt"
    files = StripedFileSystem(target_protocol="http")
    assert files.cat_file(url) == content(SIZE)
    assert sockets_to(port)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(
        target=_read_in_child, args=(files, url, port, sockets_to(port), results)
    )
    child.start()
    assert results.get(timeout=60) == (True, True)
    child.join(60)
    assert files.cat_file(url) == content(SIZE)
    files.close()
