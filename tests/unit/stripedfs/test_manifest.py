"""Pointer and manifests: what is written is read, and nothing else is believed."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import CorruptDataError, NotSupportedError, UsageError
from bootseer.stripedfs.format import json_fields
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.manifest import (
    Manifest,
    Pointer,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.format.stripe_layout import Layout
from bootseer.stripedfs.write.local_walk import object_name

CHUNK = 4096
Parse = Callable[[bytes, str], object]


def _manifest(size: int = 5 * CHUNK + 1, width: int = 2) -> Manifest:
    layout = Layout(size, CHUNK, width)
    return Manifest(layout, b"".join(compute_digest(bytes([i])) for i in range(layout.chunk_count)))


def _tree() -> TreeManifest:
    return TreeManifest(
        0o755,
        CHUNK,
        (
            TreeFolder("a", 0o750, 1),
            TreeFile("a/b", 0o644, 2, 9 * CHUNK, True, "data/a/b", b"1" * 16, 500),
            TreeFile("a/c", 0o600, -3, 10, False, "data/a/c", b"2" * 16),
            TreeLink("a/d", "../z"),
            TreeFolder("z", 0o700, 0),
        ),
    )


POINTER = Pointer("tree", "v-20261121T220000Z-0a1b2c3d", 7, 8, b"3" * 16)
DOCUMENTS: list[tuple[object, Parse]] = [
    (_manifest(), Manifest.parse),
    (_manifest(0, 1), Manifest.parse),
    (_tree(), TreeManifest.parse),
    (POINTER, Pointer.parse),
]


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS)
def test_what_is_written_is_read(document: object, parse: Parse) -> None:
    assert parse(document.encode(), "x") == document  # type: ignore[attr-defined]


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS)
def test_cut_anywhere_it_is_damaged(document: object, parse: Parse) -> None:
    data = document.encode()  # type: ignore[attr-defined]
    for length in range(len(data) - 1):  # the last byte is a line end, which is no content
        with pytest.raises(CorruptDataError, match="the object"):
            parse(data[:length], "the object")


@given(st.data())
def test_a_changed_byte_changes_the_meaning_or_is_refused(data: st.DataObject) -> None:
    original = _manifest()
    text = bytearray(original.encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = Manifest.parse(bytes(text), "x")
    except (CorruptDataError, NotSupportedError):
        return
    assert found == original  # white space, or a case that means the same


@pytest.mark.parametrize(("document", "parse"), DOCUMENTS)
def test_a_newer_version_says_so(document: object, parse: Parse) -> None:
    body = json.loads(document.encode())  # type: ignore[attr-defined]
    known = json_fields.NEWEST.get(body["kind"], json_fields.VERSION)
    body["version"] = known + 1
    body.pop("size_bytes", None)  # whatever else a newer one may have changed
    said = rf"version {known + 1}.*up to version {known}.*newer bootseer"
    with pytest.raises(NotSupportedError, match=said):
        parse(json.dumps(body).encode(), "x")


_BIG = 10**30
_MANIFEST_LIES: list[tuple[str, object]] = [
    ("size_bytes", _BIG),
    ("size_bytes", -1),
    ("size_bytes", 1 << 62),
    ("size_bytes", 5 * CHUNK + 2),
    ("size_bytes", True),
    ("size_bytes", "5"),
    ("chunk_bytes", 0),
    ("chunk_bytes", CHUNK + 1),
    ("chunk_bytes", 1 << 40),
    ("width", 0),
    ("width", 1 << 40),
    ("width", 3),
    ("stripe_bytes", [1, 2]),
    ("stripe_bytes", None),
    ("chunks", "!!!!"),
    ("chunks", "ä"),
    ("chunks", base64.b64encode(b"1" * 16 * 5).decode()),
    ("chunks", base64.b64encode(b"1" * 16 * 6).decode()),
    ("chunks", ["x"]),
    ("root", "0" * 32),
    ("root", "zz" * 16),
    ("root", "٣" * 32),
    ("digest", "crc32"),
    ("version", 0),
    ("version", "1"),
    ("version", True),
    ("kind", "tree"),
    ("format", "other"),
]


@pytest.mark.parametrize(("field", "value"), _MANIFEST_LIES)
def test_a_manifest_that_lies_is_damaged(field: str, value: object) -> None:
    body = json.loads(_manifest().encode())
    body[field] = value
    with pytest.raises(CorruptDataError):
        Manifest.parse(json.dumps(body).encode(), "x")
    del body[field]
    with pytest.raises(CorruptDataError):
        Manifest.parse(json.dumps(body).encode(), "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("of", "folder"),
        ("current", "../../etc"),
        ("current", "v-20261121T220000Z-0a1b2c3d\n"),
        ("current", "v-20261121T220000Z-0a1b2c3d/x"),
        ("current", None),
        ("size_bytes", -1),
        ("manifest_bytes", 0),
        ("manifest_bytes", 1 << 40),
        ("manifest_digest", "0"),
    ],
)
def test_a_pointer_that_lies_is_damaged(field: str, value: object) -> None:
    body = json.loads(POINTER.encode())
    body[field] = value
    with pytest.raises(CorruptDataError):
        Pointer.parse(json.dumps(body).encode(), "x")


def _file(path: str = "a/b", **changed: object) -> dict[str, object]:
    body: dict[str, object] = {"type": "plain", "path": path, "mode": 0o644, "mtime_ns": 1}
    body |= {"size_bytes": 1, "object": f"data/{path}", "digest": "0" * 32}
    return body | changed


_A = {"type": "folder", "path": "a", "mode": 0o755, "mtime_ns": 1}


@pytest.mark.parametrize(
    "entries",
    [
        [_A, _file("a/../../x")],
        [_A, _file("/a")],
        [_A, _file("a//b")],
        [_A, _file("a/\0")],
        [_A, _file("a/" + "x" * 300)],
        [_A, _file("a/\ud800")],
        [_A, _file(object="../../CURRENT")],
        [_A, _file(object="/etc/passwd")],
        [_A, _file(object="")],
        [_file()],
        [_A, _file(), _file()],
        [_file("a"), _file("a/b")],
        [_A, _file("a/c"), _file("a/b")],
        [_A, _file("a/b", object="data/x"), _file("a/c", object="data/x")],
        [_A, _file(mode=0o100644)],
        [_A, _file(mode=-1)],
        [_A, _file(size_bytes=-1)],
        [_A, _file(size_bytes=1 << 40)],
        [_A, _file(type="device")],
        [_A, _file(type="striped")],
        [_A, _file(digest="0")],
        [_A, {"type": "link", "path": "a/l", "target": "/etc"}],
        [_A, {"type": "link", "path": "a/l", "target": "../../x"}],
        [_A, {"type": "link", "path": "a/l", "target": "b/../../x"}],
        [_A, {"type": "link", "path": "a/l", "target": ""}],
        [_A, {"type": "link", "path": "a/l", "target": "x\0"}],
        [_A, "a"],
        [_A, None],
        {},
    ],
)
def test_a_hostile_tree_is_refused(entries: object) -> None:
    body = {"format": "bootseer.stripes", "version": 1, "kind": "tree", "mode": 0o755}
    body |= {"chunk_bytes": CHUNK, "entries": entries}
    with pytest.raises(CorruptDataError):
        TreeManifest.parse(json.dumps(body).encode(), "x")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"1", b"nul", b"\xff", b"[" * 200_000, b'{"a":' * 100_000, b"1" * 10_000],
)
def test_what_is_no_document(data: bytes) -> None:
    for parse in (Manifest.parse, TreeManifest.parse, Pointer.parse):
        with pytest.raises(CorruptDataError):
            parse(data, "x")


def test_equal_bytes_have_equal_keys_whatever_the_width() -> None:
    assert _manifest(width=2).key == _manifest(width=5).key
    assert _manifest().key != _manifest(5 * CHUNK + 2).key


def test_a_digest_for_every_chunk() -> None:
    with pytest.raises(UsageError):
        Manifest(Layout(CHUNK + 1, CHUNK, 1), b"0" * 16)


_names = st.binary(min_size=1, max_size=80).filter(
    lambda b: b not in (b".", b"..") and b"/" not in b and b"\0" not in b
)
_paths = st.lists(_names, min_size=1, max_size=3).map(lambda parts: os.fsdecode(b"/".join(parts)))


@given(_paths, _paths)
def test_objects_of_two_paths_differ_and_suit_any_store(one: str, two: str) -> None:
    if one != two:
        assert object_name(one) != object_name(two)
    for part in object_name(one).split("/"):
        assert not part.startswith(".")
        assert part.isascii()
        assert not set(part) & set(':\\?#*"<>|%+& \n\0')
        assert 0 < len(part) <= 200
    entry = TreeFile(one, 0, 0, 1, False, object_name(one), b"0" * 16)
    parents = one.split("/")[:-1]
    folders = [TreeFolder("/".join(parents[: n + 1]), 0, 0) for n in range(len(parents))]
    tree = TreeManifest(0, CHUNK, (*folders, entry))
    assert TreeManifest.parse(tree.encode(), "x") == tree
