"""One checkpoint that cannot be looked at costs its own name, and none of those beside it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import AccessDeniedError, BootseerError, StoreUnavailableError
from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.mount import read_tree as trees
from bootseer.stripedfs.read import namespace
from tests.support.faulty_store import WrappedStore
from tests.support.labs.web_servers import FakeServer, Request, head, serve_range
from tests.support.mounts.checkpoints import content, put_bytes, served, store_of, stripe, tree_at
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`a` and `d` are whole, the pointer of `b` is garbage and that of `c` of a later format."""
    root = tmp_path / "store"
    for number, name in enumerate("abcd"):
        put_bytes(store_of(root), name, content(100_000 + number), tmp_path)
    (root / "b.stripes/CURRENT").write_bytes(b"garbage")
    pointer = json.loads((root / "c.stripes/CURRENT").read_bytes())
    (root / "c.stripes/CURRENT").write_text(json.dumps({**pointer, "version": 3}))
    return root


def test_ls_lists_the_others_and_says_what_is_wrong(root: Path) -> None:
    listed = stripe("ls", root)
    assert listed.returncode == 6, listed.stderr
    rows = [row.split() for row in listed.stdout.splitlines()]
    assert [row[-1] for row in rows] == [f"store/{name}" for name in "abcd"]
    assert rows[1][:2] == ["-", "unknown"]
    b, c = listed.stderr.splitlines()
    assert b.startswith("bootseer: store/b: ")
    assert "damaged" in b
    assert c.startswith("bootseer: store/c: ")
    assert "newer" in c

    listed = stripe("ls", "--json", root)
    assert listed.returncode == 6
    body = json.loads(listed.stdout)
    assert [(e["name"], e["exit_code"], bool(e["problem"])) for e in body] == [
        ("store/a", 0, False),
        ("store/b", 6, True),
        ("store/c", 7, True),
        ("store/d", 0, False),
    ]


