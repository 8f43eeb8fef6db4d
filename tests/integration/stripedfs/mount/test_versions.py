"""A checkpoint that is replaced while it is open: its readers never get bytes of the new one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.operations import ROOT, FileSystemError, Inode
from bootseer.stripedfs.mount import read_tree as trees
from bootseer.stripedfs.read import namespace
from tests.support.mounts.checkpoints import CHUNK, SMALL, put_bytes, served, store_of, tree_at
from tests.support.mounts.fuse import in_time, mounted, python, refusal
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 30 * CHUNK + 55
OLD, NEW = b"A" * SIZE, b"B" * SIZE
FACES = {"direct": 0, "buffered": 1 << 62}
MAPPED = """
import mmap
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(chr(mapped[9]), flush=True)
sys.stdin.readline()
print("".join(sorted(set(mapped[:].decode()))), flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    replace(tmp_path / "store", "ckpt", OLD, tmp_path)
    replace(tmp_path / "store", "plain", OLD, tmp_path)
    return tmp_path / "store"


def replace(root: Path, name: str, data: bytes, scratch: Path) -> None:
    """Put another version under a name."""
    if name == "ckpt":
        put_bytes(store_of(root), name, data, scratch)
    else:
        store_of(root).replace(name, data)


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetcher]:
    """For trees that ask the store for every name anew."""
    monkeypatch.setattr(trees, "REFRESH_S", -1.0)
    with Fetcher() as fetcher:
        yield fetcher


def whole(path: Path) -> bytes:
    return in_time(path.read_bytes)


def rest_of(fd: int) -> bytes:
    """What an old opening gives; nothing when it is refused, as it may be."""
    try:
        return bytes(in_time(lambda: os.pread(fd, SIZE, 0)))
    except OSError:
        return b""


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", ["ckpt", "plain"])
def test_who_has_the_old_version_open_never_reads_the_new(
    root: Path, tmp_path: Path, fetcher: Fetcher, face: str, name: str
) -> None:
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher, direct_bytes=FACES[face])
    with mounted(tree, tmp_path / "mnt", timeout_s=0.0) as (directory, _):
        fd = in_time(lambda: os.open(directory / name, os.O_RDONLY))
        try:
            assert in_time(lambda: os.pread(fd, 10, 0)) == OLD[:10]
            replace(root, name, NEW, tmp_path)
            assert whole(directory / name) == NEW
            assert set(rest_of(fd)) <= set(OLD)
            assert whole(directory / name) == NEW
            if name == "ckpt":  # whose old version is on the store still
                assert rest_of(fd) == OLD
                assert in_time(lambda: os.fstat(fd)).st_size == SIZE
        finally:
            os.close(fd)


@pytest.mark.parametrize("face", FACES)
def test_a_mapping_of_the_old_version_never_shows_the_new(
    root: Path, tmp_path: Path, fetcher: Fetcher, face: str
) -> None:
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher, direct_bytes=FACES[face])
    with (
        mounted(tree, tmp_path / "mnt", timeout_s=0.0) as (directory, _),
        python(MAPPED, directory / "ckpt", stdin=subprocess.PIPE) as reader,
    ):
        assert reader.stdout is not None
        assert in_time(reader.stdout.readline) == "A\n"
        replace(root, "ckpt", NEW, tmp_path)
        assert whole(directory / "ckpt") == NEW
        said, _ = reader.communicate("go on\n", timeout=60)
        assert (said, reader.returncode) == ("A\n", 0)


def test_a_server_that_numbers_by_paths_refuses_the_old_opening(
    root: Path, tmp_path: Path, fetcher: Fetcher
) -> None:
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher, inode_a_path=True)
    inode = tree.lookup(ROOT, b"ckpt").inode
    old = tree.open(inode, os.O_RDONLY).handle
    replace(root, "ckpt", NEW, tmp_path)
    again = tree.lookup(ROOT, b"ckpt").inode
    new = tree.open(again, os.O_RDONLY)
    assert not new.keep_cache
    with pytest.raises(FileSystemError) as caught:
        tree.read(inode, old, 0, 10, lambda: pytest.fail("waits"))
    assert caught.value.errno == errno.ESTALE
    assert tree.open(again, os.O_RDONLY).handle != new.handle  # and others of these bytes go on
    assert tree.files.get(new.handle) is not None
    tree.destroy()


