"""The same bytes from a real HDFS, by WebHDFS and hdfs-native, through every face."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bootseer import stripedfs
from bootseer.storage.open import open_store
from bootseer.storage.store import WriteHints
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import CHUNK, SMALL, content, put_bytes, served, stripe
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]

BLOCK = 1 << 20
PLAIN_SIZE = 3 * BLOCK + 4321


@pytest.fixture(params=["webhdfs", "hdfs"])
def url(request: pytest.FixtureRequest, hdfs: Any, hdfs_folder: str) -> str:
    base = hdfs.webhdfs_url if request.param == "webhdfs" else hdfs.hdfs_url
    return f"{base}{hdfs_folder}"


@pytest.mark.parametrize("user", ["", "alice"])
def test_what_lies_below_a_file_is_not_there(
    url: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To those whom permissions bind as well, whom HDFS forbids to enter the file."""
    if user:  # as hdfs:// sets it, for the whole process and the tests after this one
        monkeypatch.setenv("HADOOP_USER_NAME", user)
    files, top = fsspec.core.url_to_fs(
        f"striped::{url}", options={"user": user}, writing={"width": 3, "chunk_bytes": CHUNK}
    )
    files.pipe({f"{top}/plain": b"plain", f"{top}/big": content(5 * CHUNK)})
    for below in (f"{top}/{name}/{tail}" for name in ("plain", "big") for tail in ("x", "x/y/z")):
        assert not files.exists(below)
        assert not files.isdir(below)
        for call in (files.info, files.ls, files.open, files.rm):
            with pytest.raises(FileNotFoundError):
                call(below)
        [found] = files.cat_ranges([below], [0], [1])
        assert isinstance(found, FileNotFoundError)
        for write in (
            lambda path: files.pipe_file(path, b"x"),
            lambda path: files.pipe_file(path, content(5 * CHUNK)),
            files.makedirs,
            lambda path: files.mv(f"{top}/plain", path),
        ):
            with pytest.raises(NotADirectoryError):
                write(below)
    assert files.cat_file(f"{top}/plain") == b"plain"


def test_every_face_gives_the_bytes_of_odd_sizes(url: str, tmp_path: Path) -> None:
    store = open_store(url)
    files = {}
    for size in (1, CHUNK + 1, 11 * CHUNK + 77):
        files[f"striped-{size}"] = files[f"plain-{size}"] = content(size)
        put_bytes(store, f"striped-{size}", content(size), tmp_path)
        store.replace(f"plain-{size}", content(size))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_bytes(content(5 * CHUNK + 1))
    put_into(store, "tree", str(folder), settings=SMALL)
    files["tree/x"] = content(5 * CHUNK + 1)
    filesystem, top = fsspec.core.url_to_fs(f"striped::{url}")
    assert sorted(p.removeprefix(f"{top}/") for p in filesystem.find(top)) == sorted(files)
    chance = random.Random(7)
    with (
        served(url, tmp_path / "direct", direct_bytes=0) as direct,
        served(url, tmp_path / "buffered", direct_bytes=1 << 62) as buffered,
    ):
        for name, whole in files.items():
            with stripedfs.open(f"{url}/{name}") as file:
                assert file.read() == whole
            assert filesystem.cat_file(f"{top}/{name}") == whole
            for mount in (direct, buffered):
                assert in_time((mount.directory / name).read_bytes) == whole
            for _ in range(3):
                offset, length = chance.randrange(len(whole)), chance.randrange(1, len(whole) + 5)
                wanted = whole[offset : offset + length]
                assert filesystem.cat_file(f"{top}/{name}", offset, offset + length) == wanted
                with (direct.directory / name).open("rb", buffering=0) as opened:
                    fd = opened.fileno()
                    assert in_time(lambda fd=fd, n=length, o=offset: os.pread(fd, n, o)) == wanted


