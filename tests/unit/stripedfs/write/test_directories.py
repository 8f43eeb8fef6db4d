"""Directories as one checkpoint: put whole, or written by several processes and published once."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import BusyError, NotFoundError, UsageError
from bootseer.stripedfs.read.get import get_from_store
from bootseer.stripedfs.read.namespace import look_up
from bootseer.stripedfs.write import put as putting
from bootseer.stripedfs.write.put import put
from bootseer.stripedfs.write.tree_writer import TreeWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import (
    CHUNK,
    leftovers,
    local_tree,
    make_tree,
    opened,
    sample,
    tree_of,
    version_folder,
)

SMALL = WriteSettings(chunk_bytes=CHUNK, width=3, keep_bytes=0)


def _get(store: Path, name: str, to: Path) -> None:
    with Fetcher() as fetcher:
        place = opened(store)
        get_from_store(place, look_up(place, name), str(to), fetcher)


def _modes(root: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            seen = path.stat()
            mtime_ns = 0 if path == root else seen.st_mtime_ns
            found[os.path.relpath(path, root)] = (stat.S_IMODE(seen.st_mode), mtime_ns)
    return found


def test_a_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src")
    source.chmod(0o751)
    report = put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    assert report.files == 6
    assert tree_of(tmp_path / "s", "ck") == local_tree(source)
    assert leftovers(tmp_path / "s", "ck") == []
    _get(tmp_path / "s", "ck", tmp_path / "out")
    assert local_tree(tmp_path / "out") == local_tree(source)
    assert _modes(tmp_path / "out") == _modes(source)


def test_small_files_are_stored_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for size in (0, CHUNK - 1, CHUNK):
        (source / f"f{size}").write_bytes(sample(size))
    put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    data = version_folder(tmp_path / "s", "ck") / "data"
    assert (data / f"f{CHUNK - 1}").read_bytes() == sample(CHUNK - 1)
    assert (data / "f0").is_file()
    assert sorted(p.name for p in (data / f"f{CHUNK}").iterdir()) == [
        "manifest.json",
        "stripe-00000",
    ]


def test_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    put(str(tmp_path / "src"), str(tmp_path / "s/ck"), settings=SMALL)
    (tmp_path / "out").mkdir()  # an empty one may be there already
    _get(tmp_path / "s", "ck", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out/x").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        _get(tmp_path / "s", "ck", tmp_path / "out")
    assert (tmp_path / "out/x").read_text() == "mine"


def test_names_that_are_no_text(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    name = os.fsencode(source) + b"/\xff\xfe"
    with open(name, "wb") as file:
        file.write(b"1")
    put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    _get(tmp_path / "s", "ck", tmp_path / "out")
    assert os.listdir(os.fsencode(tmp_path / "out")) == [b"\xff\xfe"]


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "sub/../../outside"])
def test_links_that_lead_out_are_refused_or_followed(tmp_path: Path, target: str) -> None:
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("out there")
    (source / "link").symlink_to(target)
    with pytest.raises(UsageError, match=r"link .*follow"):
        put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    put(str(source), str(tmp_path / "s/ck"), settings=SMALL, follow_links=True)
    assert tree_of(tmp_path / "s", "ck")["link"] == (source / "link").read_bytes()


def test_a_link_that_leads_round_ends(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "round").symlink_to(".")
    put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    with pytest.raises(UsageError, match="link to a folder above"):
        put(str(source), str(tmp_path / "s/ck"), settings=SMALL, follow_links=True)


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(source / "socket"))
        with pytest.raises(UsageError, match="socket is neither"):
            put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    assert not (tmp_path / "s/ck.stripes/CURRENT").exists()


@pytest.mark.parametrize("change", ["add", "remove", "touch"])
def test_a_directory_that_changes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = make_tree(tmp_path / "src")
    real = putting.walk_folder
    calls = []

    def walk(root: str, **options: bool) -> object:
        if calls:  # the second look: everything was read in between
            match change:
                case "add":
                    (source / "new").write_text("x")
                case "remove":
                    (source / "sub/nothing").unlink()
                case _:
                    (source / "sub/exact").write_bytes(sample(CHUNK, 77))
        calls.append(root)
        return real(root, **options)

    monkeypatch.setattr(putting, "walk_folder", walk)
    with pytest.raises(BusyError, match="changed while it was put"):
        put(str(source), str(tmp_path / "s/ck"), settings=SMALL)
    assert list((tmp_path / "s/ck.stripes").iterdir()) == []


RANK = """
import sys
from bootseer.storage.open import open_store
from bootseer.stripedfs.write.write_settings import WriteSettings
from bootseer.stripedfs.write.tree_writer import TreeWriter
store, token, rank = sys.argv[1:]
wishes = WriteSettings(chunk_bytes=4096, width=3)
with TreeWriter.join(open_store(store), "ck", wishes, token=token) as tree:
    tree.add_file(f"rank{rank}/shard.bin", f"{store}/../src{rank}")
    with tree.open_file(f"rank{rank}/meta.json") as file:
        file.write(b"rank " + rank.encode())
    with tree.open_file(f"rank{rank}/stream.bin") as file:
        for _ in range(30):
            file.write(b"s" * 1000)