def test_what_is_opened_is_what_the_name_meant(
    root: Path, tmp_path: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that went between the look at its name and its opening."""
    monkeypatch.setattr(trees, "REFRESH_S", 1000.0)
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher)
    inode = tree.lookup(ROOT, b"ckpt").inode
    replace(root, "ckpt", NEW, tmp_path)
    for folder in sorted((root / "ckpt.stripes").glob("v-*")):
        if folder.name not in (root / "ckpt.stripes" / "CURRENT").read_text():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    with pytest.raises(FileSystemError) as caught:
        tree.open(inode, os.O_RDONLY)
    assert caught.value.errno == errno.ESTALE
    again = tree.lookup(ROOT, b"ckpt").inode  # as the kernel does then
    assert again != inode
    tree.open(again, os.O_RDONLY)
    tree.destroy()


def test_a_mounted_file_that_is_replaced_is_seen(
    root: Path, tmp_path: Path, fetcher: Fetcher
) -> None:
    tree = tree_at(trees.StripedTree, store_of(root), "ckpt", fetcher)
    with mounted(tree, tmp_path / "mnt", timeout_s=0.0) as (directory, _):
        assert whole(directory / "ckpt") == OLD
        replace(root, "ckpt", NEW + b"more", tmp_path)
        assert whole(directory / "ckpt") == NEW + b"more"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_reader_of_a_dead_server_goes_on_with_its_bytes_or_has_an_error(
    root: Path, tmp_path: Path, replaced: bool
) -> None:
    with (
        served(root, tmp_path / "mnt", direct_bytes=1 << 62) as mount,
        (mount.directory / "ckpt").open("rb", buffering=0) as file,
    ):
        assert in_time(lambda: file.read(10)) == OLD[:10]
        if replaced:
            replace(root, "ckpt", NEW, tmp_path)
        (worker,) = mount.workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: worker not in mount.workers() and mount.workers())
        refused = refusal(lambda: os.pread(file.fileno(), 10, SIZE - 10))
        assert refused in ((None, errno.EIO, errno.ESTALE) if replaced else (None,))
        assert set(rest_of(file.fileno())) <= set(OLD)


def test_a_node_lives_until_the_kernel_forgets_it(root: Path, fetcher: Fetcher) -> None:
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "x").write_bytes(b"x")
    folder = tree.lookup(ROOT, b"deep").inode
    deeper = tree.lookup(folder, b"er").inode
    inode = tree.lookup(deeper, b"x").inode
    tree.lookup(deeper, b"x")
    (root / "deep" / "er" / "x").unlink()
    (root / "deep" / "er").rmdir()
    (root / "deep").rmdir()
    assert [e.name for e in tree.readdir(ROOT)] == [b"ckpt", b"plain"]
    assert tree.getattr(inode).size_bytes == 1
    tree.forget(inode, 1)
    assert tree.getattr(inode).size_bytes == 1
    tree.forget(inode, 1)
    tree.forget(deeper, 1)
    tree.forget(folder, 1)
    for gone in (inode, deeper, folder):
        with pytest.raises(FileSystemError) as caught:
            tree.getattr(gone)
        assert caught.value.errno == errno.ESTALE
    known = {node.inode for node in tree.nodes.all()}
    assert known == {ROOT} | {e.attr.inode for e in tree.readdir(ROOT)}
    assert len(tree.nodes._known) == len(known)
    tree.destroy()


def test_listings_count_as_references(root: Path, tmp_path: Path, fetcher: Fetcher) -> None:
    """The kernel has a file from `ls` alone: it must be there until it is forgotten."""
    tree = tree_at(trees.StripedTree, store_of(root), "", fetcher)
    with mounted(tree, tmp_path / "mnt", timeout_s=60.0) as (directory, _):
        listed = in_time(lambda: {e.name: e.inode() for e in os.scandir(directory)})
        node = tree.nodes.get(Inode(listed["ckpt"]))
        assert node is not None
        assert node.references == 1
        until(lambda: node.references == 1)


def test_appending_goes_on_with_what_was_there(root: Path, tmp_path: Path) -> None:
    """A version of the same size by somebody else is not taken for ours."""
    from bootseer.stripedfs.mount.inodes import Node
    from bootseer.stripedfs.mount.open_for_writing import WritableFile

    store = store_of(root)
    with Fetcher() as fetcher:
        found = namespace.look_up(store, "ckpt")
        saving = WritableFile(store, Node(Inode(5), "ckpt", ROOT, found), SMALL, fetcher)
        saving.size_bytes = SIZE
        replace(root, "ckpt", NEW, tmp_path)
        for folder in (root / "ckpt.stripes").glob("v-*"):
            if folder.name == found.version.pointer.version:  # type: ignore[union-attr]
                for path in folder.iterdir():
                    path.unlink()
        with pytest.raises(FileSystemError):
            saving.write(SIZE, memoryview(b"x"))
        with pytest.raises(FileSystemError):
            saving.publish()
    assert namespace.look_up(store, "ckpt").size_bytes == SIZE


def test_a_save_in_place_ends_the_readers_of_what_was(root: Path, tmp_path: Path) -> None:
    from bootseer.stripedfs.mount.write_tree import WritableTree

    with Fetcher() as fetcher:
        tree = tree_at(WritableTree, store_of(root), "", fetcher, writing=SMALL)
        with mounted(tree, tmp_path / "mnt", timeout_s=0.0, read_only=False) as (directory, _):
            fd = in_time(lambda: os.open(directory / "ckpt", os.O_RDONLY))
            try:
                assert in_time(lambda: os.pread(fd, 10, 0)) == OLD[:10]
                in_time(lambda: (directory / "ckpt").write_bytes(NEW))
                assert refusal(lambda: os.pread(fd, 10, SIZE - 10)) == errno.ESTALE
                assert whole(directory / "ckpt") == NEW
            finally:
                os.close(fd)
