"""Names that are none, that look like ours, and links that lead nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from tests.support.mounts.checkpoints import put_bytes, served, store_of, stripe
from tests.support.mounts.fuse import in_time

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.mark.parametrize("name", [".", "..", "...stripes", ".stripes"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "f").write_bytes(b"x")
    done = stripe("put", tmp_path / "f", f"{tmp_path}/s/{name}")
    assert done.returncode == 2, done.stderr
    assert list((tmp_path / "s").iterdir()) == []


def test_a_folder_that_would_be_dots_is_none_of_ours(tmp_path: Path) -> None:
    put_bytes(store_of(tmp_path / "s"), "a", b"data", tmp_path)
    (tmp_path / "s/a.stripes").rename(tmp_path / "s/...stripes")
    put_bytes(store_of(tmp_path / "s"), "b", b"data", tmp_path)
    assert [row.split()[-1] for row in stripe("ls", tmp_path / "s").stdout.splitlines()] == [
        "s/...stripes",
        "s/b",
    ]
    assert stripe("gc", tmp_path / "s").returncode == 0


def test_a_plain_file_may_have_our_suffix(tmp_path: Path) -> None:
    (tmp_path / "x.stripes").write_bytes(b"plain")
    (tmp_path / "x").write_bytes(b"other")
    assert stripe("cat", tmp_path / "x.stripes").stdout == "plain"
    assert stripe("cat", tmp_path / "x").stdout == "other"


def test_a_link_that_leads_nowhere_is_shown(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "f").write_bytes(b"x")
    (source / "gone").symlink_to("nothing")
    assert stripe("put", source, tmp_path / "s/tree").returncode == 0
    with served(tmp_path / "s/tree", tmp_path / "m") as mount:
        assert in_time(lambda: sorted(os.listdir(mount.directory))) == ["f", "gone"]
        assert in_time(lambda: os.readlink(mount.directory / "gone")) == "nothing"
    assert stripe("ls", tmp_path / "s/tree").stdout.endswith("gone -> nothing\n")
    files = StripedFileSystem()
    assert [Path(name).name for name in files.ls(f"{tmp_path}/s/tree", detail=False)] == ["f"]


def test_blocks_that_cut_chunks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    words = ("put", tmp_path / "f", tmp_path / "s/f", "--chunk", "4MiB", "--block")
    done = stripe(*words, "5MiB")
    assert (done.returncode, "multiple" in done.stderr) == (2, True)
    assert not (tmp_path / "s").exists()
    assert stripe(*words, "8MiB").returncode == 0
