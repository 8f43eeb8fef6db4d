"""A file that was opened before its tree was made is not opened again, unless it was replaced."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.operations import ROOT
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.open import open_file
from tests.support.mounts.checkpoints import store_of


def tree_of(folder: Path, fetcher: Fetcher) -> tuple[StripedTree, object]:
    store = store_of(folder)
    root = namespace.look_up(store, "model.pt")
    source = open_file(store, root)
    return StripedTree(store, "model.pt", root, fetcher, root_source=source), source


def test_the_file_is_opened_once(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"first")
    with Fetcher() as fetcher:
        tree, source = tree_of(tmp_path, fetcher)
        node = tree.child(tree.node(ROOT), b"model.pt")
        assert tree.source(node) is source
        assert tree.source(node) is source  # from what is kept
        tree.destroy()


def test_another_file_of_the_same_size_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"first")
    with Fetcher() as fetcher:
        tree, source = tree_of(tmp_path, fetcher)
        path.unlink()
        path.write_bytes(b"other")
        os.utime(path, (1, 1))
        node = tree.child(tree.node(ROOT), b"model.pt")
        node.info = namespace.look_up(store_of(tmp_path), "model.pt")
        opened = tree.source(node)
        assert opened is not source
        assert fetcher.read_into(opened, 0, room := bytearray(5)) == 5
        assert room == b"other"
        tree.destroy()