def test_a_plain_file_is_read_by_its_blocks(url: str, tmp_path: Path) -> None:
    store = open_store(url)
    whole = content(PLAIN_SIZE)
    with store.writer("plain", WriteHints(block_bytes=BLOCK)) as writer:
        writer.write(whole)
    source = stripedfs.open(f"{url}/plain").source
    assert source.ends_stretch("plain", 5) == BLOCK
    if url.startswith("webhdfs"):  # hdfs-native chooses among replicas itself
        assert source.replicas("plain", 5)
    with stripedfs.open(f"{url}/plain") as file:
        assert file.read() == whole
    with served(f"{url}/plain", tmp_path / "mnt", direct_bytes=0) as mount:
        path = mount.directory / "plain"
        assert in_time(path.read_bytes) == whole
        with path.open("rb", buffering=0) as opened:
            across = in_time(lambda: os.pread(opened.fileno(), 1000, 2 * BLOCK - 500))
            assert across == whole[2 * BLOCK - 500 : 2 * BLOCK + 500]


def test_what_is_saved_through_a_mount_is_there(url: str, tmp_path: Path) -> None:
    writing = {"width": 3, "chunk_bytes": CHUNK}
    with served(f"{url}/saved", tmp_path / "mnt", writable=True, writing=writing) as mount:

        def save() -> None:
            (mount.directory / "deep").mkdir()
            (mount.directory / "deep" / "tmp").write_bytes(content(9 * CHUNK + 3))
            (mount.directory / "deep" / "tmp").rename(mount.directory / "deep" / "x")
            (mount.directory / "small").write_bytes(b"old")
            (mount.directory / "small").write_bytes(b"small")
            (mount.directory / "gone").write_bytes(content(9 * CHUNK))
            (mount.directory / "gone").unlink()
            for name in ("early", "ended"):  # renamed, or removed, before it is closed
                with contextlib.suppress(OSError), (mount.directory / "tmp").open("wb", 0) as file:
                    os.ftruncate(file.fileno(), 9 * CHUNK + 4)
                    file.write(content(9 * CHUNK + 4))
                    if name == "early":
                        (mount.directory / "tmp").rename(mount.directory / "early")
                    else:
                        (mount.directory / "tmp").unlink()

        in_time(save)
        open_store(f"{url}/saved/hidden/killed.stripes").replace(".tmp-1", b"")
        assert refusal((mount.directory / "hidden").rmdir) == errno.ENOTEMPTY
        assert in_time((mount.directory / "deep" / "x").read_bytes) == content(9 * CHUNK + 3)
    with stripedfs.open(f"{url}/saved/deep/x") as file:
        assert file.read() == content(9 * CHUNK + 3)
    with stripedfs.open(f"{url}/saved/early") as file:
        assert file.read() == content(9 * CHUNK + 4)
    store = open_store(f"{url}/saved")
    store.delete_tree("hidden")
    assert sorted(s.name for s in store.list("")) == ["deep", "early.stripes", "small"]
    assert len(list(store.list("early.stripes"))) == 2
    assert list(store.temporaries("")) == []
    assert [s.name for s in store.list("deep")] == ["deep/x.stripes"]