"""


def test_a_stream_is_written_below_a_name_that_is_no_text(tmp_path: Path) -> None:
    store, name = opened(tmp_path / "s"), os.fsdecode(b"ck\xff")
    with TreeWriter.begin(store, name, SMALL) as tree:
        with tree.open_file("a") as file:
            file.write(b"bytes")
        assert tree.publish().is_tree


def test_ranks_write_their_files_and_one_publishes(tmp_path: Path) -> None:
    store = opened(tmp_path / "s")
    for rank in range(3):
        (tmp_path / f"src{rank}").write_bytes(sample(5 * CHUNK + rank, rank))
    with TreeWriter.begin(store, "ck", SMALL) as tree:
        words = [sys.executable, "-c", RANK, str(tmp_path / "s"), tree.token]
        ranks = [subprocess.Popen([*words, str(rank)]) for rank in range(3)]
        assert [rank.wait() for rank in ranks] == [0, 0, 0]
        tree.add_folder("empty", mode=0o700)
        tree.add_link("latest", "rank0/shard.bin")
        assert not (tmp_path / "s/ck.stripes/CURRENT").exists()
        tree.publish()
    found = tree_of(tmp_path / "s", "ck")
    for rank in range(3):
        assert found.pop(f"rank{rank}") is None
        assert found.pop(f"rank{rank}/shard.bin") == sample(5 * CHUNK + rank, rank)
        assert found.pop(f"rank{rank}/meta.json") == f"rank {rank}".encode()
        assert found.pop(f"rank{rank}/stream.bin") == b"s" * 30_000
    assert found == {"empty": None, "latest": "-> rank0/shard.bin"}
    assert leftovers(tmp_path / "s", "ck") == []


def test_a_tree_that_is_not_published_vanishes(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with TreeWriter.begin(store, "ck", SMALL) as tree, tree.open_file("a") as file:
        file.write(sample(9 * CHUNK))
    assert list((tmp_path / "ck.stripes").iterdir()) == []
    with pytest.raises(NotFoundError):
        TreeWriter.join(store, "ck", SMALL, token=tree.token)


def test_two_ranks_cannot_write_one_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with TreeWriter.begin(store, "ck", SMALL) as tree:
        for text in (b"one", b"another"):
            rank = TreeWriter.join(store, "ck", SMALL, token=tree.token)
            with rank, rank.open_file("same") as file:
                file.write(text)
        with pytest.raises(UsageError, match="two processes wrote same"):
            tree.publish()


def test_what_cannot_be_a_tree(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with TreeWriter.begin(store, "ck", SMALL) as tree:
        for path in ("../x", "/x", "a//b", "", "a/\0"):
            with pytest.raises(UsageError):
                tree.open_file(path)
        with pytest.raises(UsageError, match="lead out"):
            tree.add_link("l", "../x")
        with TreeWriter.join(store, "ck", SMALL, token=tree.token) as rank:
            with pytest.raises(UsageError, match="began"):
                rank.publish()
            rank.finish()
            with pytest.raises(UsageError, match="sealed"):
                rank.add_folder("late")
        with tree.open_file("a") as file:
            file.write(b"a file")
        tree.add_link("a/b", "../a")
        with pytest.raises(UsageError, match="no tree"):
            tree.publish()
    for token in ("x", "../ck", ".tmp/x"):
        with pytest.raises(UsageError, match="no token"):
            TreeWriter.join(store, "ck", SMALL, token=token)


def test_a_file_that_was_aborted_or_removed_is_not_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with TreeWriter.begin(store, "ck", SMALL) as tree:
        bad = tree.open_file("bad")
        bad.write(sample(9 * CHUNK))
        bad.abort()
        bad.close()
        with tree.open_file("gone") as file:
            file.write(sample(9 * CHUNK))
        tree.remove("gone")
        tree.remove("never")
        with tree.open_file("kept") as file:
            file.write(b"1")
        tree.publish()
    assert tree_of(tmp_path, "ck") == {"kept": b"1"}
    assert [p.name for p in (version_folder(tmp_path, "ck") / "data").iterdir()] == ["kept"]