def test_ls_of_a_directory_calls_a_file_without_its_manifest_damaged(tmp_path: Path) -> None:
    """It said to check the path, and ended as for a name that is not there."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "large").write_bytes(content(5_000_000))
    (run / "small").write_bytes(b"x")
    assert stripe("put", run, tmp_path / "store/run").returncode == 0
    (manifest,) = tmp_path.glob("store/run.stripes/v-*/data/large/manifest.json")
    manifest.unlink()
    listed = stripe("ls", tmp_path / "store/run")
    assert listed.returncode == 6, listed.stderr
    assert len(listed.stdout.splitlines()) == 2
    assert "the manifest of large of " in listed.stderr
    assert listed.stderr.endswith(" is missing; put the checkpoint anew\n")


def test_a_small_file_whose_object_is_gone_is_damage(tmp_path: Path) -> None:
    """The checkpoint lists it. Reading it said to check the path, as for a name of nothing."""
    run, shown = tmp_path / "run", tmp_path / "store/run"
    run.mkdir()
    (run / "large").write_bytes(content(5_000_000))
    (run / "small").write_bytes(b"x")
    assert stripe("put", run, shown).returncode == 0
    (small,) = tmp_path.glob("store/run.stripes/v-*/data/small")
    small.unlink()
    for words in (["cat", shown / "small"], ["get", shown / "small", tmp_path / "small"]):
        done = stripe(*words)
        assert (done.returncode, done.stdout) == (6, ""), done.stderr
        assert "/data/small in " in done.stderr
        assert done.stderr.endswith("; the checkpoint is incomplete, put it anew\n")

    def answer(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        path = tmp_path / "store" / request.target.lstrip("/")
        if path.is_file():
            return serve_range(path.read_bytes(), sock, request, ETag='"a"')
        sock.sendall(head("404 Not Found", Content_Length=0))
        return True

    with FakeServer(answer) as server:  # a web server words it otherwise
        done = stripe("cat", f"http://{server.authority}/run/small")
    assert done.returncode == 6, done.stderr
    assert "check the" not in done.stderr
    assert done.stderr.endswith("; the checkpoint is incomplete, put it anew\n")
    assert stripe("get", shown, tmp_path / "all").returncode == 6
    assert not (tmp_path / "all").exists()
    assert stripe("get", shown / "large", tmp_path / "large").returncode == 0
    assert stripe("cat", shown / "other").returncode == 3


def test_gc_goes_on_with_the_others(root: Path) -> None:
    put_bytes(store_of(root), "d", b"again", root.parent)
    done = stripe("gc", "--grace", 0, root)
    assert done.returncode == 7
    assert done.stdout.startswith("store/d.stripes/v-")
    assert "c.stripes" in done.stderr


def test_fsspec_lists_the_others(root: Path) -> None:
    listed = {Path(e["name"]).name: e for e in StripedFileSystem().ls(str(root))}
    assert {name: e["type"] for name, e in listed.items()} == {
        "a": "file",
        "b": "other",
        "c": "other",
        "d": "file",
    }
    assert "newer" in listed["c"]["problem"]


@pytest.mark.parametrize("backend", ["own", "fusepy"])
def test_a_mount_shows_the_others(root: Path, tmp_path: Path, backend: str) -> None:
    with served(root, tmp_path / "m", backend=backend) as mount:
        m = mount.directory
        assert in_time(lambda: sorted(os.listdir(m))) == ["a", "b", "c", "d"]
        assert in_time((m / "d").read_bytes) == content(100_003)
        for name in "bc":
            assert refusal(lambda name=name: (m / name).stat()) == errno.EIO
            assert refusal(lambda name=name: (m / name).open("rb")) == errno.EIO
        assert "b: " in mount.said
        assert "damaged" in mount.said
        assert "newer" in mount.said
        assert mount.said.count("damaged") == 1


@pytest.mark.parametrize("backend", ["own", "fusepy"])
def test_a_mount_of_the_folder_waits_for_no_fifo(root: Path, tmp_path: Path, backend: str) -> None:
    """Opening one waits for a writer: whoever may write to the folder held up every mount."""
    (root / "b.stripes/CURRENT").unlink()
    os.mkfifo(root / "b.stripes/CURRENT")
    with served(root, tmp_path / "m", backend=backend) as mount:
        m = mount.directory
        assert in_time(lambda: sorted(os.listdir(m))) == ["a", "b", "c", "d"]
        assert in_time((m / "a").read_bytes) == content(100_000)
        assert refusal(lambda: (m / "b").open("rb")) == errno.EIO
        assert "b.stripes/CURRENT" in mount.said
        assert "a FIFO (named pipe)" in mount.said
        assert "; remove it" in mount.said
        # One that comes while the folder is mounted holds up nobody either.
        (root / "d.stripes/CURRENT").unlink()
        os.mkfifo(root / "d.stripes/CURRENT")
        assert in_time((m / "a").read_bytes) == content(100_000)


class Refusing(WrappedStore):
    """A FAKE store, for fault injection: reading some checkpoints' pointers fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(store_of(root))
        self.faults: dict[str, BootseerError] = {}

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        fault = self.faults.get(name.partition(".")[0])
        if fault is not None:
            raise fault
        return self.inner.read(name, limit_bytes=limit_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Refusing:
    for name in "abc":
        put_bytes(store_of(tmp_path / "some"), name, content(5000), tmp_path)
    return Refusing(tmp_path / "some")


@pytest.fixture
def tree(store: Refusing) -> Iterator[trees.StripedTree]:
    with Fetcher() as fetcher:
        yield tree_at(trees.StripedTree, store, "", fetcher)


def _refused(tree: trees.StripedTree, name: bytes) -> int | None:
    with pytest.raises(FileSystemError) as caught:
        tree.lookup(ROOT, name)
    return caught.value.errno


def test_one_of_somebody_else_is_refused(store: Refusing, tree: trees.StripedTree) -> None:
    store.faults["b"] = AccessDeniedError("not for you")
    assert [entry.name for entry in tree.readdir(ROOT)] == [b"a", b"b", b"c"]
    assert [entry.attr.mode != 0 for entry in tree.readdir(ROOT)] == [True, False, True]
    assert _refused(tree, b"b") == errno.EACCES
    assert tree.lookup(ROOT, b"c").size_bytes == 5000


def test_a_store_that_is_gone_is_no_matter_of_one(store: Refusing) -> None:
    gone = StoreUnavailableError("gone")
    store.faults = {"a": gone, "b": gone}
    found = namespace.list_folder(store, namespace.look_up(store, ""))
    assert [each.problem for each in found] == [gone, gone, None]
    store.faults["c"] = gone
    with pytest.raises(StoreUnavailableError):
        namespace.list_folder(store, namespace.look_up(store, ""))


def test_what_was_there_stays_while_the_store_does_not_say(
    store: Refusing, tree: trees.StripedTree
) -> None:
    before = tree.lookup(ROOT, b"b")
    store.faults["b"] = StoreUnavailableError("away")
    for each in "ac":
        os.utime(Path(store.url.removeprefix("file://")) / f"{each}.stripes")
    tree.nodes.root.listed_s = 0.0
    tree.nodes.root.cached.clear()
    assert tree.lookup(ROOT, b"b") == before
    store.faults["b"] = AccessDeniedError("not any more")
    tree.nodes.root.listed_s = 0.0
    assert _refused(tree, b"b") == errno.EACCES
    del store.faults["b"]
    tree.nodes.root.listed_s = 0.0
    assert tree.lookup(ROOT, b"b") == before
