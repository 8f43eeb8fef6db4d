"""Our EROFS metadata against the kernel's own reading of it, and Debian's fsck.erofs."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bootseer.blockimage import erofs_format
from bootseer.blockimage.build import Built, build
from bootseer.blockimage.erofs_writer import metadata
from bootseer.blockimage.tree_entries import Entry, Kind
from bootseer.errors import CorruptDataError, UsageError
from tests.support.trees.block_images import Facts, facts, mounted, unpack

NAMES = st.binary(min_size=1, max_size=30).filter(
    lambda n: n not in (b".", b"..") and not set(n) & {0, ord("/")}
)


class Bytes:
    """Content in memory; `segments` may leave holes out."""

    def __init__(self, data: bytes, segments: Sequence[tuple[int, int]] | None = None) -> None:
        self.data, self.segments = data, segments

    def chunks(self, size_bytes: int) -> Iterator[memoryview]:
        for at in range(0, len(self.data), size_bytes):
            yield memoryview(self.data)[at : at + size_bytes]


def file_of(path: bytes, data: bytes, **known: object) -> Entry:
    content = Bytes(data) if data else None
    return Entry(path=path, kind=Kind.FILE, size_bytes=len(data), content=content, **known)  # type: ignore[arg-type]


def folder_of(path: bytes, **known: object) -> Entry:
    return Entry(path=path, kind=Kind.DIRECTORY, mode=0o755, **known)  # type: ignore[arg-type]


def check(built: Built) -> Path:
    """The raw data, after Debian's fsck.erofs has found no fault."""
    data = Path(built.data_path).with_suffix(".raw")
    unpack(built.table, Path(built.data_path).read_bytes(), data)
    words = ["fsck.erofs", f"--device={data}", built.meta_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return data


def seen(built: Built, folder: Path) -> dict[bytes, Facts]:
    """What the kernel shows of an image."""
    with mounted(Path(built.meta_path), check(built), folder / "tree"):
        return facts(folder / "tree")


@st.composite
def trees(draw: st.DrawFn) -> list[Entry]:
    folders = [b""]
    entries = [folder_of(b"", mtime_ns=draw(st.integers(-(1 << 40), 1 << 62)))]
    taken = {b""}
    for name in draw(st.lists(NAMES, max_size=25)):
        path = b"/".join(filter(None, (draw(st.sampled_from(folders)), name)))
        if path in taken:
            continue
        taken.add(path)
        kind = draw(st.sampled_from(list(Kind)))
        entry = Entry(
            path=path,
            kind=kind,
            mode=draw(st.integers(0, 0o7777)),
            uid=draw(st.integers(0, (1 << 32) - 2)),
            gid=draw(st.integers(0, (1 << 32) - 2)),
            mtime_ns=draw(st.integers(-(1 << 60), 1 << 62)),
            xattrs={
                b"user." + key: value
                for key, value in draw(
                    st.dictionaries(NAMES, st.binary(max_size=300), max_size=3)
                ).items()
            }
            if kind in (Kind.FILE, Kind.DIRECTORY)
            else {},
        )
        if kind is Kind.FILE:
            data = draw(st.sampled_from((b"", b"x", bytes(5000), b"y" * 4096, b"z" * 9000)))
            entry.size_bytes, entry.content = len(data), Bytes(data) if data else None
        elif kind is Kind.SYMLINK:
            entry.link_target = draw(NAMES) * draw(st.sampled_from((1, 30)))
        elif kind in (Kind.CHARACTER, Kind.BLOCK):
            entry.rdev = os.makedev(draw(st.integers(0, 4095)), draw(st.integers(0, 1048575)))
        elif kind is Kind.DIRECTORY:
            folders.append(path)
        entries.append(entry)
    return entries


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("erofs-utils")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example([folder_of(b"")])
@given(trees())
def test_the_kernel_shows_what_was_built(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]
) -> None:
    folder = tmp_path_factory.mktemp("erofs")
    shown = seen(build(entries, str(folder)), folder)
    assert shown.keys() == {entry.path for entry in entries}
    for entry in entries:
        found = shown[entry.path]
        assert int(found["mode"], 8) == int(entry.kind) << 12 | entry.mode
        assert found["owner"] == (entry.uid, entry.gid)
        assert found["mtime_ns"] == entry.mtime_ns
        assert {os.fsencode(k): v for k, v in found["xattrs"].items()} == entry.xattrs
        assert found.get("target", b"") == entry.link_target
        if entry.kind is Kind.FILE:
            assert found["size"] == entry.size_bytes
        if entry.kind in (Kind.CHARACTER, Kind.BLOCK):
            assert found["device"] == (os.major(entry.rdev), os.minor(entry.rdev))


