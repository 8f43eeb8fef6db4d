"""The same bytes through every face: file object, fsspec, mounts direct, buffered, mapped."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer import stripedfs
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import (
    CHUNK,
    ODD_SIZES,
    SMALL,
    Served,
    content,
    put_bytes,
    put_sparse,
    served,
    store_of,
)
from tests.support.mounts.fuse import in_time

pytestmark = [pytest.mark.root, pytest.mark.slow]

PAGE = mmap.PAGESIZE
BIG = (4 << 30) + 5 * CHUNK + 17
MARK = {0: b"first", (4 << 30) - 3: b"across", BIG - 4: b"last"}


@dataclasses.dataclass
class Faces:
    """One store, mounted twice, and what its files hold."""

    root: Path
    files: dict[str, bytes]
    direct: Path
    buffered: Path


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    top = tmp_path_factory.mktemp("faces")
    root = top / "store"
    store = store_of(root)
    files: dict[str, bytes] = {}
    folder = top / "folder"
    (folder / "deep").mkdir(parents=True)
    for size in ODD_SIZES:
        data = content(size)
        files[f"striped-{size}"] = files[f"plain-{size}"] = files[f"ckpt/deep/{size}"] = data
        put_bytes(store, f"striped-{size}", data, top)
        (root / f"plain-{size}").write_bytes(data)
        (folder / "deep" / str(size)).write_bytes(data)
    put_into(store, "ckpt", str(folder), settings=SMALL)
    put_sparse(root, "striped-big", BIG, MARK)
    with (root / "plain-big").open("wb") as file:
        for offset, data in MARK.items():
            file.seek(offset)
            file.write(data)
    with contextlib.ExitStack() as stack:
        mounts: list[Served] = [
            stack.enter_context(served(root, top / name, direct_bytes=direct_bytes))
            for name, direct_bytes in (("direct", 0), ("buffered", 1 << 62))
        ]
        yield Faces(root, files, mounts[0].directory, mounts[1].directory)


def by_pread(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def by_mapping(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return b""
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
            return mapped[offset : offset + length]
    finally:
        os.close(fd)


def by_odirect(path: Path, offset: int, length: int) -> bytes:
    """Whole pages around the range, into page-aligned memory, past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    begin = offset // PAGE * PAGE
    span = -(-(offset + length) // PAGE) * PAGE - begin
    try:
        with mmap.mmap(-1, max(span, PAGE)) as memory:
            count = os.preadv(fd, [memoryview(memory)[:span]], begin)
            return memory[: max(0, count)][offset - begin : offset - begin + length]
    finally:
        os.close(fd)


def all_faces(faces: Faces, name: str) -> dict[str, Callable[[int, int], bytes]]:
    url = f"{faces.root}/{name}"
    filesystem, path = fsspec.core.url_to_fs(f"striped::file://{url}")

    def by_file(offset: int, length: int) -> bytes:
        with stripedfs.open(url) as file:
            file.seek(offset)
            return file.read(length)

    def by_read_at(offset: int, length: int) -> bytes:
        with stripedfs.open(url) as file:
            buffer = bytearray(length)
            return bytes(buffer[: file.read_at(offset, buffer)])

    def by_ranges(offset: int, length: int) -> bytes:
        return filesystem.cat_ranges([path], [offset], [offset + length], on_error="raise")[0]

    found: dict[str, Callable[[int, int], bytes]] = {
        "file": by_file,
        "read_at": by_read_at,
        "cat_file": lambda o, n: filesystem.cat_file(path, o, o + n),
        "cat_ranges": by_ranges,
    }
    for kind, top in (("direct", faces.direct), ("buffered", faces.buffered)):
        for way in (by_pread, by_mapping, by_odirect):
            found[f"{kind} {way.__name__}"] = lambda o, n, way=way, top=top: in_time(
                lambda: way(top / name, o, n)
            )
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_is_the_same_through_every_face(faces: Faces, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(faces.files)), "file")
    whole = faces.files[name]
    offset = data.draw(st.integers(0, len(whole) + 5), "offset")
    length = data.draw(st.integers(1, len(whole) + CHUNK), "length")
    for face, read in all_faces(faces, name).items():
        assert read(offset, length) == whole[offset : offset + length], face


def test_whole_files_of_odd_sizes_are_the_same_through_every_face(faces: Faces) -> None:
    for name, whole in faces.files.items():
        for face, read in all_faces(faces, name).items():
            assert read(0, len(whole) + 1) == whole, (face, name)
        assert (faces.direct / name).stat().st_size == len(whole)


@pytest.mark.parametrize("name", ["striped-big", "plain-big"])
def test_bytes_beyond_four_gigabytes_are_where_they_belong(faces: Faces, name: str) -> None:
    for face, read in all_faces(faces, name).items():
        for offset, data in MARK.items():
            assert read(offset, len(data)) == data, face
        assert read((4 << 30) + 100, 9) == bytes(9), face
        assert read(BIG - 4, 100) == b"last", face
        assert read(BIG, 10) == b"", face


def test_listings_are_the_same_through_every_face(faces: Faces) -> None:
    wanted = sorted([*faces.files, "striped-big", "plain-big"])
    filesystem, path = fsspec.core.url_to_fs(f"striped::file://{faces.root}")
    assert sorted(found.removeprefix(f"{path}/") for found in filesystem.find(path)) == wanted
    for top in (faces.direct, faces.buffered):
        seen = in_time(
            lambda top=top: sorted(
                os.path.relpath(os.path.join(folder, name), top)
                for folder, _, names in os.walk(top)
                for name in names
            )
        )
        assert seen == wanted
