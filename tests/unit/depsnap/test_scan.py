"""Scan and diff: exactly what changed, whatever the names and whoever tries to hide it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.capture.scan import diff, scan
from bootseer.errors import BootseerError
from tests.support.trees.snapshots import NS, rich, write


def test_sees_every_kind_with_its_metadata(tmp_path: Path) -> None:
    tree = scan(str(rich(tmp_path / "r")))
    e = tree.entries
    assert e[""].kind == "d"
    assert (e["bin/tool"].kind, e["bin/tool"].mode, e["bin/tool"].nlink) == ("f", 0o755, 2)
    assert e["bin/tool"].ino == e["bin/tool-too"].ino
    assert (e["bin/python"].kind, e["bin/python"].target) == ("l", "/usr/bin/python3")
    assert e["lib/a.py"].mtime_ns == NS + 1
    assert e["lib/a.py"].xattrs == (("user.note", b"\x00\xff=%\n"),)
    assert os.fsdecode(b"lib/\xff\xfe\n bytes") in e
    assert e["sparse"].blocks * 512 < e["sparse"].size == 40 << 20


def test_parents_come_before_children(tmp_path: Path) -> None:
    seen = set()
    for path in scan(str(rich(tmp_path / "r"))).entries:
        assert not path or path.rpartition("/")[0] in seen
        seen.add(path)


def test_absent_root_is_an_empty_tree_and_a_file_is_an_error(tmp_path: Path) -> None:
    assert not scan(str(tmp_path / "none")).entries
    with pytest.raises(BootseerError, match="not a directory"):
        scan(str(write(tmp_path / "file")))


def test_nothing_changed_gives_an_empty_delta(tmp_path: Path) -> None:
    root = str(rich(tmp_path / "r"))
    assert diff(scan(root), scan(root)).empty


def test_tells_added_changed_deleted_and_metadata_apart(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    before = scan(str(root))
    write(root / "lib/deep/new/file", "new")
    write(root / "lib/a.py", "x = 2\n")
    (root / "lib/b.so").chmod(0o500)
    (root / "dangling").unlink()
    (root / "dangling").symlink_to("elsewhere")
    (root / "bin/empty").unlink()
    (root / "empty dir").rmdir()
    write(root / "empty dir", "now a file")
    delta = diff(before, scan(str(root)))
    changed = {c.entry.path: c.content for c in delta.changed}
    assert {e.path for e in delta.added} == {"lib/deep", "lib/deep/new", "lib/deep/new/file"}
    assert changed == {
        "": False,
        "lib": False,
        "bin": False,
        "lib/a.py": True,
        "lib/b.so": False,
        "dangling": True,
        "empty dir": True,
    }
    assert delta.deleted == ("bin/empty",)


def test_a_write_hidden_by_putting_the_mtime_back_is_found(tmp_path: Path) -> None:
    file = write(tmp_path / "r/f", "aaaa")
    before = scan(str(tmp_path / "r"))
    write(file, "bbbb")
    (change,) = diff(before, scan(str(tmp_path / "r"))).changed
    assert change.entry.path == "f"
    assert change.content


def test_a_new_hard_link_elsewhere_is_no_change(tmp_path: Path) -> None:
    write(tmp_path / "r/f", "a")
    before = scan(str(tmp_path / "r"))
    os.link(tmp_path / "r/f", tmp_path / "elsewhere")
    assert diff(before, scan(str(tmp_path / "r"))).empty


def test_a_delta_carries_the_parents_of_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "r/a/b/c/file", "1")
    before = scan(str(tmp_path / "r"))
    write(tmp_path / "r/a/b/c/file", "2")
    delta = RootDelta.of_delta(diff(before, scan(str(tmp_path / "r"))))
    assert [e.path for e in delta.entries] == ["", "a", "a/b", "a/b/c", "a/b/c/file"]
    assert delta.implied == {"", "a", "a/b", "a/b/c"}


def test_excludes_paths_with_all_below_and_names_by_pattern(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for name in ("keep/x", "cache/y", "keep/z.tmp", "a/__pycache__/q", ".bootseer-stage/t"):
        write(root / name)
    tree = scan(str(root), exclude=[str(root / "cache"), "*.tmp", "__pycache__"])
    assert set(tree.entries) == {"", "keep", "keep/x", "a"}


def test_entries_that_vanish_meanwhile_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "r"
    (root / "link").parent.mkdir()
    (root / "link").symlink_to("x")
    write(root / "stays")
    real = os.readlink

    def vanishing(path: str) -> str:
        os.unlink(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", vanishing)
    tree = scan(str(root))
    assert tree.vanished == 1
    assert set(tree.entries) == {"", "stays"}


def test_fifos_and_sockets_are_noted_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        kinds = {p: e.kind for p, e in scan(str(tmp_path)).entries.items()}
    assert kinds == {"": "d", "fifo": "o", "s": "o"}