@pytest.mark.root
@pytest.mark.debian("erofs-utils")
@pytest.mark.parametrize("length", [1, 10, 11, 12, 44])
def test_an_image_never_ends_with_its_last_inode(tmp_path: Path, length: int) -> None:
    """fsck.erofs 1.5 looks for attributes behind each inode, were it beyond the file's end."""
    names = [b"%03d" % number for number in range(33)] + [b"z" * length]
    entries = [folder_of(b""), *(Entry(path=name, kind=Kind.FIFO) for name in names)]
    built = build(entries, str(tmp_path))
    shown = seen(built, tmp_path)
    assert shown.keys() == {entry.path for entry in entries}
    added = Path(built.meta_path).read_bytes().endswith(bytes(erofs_format.BLOCK_BYTES))
    assert added == (length in (11, 12))  # these inodes alone end with a block


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("erofs-utils")
def test_directories_links_and_attributes_of_every_awkward_size(tmp_path: Path) -> None:
    rng = random.Random(7)
    entries = [folder_of(b"")]
    for number in range(120):  # so that directories begin anywhere in a block and end anywhere
        count, long = rng.randrange(1, 60), rng.randrange(1, 250)
        path = b"d%03d" % number
        entries.append(folder_of(path, xattrs={b"user.a": bytes(rng.randrange(0, 3000))}))
        entries += [
            Entry(path=path + b"/%03d" % n + b"n" * rng.randrange(long), kind=Kind.FIFO)
            for n in range(count)
        ]
        target = b"t" * rng.randrange(1, 4096)
        own = {b"trusted.a": bytes(rng.randrange(0, 3000))} if number % 2 else {}
        entries.append(
            Entry(path=b"l%03d" % number, kind=Kind.SYMLINK, link_target=target, xattrs=own)
        )
    entries.append(folder_of(b"wide"))
    entries += [file_of(b"wide/%05d" % n, b"") for n in range(5000)]
    shown = seen(build(entries, str(tmp_path)), tmp_path)
    assert shown.keys() == {entry.path for entry in entries}
    for entry in entries:
        assert shown[entry.path].get("target", b"") == entry.link_target
        assert {os.fsencode(k): v for k, v in shown[entry.path]["xattrs"].items()} == entry.xattrs


