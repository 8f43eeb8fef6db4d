"""Symbolic links in a folder of a store: made through a `--rw` mount, read by every face."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bootseer.errors import NotFoundError
from bootseer.stripedfs.format.manifest import Link
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write.gc import collect_garbage
from bootseer.stripedfs.write.put import put_into
from tests.support.labs.web_servers import nginx
from tests.support.mounts.checkpoints import (
    CHUNK,
    SMALL,
    WIDTH,
    Served,
    content,
    put_bytes,
    served,
    store_of,
    stripe,
)
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
WRITING = {"width": WIDTH, "chunk_bytes": CHUNK}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def mount(root: Path, tmp_path: Path) -> Iterator[Served]:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        yield mount


def save_steps(top: Path) -> None:
    """Two checkpoints, and links to the last one as savers make them."""
    for step in (100, 200):
        (top / f"step-{step}").mkdir()
        (top / f"step-{step}" / "model.pt").write_bytes(content(SIZE, step))
        (top / f"step-{step}" / "small").write_bytes(b"%d" % step)
        os.symlink(f"step-{step}", top / ".last")
        os.replace(top / ".last", top / "last")
    os.symlink("../step-100/model.pt", top / "step-200" / "before.pt")
    os.symlink("nowhere", top / "dangling")


def test_links_are_made_replaced_read_and_removed(mount: Served, root: Path) -> None:
    top = mount.directory

    def check() -> None:
        save_steps(top)
        assert os.readlink(top / "last") == "step-200"
        assert sorted(os.listdir(top)) == ["dangling", "last", "step-100", "step-200"]
        assert (top / "last").is_symlink()
        assert not (top / "step-100").is_symlink()
        assert (top / "last/model.pt").read_bytes() == content(SIZE, 200)
        assert (top / "last/before.pt").read_bytes() == content(SIZE, 100)
        assert os.lstat(top / "last").st_size == len("step-200")
        assert not (top / "dangling").exists()
        (top / "last/new").write_bytes(b"new")
        assert (top / "step-200/new").read_bytes() == b"new"
        os.rename(top / "last", top / "latest")  # the link, not what it leads to
        assert not os.path.lexists(top / "last")
        assert os.readlink(top / "latest") == "step-200"
        (top / "latest").unlink()
        assert (top / "step-200/small").read_bytes() == b"200"
        shutil.rmtree(top / "step-200")
        (top / "dangling").unlink()

    in_time(check)
    assert sorted(os.listdir(root)) == ["step-100"]


def test_links_and_files_take_each_others_names(mount: Served, root: Path) -> None:
    top = mount.directory

    def check() -> None:
        for size in (5, SIZE):
            (top / "data").write_bytes(content(size))
            os.symlink("data", top / "link")
            (top / "other").write_bytes(content(size, 1))
            os.replace(top / "other", top / "link")
            assert (top / "link").read_bytes() == content(size, 1)
            os.symlink("data", top / "tmp")
            os.replace(top / "tmp", top / "link")
            assert (top / "link").read_bytes() == content(size)
            (top / "link").write_bytes(content(size, 2))  # through it
            assert (top / "data").read_bytes() == content(size, 2)
            assert os.readlink(top / "link") == "data"
            (top / "link").unlink()
            (top / "data").unlink()

    in_time(check)
    assert os.listdir(root) == []


@pytest.mark.parametrize("target", ["/etc/hosts", "..", "../x", "a/../../x", "a/../b"])
def test_targets_that_may_leave_the_mount_are_refused(
    mount: Served, root: Path, target: str
) -> None:
    assert refusal(lambda: os.symlink(target, mount.directory / "last")) == errno.EXDEV
    assert os.listdir(root) == []


def test_a_link_cannot_be_moved_to_where_it_leads_out(mount: Served) -> None:
    top = mount.directory

    def check() -> None:
        (top / "a").mkdir()
        (top / "x").write_bytes(b"x")
        os.symlink("../x", top / "a/link")
        with pytest.raises(OSError, match="cross-device") as refused:
            os.rename(top / "a/link", top / "link")
        assert refused.value.errno == errno.EXDEV
        assert (top / "a/link").read_bytes() == b"x"

    in_time(check)


def test_a_link_in_the_store_never_leads_out_of_a_mount(tmp_path: Path, root: Path) -> None:
    (root / "sub").mkdir(parents=True)
    (root / "x").write_bytes(b"x")
    for name, target in (("beside", "../x"), ("inside", "y"), ("absolute", "/etc/passwd")):
        (root / f"sub/{name}.stripes").mkdir()
        (root / f"sub/{name}.stripes/CURRENT").write_bytes(Link(target, 0).encode())
    with served(root / "sub", tmp_path / "mnt") as mount:
        assert refusal(lambda: os.readlink(mount.directory / "beside")) == errno.EXDEV
        assert refusal(lambda: (mount.directory / "beside").read_bytes()) == errno.EXDEV
        assert refusal(lambda: os.readlink(mount.directory / "absolute")) == errno.EIO
        assert in_time(lambda: os.readlink(mount.directory / "inside")) == "y"
    with served(root, tmp_path / "mnt") as mount:
        assert in_time((mount.directory / "sub/beside").read_bytes) == b"x"
    with pytest.raises(NotFoundError, match="may lead out"):
        namespace.look_up(store_of(root / "sub"), "beside")


def test_links_outlive_the_mount_and_every_face_follows_them(tmp_path: Path, root: Path) -> None:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        in_time(lambda: save_steps(mount.directory))
        os.symlink("last", mount.directory / "latest")  # a link to a link
    store = store_of(root)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/rank0").write_bytes(content(SIZE, 7))
    put_into(store, "tree", str(tmp_path / "tree"), settings=SMALL)
    with served(root, tmp_path / "mnt", writable=True) as mount:
        os.symlink("tree", mount.directory / "tree-link")
        assert in_time(lambda: os.readlink(mount.directory / "last")) == "step-200"
        assert in_time((mount.directory / "latest/model.pt").read_bytes) == content(SIZE, 200)
        assert in_time((mount.directory / "tree-link/rank0").read_bytes) == content(SIZE, 7)
    listed = json.loads(stripe("ls", "--json", root).stdout)
    assert {e["name"].rpartition("/")[2]: e["target"] for e in listed if e["kind"] == "link"} == {
        "dangling": "nowhere",
        "last": "step-200",
        "latest": "last",
        "tree-link": "tree",
    }
    for way in ("last/small", "latest/small"):
        assert stripe("cat", root / way).stdout == "200"
    assert "model.pt" in stripe("ls", root / "last").stdout
    got = stripe("get", root / "last/before.pt", tmp_path / "got")
    assert got.returncode == 0, got.stderr
    assert (tmp_path / "got").read_bytes() == content(SIZE, 100)
    assert stripe("verify", root / "tree-link").returncode == 0


@pytest.mark.debian("nginx-light")
def test_fsspec_reads_through_links(tmp_path: Path, root: Path) -> None:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        in_time(lambda: save_steps(mount.directory))
    for path in (tmp_path, *root.rglob("*")):
        path.chmod(0o755)
    server = f"listen 127.0.0.1:PORT; root {root};"
    with nginx(tmp_path / "nginx", server) as port:
        for base in (f"striped::file://{root}", f"striped://http://127.0.0.1:{port}"):
            files, top = fsspec.core.url_to_fs(base)
            with contextlib.closing(files):
                assert files.cat_file(f"{top}/last/model.pt") == content(SIZE, 200)
                assert files.cat_file(f"{top}/last/before.pt") == content(SIZE, 100)
                assert files.cat_file(f"{top}/step-200/before.pt") == content(SIZE, 100)
                assert files.info(f"{top}/last/small")["size"] == 3
    files, top = fsspec.core.url_to_fs(f"striped::file://{root}")
    assert files.isdir(f"{top}/last")
    entry = next(e for e in files.ls(top) if e["name"].endswith("/last"))
    assert (entry["type"], entry["destination"]) == ("link", "step-200")
    with files.open(f"{top}/last/small", "wb") as file:
        file.write(b"anew")
    assert files.cat_file(f"{top}/step-200/small") == b"anew"
    with pytest.raises(NotADirectoryError):
        files.pipe(f"{top}/last/none", b"x")
    files.rm(f"{top}/last")
    assert files.cat_file(f"{top}/step-200/model.pt") == content(SIZE, 200)
    assert not files.exists(f"{top}/last")


def test_links_in_a_circle_are_told_and_gc_leaves_links(tmp_path: Path, root: Path) -> None:
    store = store_of(root)
    put_bytes(store, "x", content(SIZE), tmp_path)
    for name, target in (("a", "b"), ("b", "a"), ("c", "c/d"), ("x", "y")):
        (root / f"{name}.stripes").mkdir(exist_ok=True)
        (root / f"{name}.stripes/CURRENT").write_bytes(Link(target, 0).encode())
    for name in ("a", "c", "a/x"):
        with pytest.raises(NotFoundError, match="leads to itself"):
            namespace.look_up(store, name)
    gone = [each.reason for each in collect_garbage(store, "x", grace_s=0)]
    assert gone == ["unreferenced version"]
    assert namespace.look_up(store, "x", follow=False).link == "y"
