"""Modes and times of what is saved through a mount: kept, and gone with what they were set for."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.stripedfs.write.gc import collect_garbage
from tests.support.mounts.checkpoints import CHUNK, WIDTH, Served, content, served, store_of
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
WRITING = {"width": WIDTH, "chunk_bytes": CHUNK}
WHEN_NS = 1_600_000_000_123_456_789


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def mount(root: Path, tmp_path: Path) -> Iterator[Served]:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        yield mount


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of every kind with modes and times of long ago."""
    top = tmp_path / "tree"
    (top / "deep/empty").mkdir(parents=True)
    for number, name in enumerate(("small", "large", "deep/small", "deep/large", "none")):
        (top / name).write_bytes(content({"small": 5, "large": SIZE}.get(Path(name).name, 0)))
        (top / name).chmod((0o600, 0o644, 0o755, 0o444, 0o640)[number])
        os.utime(top / name, ns=(1, WHEN_NS + number * 10**9))
    os.symlink("small", top / "link")
    os.utime(top / "link", ns=(1, WHEN_NS), follow_symlinks=False)
    (top / "deep").chmod(0o700)
    for number, name in enumerate(("deep/empty", "deep", ".")):
        os.utime(top / name, ns=(1, -number * 10**9 + 5))
    return top


def described(top: Path) -> dict[str, tuple[str, int]]:
    """Mode and time of all that lies below a folder."""
    found = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(top))] = (stat.filemode(status.st_mode), status.st_mtime_ns)
    return found


def sync(source: Path, target: Path) -> str:
    words = ["rsync", "-a", "--itemize-changes", f"{source}/", f"{target}/"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.debian("rsync")
def test_rsync_transfers_nothing_the_second_time(tree: Path, root: Path, tmp_path: Path) -> None:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        target = mount.directory / "copy"
        assert "deep/large" in sync(tree, target)
        assert sync(tree, target) == ""
        assert in_time(lambda: described(target)) == described(tree)
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        assert sync(tree, mount.directory / "copy") == ""
        (tree / "small").write_bytes(b"other")
        assert sync(tree, mount.directory / "copy").split() == [">f..t......", "small"]
        assert sync(tree, mount.directory / "copy") == ""
        in_time(lambda: shutil.rmtree(mount.directory / "copy"))
    assert os.listdir(root) == []


def test_a_copied_tree_keeps_modes_and_times(
    tree: Path, mount: Served, root: Path, tmp_path: Path
) -> None:
    target = mount.directory / "copy"
    in_time(lambda: shutil.copytree(tree, target, symlinks=True))
    assert in_time(lambda: described(target)) == described(tree)
    in_time(lambda: target.rename(mount.directory / "moved"))
    target = mount.directory / "moved"
    for name in ("small", "deep"):
        in_time(lambda name=name: (target / name).rename(target / f"{name}-2"))
        (tree / name).rename(tree / f"{name}-2")
    assert in_time(lambda: described(target)) == described(tree)
    with served(root, tmp_path / "other") as other:
        found = in_time(lambda: described(other.directory / "moved"))
        assert {k: v[1] for k, v in found.items()} == {k: v[1] for k, v in described(tree).items()}
        assert found["deep-2/small"][0] == "-r-xr-xr-x"
    in_time(lambda: shutil.rmtree(target))
    assert os.listdir(root) == []


def test_what_is_set_while_a_file_is_written_is_kept(mount: Served) -> None:
    def check() -> None:
        for size in (5, SIZE):
            path = mount.directory / f"f{size}"
            before = os.umask(0o027)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            finally:
                os.umask(before)
            with open(fd, "wb", buffering=0) as file:
                file.write(content(size))
                assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
                os.utime(fd, ns=(1, WHEN_NS))
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
            assert path.stat().st_mtime_ns == WHEN_NS
            path.write_bytes(content(size, 1))  # a mode stays, a time does not
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
            assert path.stat().st_mtime_ns > WHEN_NS
            path.touch()
            os.utime(path, ns=(path.stat().st_mtime_ns, 7))
            assert path.stat().st_mtime_ns == 7
            assert path.read_bytes() == content(size, 1)

    in_time(check)


def test_a_folder_whose_name_is_too_long_to_keep_a_mode_is_made_without_one(mount: Served) -> None:
    folder, private = mount.directory / ("n" * 250), mount.directory / "private"
    assert refusal(lambda: folder.mkdir(mode=0o700)) == errno.ENAMETOOLONG
    in_time(folder.mkdir)
    assert refusal(lambda: folder.chmod(0o711)) == errno.ENAMETOOLONG
    in_time(lambda: (folder / "x").write_bytes(b"x"))
    in_time(lambda: shutil.rmtree(folder))
    in_time(lambda: private.mkdir(mode=0o700))
    assert refusal(lambda: private.rename(folder)) == errno.ENAMETOOLONG
    assert in_time(lambda: stat.S_IMODE(private.stat().st_mode)) == 0o700


def test_owners_are_refused(mount: Served) -> None:
    path = mount.directory / "x"
    in_time(lambda: path.write_bytes(b"x"))
    in_time(lambda: os.chown(path, os.geteuid(), -1))
    assert refusal(lambda: os.chown(path, 12, -1)) == errno.EPERM
    assert refusal(lambda: os.chown(path, -1, 12)) == errno.EPERM


def test_gc_removes_what_is_left_of_files_that_others_removed(root: Path, tmp_path: Path) -> None:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        for name in ("x", "y"):
            in_time(lambda name=name: (mount.directory / name).write_bytes(b"x"))
            in_time(lambda name=name: os.utime(mount.directory / name, ns=(1, WHEN_NS)))
    (root / "x").unlink()
    for name in ("x", "y"):
        found = [each.name for each in collect_garbage(store_of(root), name, grace_s=0)]
        assert found == (["x.stripes/ATTRIBUTES"] if name == "x" else [])
    assert sorted(os.listdir(root)) == ["y", "y.stripes"]


def test_attributes_are_of_the_bytes_they_were_set_for(root: Path, tmp_path: Path) -> None:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        for name in ("x", "y"):
            in_time(lambda name=name: (mount.directory / name).write_bytes(b"x"))
            in_time(lambda name=name: os.utime(mount.directory / name, ns=(1, WHEN_NS)))
    (root / "x").write_bytes(b"by another program")
    (root / "y.stripes/ATTRIBUTES").write_bytes(b"garbage")
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        for name in ("x", "y"):
            path = mount.directory / name
            assert in_time(path.stat).st_mtime_ns > WHEN_NS
            in_time(path.unlink)
    assert os.listdir(root) == []
