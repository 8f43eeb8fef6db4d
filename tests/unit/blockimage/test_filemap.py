"""The file map: which file's bytes lie where, and what is refused."""

from __future__ import annotations

import hashlib
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blockimage.filemap import File, FileMap, Limits, Range, parse
from bootseer.blockimage.tree_entries import FileExtent
from bootseer.errors import CorruptDataError
from tests.support.examples import examples

DIGEST = bytes(range(32))
MAP = FileMap(
    [
        File(b"a", 5000, DIGEST, (FileExtent(0, 4096, 5000),)),
        File(b"b/copy\xff", 5000, DIGEST, (FileExtent(0, 4096, 5000),)),
        File(b"empty", 0, DIGEST, ()),
        File(b"holes", 1 << 33, DIGEST, (FileExtent(0, 16384, 100), FileExtent(1 << 32, 20480, 9))),
    ],
    1 << 20,
)


def test_a_map_survives_and_names_every_owner_of_a_byte() -> None:
    read = parse(MAP.serialise())
    assert (list(read.files), read.data_bytes) == (list(MAP.files), MAP.data_bytes)
    assert read.ranges([(20480, 4096), (0, 8192), (12288, 4096)]) == [
        Range(b"holes", 1 << 32, 9),
        Range(b"a", 0, 4096),
        Range(b"b/copy\xff", 0, 4096),
    ]
    assert read.ranges([(8192, 4096)]) == [Range(b"a", 4096, 904), Range(b"b/copy\xff", 4096, 904)]
    assert read.ranges([(1 << 19, 4096)]) == []
    assert read.places()["holes"].extents == ((16384, 100), (20480, 9))


@st.composite
def maps(draw: st.DrawFn) -> FileMap:
    paths = draw(st.lists(st.binary(min_size=1, max_size=9), unique=True, max_size=9))
    at = 0
    files = []
    for path in sorted(p.translate(None, b"/.\0") or b"x%d" % n for n, p in enumerate(paths)):
        if files and files[-1].path == path:
            continue
        extents, end = [], 0
        for gap, length in draw(st.lists(st.tuples(*[st.integers(1, 9000)] * 2), max_size=3)):
            extents.append(FileExtent(end + gap, at, length))
            end += gap + length
            at += length
        files.append(File(path, end, DIGEST, tuple(extents)))
    return FileMap(files, at)


@settings(max_examples=examples(60), deadline=None)
@given(maps())
def test_every_byte_of_the_data_leads_back_to_its_file(made: FileMap) -> None:
    read = parse(made.serialise())
    assert list(read.files) == list(made.files)
    wanted = [Range(f.path, e.file_offset, e.length) for f in made.files for e in f.extents]
    assert read.ranges([(0, made.data_bytes)]) == wanted


def raw() -> bytes:
    return zstandard.decompress(MAP.serialise())


def forged(body: bytes) -> bytes:
    """A map whose own digest is right."""
    return zstandard.compress(body[:-32] + hashlib.sha256(body[:-32]).digest())


def test_whatever_is_cut_or_changed_is_refused() -> None:
    packed = MAP.serialise()
    for end in range(len(packed)):
        with pytest.raises(CorruptDataError):
            parse(packed[:end])
    for at in range(len(raw())):
        changed = bytearray(raw())
        changed[at] ^= 0x41
        with pytest.raises(CorruptDataError):
            parse(zstandard.compress(bytes(changed)))
    with pytest.raises(CorruptDataError):
        parse(packed + b"x")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"b/copy\xff", b"../copy"),
        (b"b/copy\xff", b"/b/copy"),
        (b"b/copy\xff", b"b/cop\0y"),
        (b"b/copy\xff", b"a/copy\xff"[::-1]),
        (b"ab/copy\xff", b"zb/copy\xff"),
        (struct.pack("<Q", 20480), struct.pack("<Q", 1 << 20)),
        (struct.pack("<Q", 20480), struct.pack("<Q", (1 << 64) - 1)),
        (struct.pack("<Q", 1 << 32), struct.pack("<Q", 50)),
        (struct.pack("<Q", 1 << 33), struct.pack("<Q", 1 << 32)),
        (struct.pack("<II", 1, 1), struct.pack("<II", 1, 0)),
    ],
)
def test_forged_maps_are_refused(old: bytes, new: bytes) -> None:
    body = raw()
    assert old in body
    with pytest.raises(CorruptDataError):
        parse(forged(body.replace(old, new)))


def test_limits_hold_before_memory_is_taken() -> None:
    packed = MAP.serialise()
    for limits in (
        Limits(packed_bytes=len(packed) - 1),
        Limits(raw_bytes=len(raw()) - 1),
        Limits(files=3),
        Limits(extents=3),
    ):
        with pytest.raises(CorruptDataError):
            parse(packed, limits=limits)
    with pytest.raises(CorruptDataError):
        parse(zstandard.compress(raw()[:16] + struct.pack("<Q", 1 << 60) + raw()[24:]))
