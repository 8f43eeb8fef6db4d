"""The archive: anyone's tar reads it, it is reproducible, and every byte of it is checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive, unit_layout
from bootseer.depsnap.format.index import read_index
from bootseer.depsnap.format.verifier import verify
from bootseer.depsnap.types import Digest
from bootseer.errors import BusyError, CorruptDataError, NotFoundError, UsageError
from tests.support.examples import examples
from tests.support.trees.snapshots import NS, describe, pack, rich, write


def test_same_input_gives_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    one = pack(root, tmp_path / "1", threads=1)
    four = pack(root, tmp_path / "2", threads=4)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert one == four


def test_index_says_what_is_in_it_and_verify_agrees(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    index = read_index(str(tmp_path / "a"), expected_digest=info.index_digest)
    assert index.entries == info.entries == len(describe(root))
    assert index.raw_bytes == info.raw_bytes < info.logical_bytes == index.logical_bytes
    assert verify(str(tmp_path / "a"), index) == info.tree_digest
    assert info.size == os.path.getsize(tmp_path / "a")
    assert info.owners == ((os.geteuid(), os.getegid()),)


def test_tree_digest_is_of_the_tree_not_of_the_archive(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    before = pack(root, tmp_path / "a", level=1)
    same = pack(root, tmp_path / "b", level=9)
    assert before.tree_digest == same.tree_digest
    assert before.index_digest != same.index_digest
    os.utime(root / "lib/a.py", ns=(NS, NS + 2))
    assert pack(root, tmp_path / "c").tree_digest != before.tree_digest


def test_several_roots_and_deletions(tmp_path: Path) -> None:
    write(tmp_path / "one/f", "1")
    write(tmp_path / "two/f", "2")
    write(tmp_path / "two/gone", "3")
    before = scan.scan(str(tmp_path / "two"))
    (tmp_path / "two/gone").unlink()
    delta = scan.diff(before, scan.scan(str(tmp_path / "two")))
    roots = [RootDelta.of_delta(delta), RootDelta.of_tree(scan.scan(str(tmp_path / "one")))]
    info = archive.create(str(tmp_path / "a"), roots)
    index = read_index(str(tmp_path / "a"), expected_digest=info.index_digest)
    assert [(r.root, r.count, r.deleted) for r in index.roots] == [
        (str(tmp_path / "one"), 2, ()),
        (str(tmp_path / "two"), 1, ("gone",)),
    ]
    assert verify(str(tmp_path / "a"), index) == info.tree_digest


def test_fifos_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path / "r/f")
    os.mkfifo(tmp_path / "r/fifo")
    assert pack(tmp_path / "r", tmp_path / "a").skipped == (str(tmp_path / "r/fifo"),)


@pytest.mark.parametrize("change", ["content", "same size and time", "gone", "link"])
def test_a_change_between_scan_and_pack_publishes_nothing(tmp_path: Path, change: str) -> None:
    root = rich(tmp_path / "r")
    delta = RootDelta.of_tree(scan.scan(str(root)))
    if change == "content":
        write(root / "lib/a.py", "other")
    elif change == "same size and time":
        write(root / "lib/a.py", "x = 9\n", mtime_ns=NS + 1)
    elif change == "gone":
        (root / "lib/a.py").unlink()
    else:
        (root / "dangling").unlink()
        (root / "dangling").symlink_to("elsewhere")
    (tmp_path / "out").mkdir()
    with pytest.raises((BusyError, NotFoundError), match=r"a\.py|dangling"):
        archive.create(str(tmp_path / "out/a"), [delta])
    assert list((tmp_path / "out").iterdir()) == []


def test_overlapping_roots_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a/b/f")
    roots = [RootDelta.of_tree(scan.scan(str(tmp_path / p))) for p in ("a", "a/b")]
    with pytest.raises(UsageError, match="overlap"):
        archive.create(str(tmp_path / "x"), roots)


def test_one_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "a", b"some text " * 40)
    write(root / "b", os.urandom(700))
    (root / "l").symlink_to("a")
    info = pack(root, tmp_path / "a.zst")
    good = (tmp_path / "a.zst").read_bytes()
    bad = tmp_path / "bad.zst"
    places = {*range(0, len(good), 7), *range(20), *range(len(good) - 40, len(good))}
    for position in sorted(places):
        data = bytearray(good)
        data[position] ^= 1 << (position % 8)
        bad.write_bytes(data)
        with pytest.raises(CorruptDataError):
            _read_whole(bad, info.index_digest)


def _read_whole(path: Path, digest: Digest) -> None:
    index = read_index(str(path), expected_digest=digest)
    verify(str(path), index, threads=1)


def test_truncated_at_any_length_is_found(tmp_path: Path) -> None:
    write(tmp_path / "r/a", b"some text " * 40)
    info = pack(tmp_path / "r", tmp_path / "a.zst")
    good = (tmp_path / "a.zst").read_bytes()
    for length in range(0, len(good), 3):
        (tmp_path / "bad").write_bytes(good[:length])
        with pytest.raises(CorruptDataError):
            read_index(str(tmp_path / "bad"), expected_digest=info.index_digest)


def test_another_archive_is_refused_by_its_digest(tmp_path: Path) -> None:
    write(tmp_path / "r/a", "1")
    pack(tmp_path / "r", tmp_path / "a")
    with pytest.raises(CorruptDataError, match="digest"):
        read_index(str(tmp_path / "a"), expected_digest=Digest("0" * 64))
    with pytest.raises(NotFoundError):
        read_index(str(tmp_path / "none"), expected_digest=None)


@given(
    size=st.integers(0, 5 * unit_layout.BLOCK),
    cuts=st.lists(st.integers(0, 5 * unit_layout.BLOCK), max_size=8),
)
def test_units_cover_data_once_and_never_cross_a_block(size: int, cuts: list[int]) -> None:
    points = sorted({min(c, size) for c in cuts})
    data = [(a, b - a) for a, b in zip(points[::2], points[1::2], strict=False) if b > a]
    found = [s for unit in unit_layout.units(7, size, data) for s in unit.segments]
    assert sum(n for _, n in found) == sum(n for _, n in data)
    covered = {byte for a, n in data for byte in (a, a + n - 1)}
    assert all(any(a <= byte < a + n for a, n in found) for byte in covered)
    for unit in unit_layout.units(7, size, data):
        assert all(
            o // unit_layout.BLOCK == (o + n - 1) // unit_layout.BLOCK for o, n in unit.segments
        )


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=3000), hole=st.integers(0, 9 << 20))
def test_content_digest_does_not_see_holes(
    data: bytes, hole: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("holes")
    for name, solid in (("sparse", False), ("solid", True)):
        root = folder / name
        root.mkdir()
        with (root / "f").open("wb") as file:
            file.write(bytes(hole)) if solid else file.seek(hole)
            file.write(data)
            file.truncate(hole + len(data))
        os.utime(root / "f", ns=(NS, NS))
        os.utime(root, ns=(NS, NS))
    (folder / "sparse").rename(folder / "r")
    sparse = pack(folder / "r", folder / "1").tree_digest
    (folder / "r").rename(folder / "done")
    (folder / "solid").rename(folder / "r")
    assert pack(folder / "r", folder / "2").tree_digest == sparse