def test_links_stand_where_older_kernels_look_for_them() -> None:
    """Linux read a link from the block in which its inode ends, or not at all, until about 6.12."""
    entries = [folder_of(b"")]
    entries += [
        Entry(
            path=b"%04d" % n,
            kind=Kind.SYMLINK,
            link_target=b"<%d" % n + b"t" * (n % 97) + b">",
            xattrs={b"security.a": bytes(n % 61)} if n % 3 else {},
        )
        for n in range(2000)
    ]
    made = bytes(metadata(entries, 4096))
    inline = 0
    for entry in entries[1:]:
        own = len(erofs_format.xattr_body(entry.xattrs))
        at = made.index(entry.link_target)
        ends = at - own  # of the inode, where the target is inline
        found = struct.unpack_from("<HHH", made, ends - erofs_format.INODE_BYTES)
        if found != (5, (own - 12) // 4 + 1 if own else 0, 0o120644):
            assert at % 4096 == 0
            continue
        inline += 1
        assert (ends - 1) % 4096 + 1 + own + len(entry.link_target) <= 4096
    assert inline > 1900


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("erofs-utils")
def test_content_with_holes_duplicates_and_hard_links(tmp_path: Path) -> None:
    rng = random.Random(3)
    noise = rng.randbytes(3 << 20)
    holed = noise[: 1 << 20] + bytes(1 << 20) + noise[:300_000] + bytes((1 << 20) + 77)
    data = {
        b"noise": noise,
        b"noise again": noise,
        b"noise and more": noise + b"more",
        b"holed": holed,
        b"holed again": holed,
        b"zeros": bytes(2 << 20),
        b"few zeros": bytes(100),
        b"nearly zeros": bytes(900_000) + b"1",
        b"small": b"small",
        b"small again": b"small",
    }
    entries = [folder_of(b""), *(file_of(path, content) for path, content in data.items())]
    entries.append(Entry(path=b"a link", kind=Kind.FILE, hardlink_of=b"small"))
    built = build(entries, str(tmp_path))
    with mounted(Path(built.meta_path), check(built), tmp_path / "tree"):
        for path, content in data.items():
            assert Path(os.fsdecode(os.fsencode(tmp_path / "tree") + b"/" + path)).read_bytes() == (
                content
            )
        assert (tmp_path / "tree/a link").stat().st_nlink == 2
    places = {file.path: file.extents for file in built.files.files}
    assert places[b"noise"] == places[b"noise again"]
    assert places[b"holed"] == places[b"holed again"]
    assert [(e.file_offset, e.length) for e in places[b"holed"]] == [
        (0, 1 << 20),
        (2 << 20, 524288),
    ]
    assert places[b"zeros"] == places[b"few zeros"] == ()
    assert places[b"a link"] == places[b"small again"]
    assert b"small" not in places  # one row an inode, by the first of its names
    held = 3 << 20, (3 << 20) + 4, (1 << 20) + (512 << 10), 786_432, 5
    assert built.table.size_bytes < sum(held) + 8 * 4096
    # A packed byte for byte copy of the noise would be twice as large.
    assert os.stat(built.data_path).st_size < 8 << 20


@pytest.mark.root
@pytest.mark.debian("erofs-utils")
def test_five_sparse_gigabytes_are_neither_read_nor_stored(tmp_path: Path) -> None:
    size, at = 5 << 30, 3 << 30
    holes = Entry(
        path=b"sparse",
        kind=Kind.FILE,
        size_bytes=size,
        content=Bytes(b"data\n", [(at, 5)]),
    )
    built = build([folder_of(b""), holes], str(tmp_path))
    data = check(built)
    tree = tmp_path / "tree"
    with mounted(Path(built.meta_path), data, tree), (tree / "sparse").open("rb") as source:
        assert os.fstat(source.fileno()).st_size == size
        source.seek(at - 3)
        assert source.read(10) == b"\0\0\0data\n\0\0"
        source.seek(-100, os.SEEK_END)
        assert source.read() == bytes(100)
    assert built.table.size_bytes <= 2 << 20
    assert os.stat(built.meta_path).st_size < 64 << 10


def test_equal_trees_give_equal_bytes(tmp_path: Path) -> None:
    rng = random.Random(1)
    entries = [folder_of(b"")]
    entries += [file_of(b"f%d" % n, rng.randbytes(rng.randrange(300_000))) for n in range(40)]
    made = []
    for threads in (1, 4):
        folder = tmp_path / str(threads)
        folder.mkdir()
        built = build(entries, str(folder), threads=threads)
        meta, data = Path(built.meta_path).read_bytes(), Path(built.data_path).read_bytes()
        made.append((meta, data, built.table.serialise(), built.files.serialise()))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [file_of(b"a", b"1")],
        [folder_of(b""), file_of(b"a", b"1"), file_of(b"a", b"2")],
        [folder_of(b""), file_of(b"no/parent", b"1")],
        [folder_of(b""), file_of(b"a", b"1"), file_of(b"a/b", b"1")],
        [folder_of(b""), Entry(path=b"a", kind=Kind.FILE, hardlink_of=b"b")],
        [folder_of(b""), folder_of(b"d"), Entry(path=b"a", kind=Kind.FILE, hardlink_of=b"d")],
        [folder_of(b""), file_of(b"x" * 256, b"1")],
        [folder_of(b""), file_of(b"..", b"1")],
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, entries: list[Entry]) -> None:
    with pytest.raises(UsageError):
        build(entries, str(tmp_path))


def test_content_that_ends_early_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    for size in (10, 5 << 20):
        short = Entry(path=b"a", kind=Kind.FILE, size_bytes=size, content=Bytes(b"short"))
        with pytest.raises(CorruptDataError):
            build([folder_of(b""), short], str(tmp_path))
        assert list(tmp_path.iterdir()) == []