def test_links_and_whole_checkpoints_are_saved_through_a_mount(url: str, tmp_path: Path) -> None:
    writing = {"width": 3, "chunk_bytes": CHUNK}
    shards = {"__0_0.distcp": 100, "__1_0.distcp": 9 * CHUNK + 3}
    with served(f"{url}/saved", tmp_path / "mnt", writable=True, writing=writing) as mount:
        run = mount.directory / "run"

        def save(step: int) -> None:
            for name, size in shards.items():
                (run / name).write_bytes(content(size, step))
            (run / ".metadata.tmp").write_bytes(f"{step} {' '.join(shards)}".encode())
            (run / ".metadata").unlink(missing_ok=True)
            (run / ".metadata.tmp").rename(run / ".metadata")
            os.symlink("run", mount.directory / ".last")
            os.replace(mount.directory / ".last", mount.directory / "last")
            (run / "other").write_bytes(b"other")

        in_time(run.mkdir)
        for step in (1, 2, 3):
            in_time(lambda step=step: save(step))
            for name, size in shards.items():
                assert in_time((mount.directory / "last" / name).read_bytes) == content(size, step)
                for way in ("run", "last"):
                    with stripedfs.open(f"{url}/saved/{way}/{name}") as file:
                        assert file.read() == content(size, step)
            assert in_time((run / "other").read_bytes) == b"other"
        in_time(lambda: (mount.directory / "large").write_bytes(content(9 * CHUNK)))
        for path in (run / "other", mount.directory / "large"):
            in_time(lambda path=path: path.chmod(0o640))
            in_time(lambda path=path: os.utime(path, ns=(1, 1_500_000_000_000_000_007)))
        in_time(lambda: (mount.directory / "large").rename(mount.directory / "moved"))
    with served(f"{url}/saved", tmp_path / "mnt") as mount:
        for name in ("run/other", "moved"):
            status = in_time((mount.directory / name).stat)
            assert (status.st_mode & 0o777, status.st_mtime_ns % 1000) == (0o440, 7)
    store = open_store(f"{url}/saved")
    assert sorted(s.name for s in store.list("run")) == ["run/other", "run/other.stripes"]
    assert [s.name for s in store.list("last.stripes")] == ["last.stripes/CURRENT"]
    assert list(store.temporaries("run.stripes")) == []
    listed = stripe("ls", f"{url}/saved/run")
    assert [row.split()[-1].rpartition("/")[2] for row in listed.stdout.splitlines()] == [
        ".metadata",
        *shards,
        "other",
    ]


def test_torch_loads_from_it(url: str, tmp_path: Path) -> None:
    import torch

    state = {"weights": torch.arange(300_000, dtype=torch.float32)}
    with fsspec.open(f"striped::{url}/model.pt", "wb", striped={"writing": SMALL}) as file:
        torch.save(state, file)
    with stripedfs.open(f"{url}/model.pt") as file:
        assert torch.equal(torch.load(file)["weights"], state["weights"])
    with served(url, tmp_path / "mnt") as mount:
        loaded = in_time(lambda: torch.load(mount.directory / "model.pt", mmap=True))
        assert torch.equal(loaded["weights"], state["weights"])
        del loaded


def test_a_plain_file_that_is_replaced_is_an_error(url: str) -> None:
    store = open_store(url)
    store.replace("plain", content(5000))
    with stripedfs.open(f"{url}/plain") as file:
        store.replace("plain", content(5000, 1))
        with pytest.raises(Exception, match="changed while it was read"):
            file.read()


def test_a_name_that_datanodes_misread_costs_itself_only(
    hdfs: Any, hdfs_folder: str, tmp_path: Path
) -> None:
    web, native = f"{hdfs.webhdfs_url}{hdfs_folder}", f"{hdfs.hdfs_url}{hdfs_folder}"
    put_bytes(open_store(web), "good", content(5000), tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    refused = stripe("put", tmp_path / "file", f"{web}/a%20b%25c")
    assert (refused.returncode, "misread" in refused.stderr) == (7, True), refused.stderr
    listed = stripe("ls", web)
    assert (listed.returncode, listed.stderr) == (0, "")  # nothing is left of it

    put_bytes(open_store(native), "a b%c", content(5001), tmp_path)
    listed = stripe("ls", web)
    assert (listed.returncode, len(listed.stdout.splitlines())) == (7, 2)
    assert listed.stderr.startswith("bootseer: ")
    assert "a b%c" in listed.stderr
    assert stripe("ls", native).returncode == 0
    with served(web, tmp_path / "m", writable=True) as mount:
        assert in_time((mount.directory / "good").read_bytes) == content(5000)
        assert in_time(lambda: (mount.directory / "new").write_bytes(b"new")) == 3
        assert refusal(lambda: (mount.directory / "a b%c").open("rb")) == errno.EIO
