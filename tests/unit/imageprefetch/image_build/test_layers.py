"""Layers of every make, and hostile ones: what the tree is, and what is refused."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zstandard

from bootseer.blockimage.erofs_writer import metadata
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build.flatten import Flattener, Limits
from tests.support.samples.images import Member, directory, file, hardlink, symlink
from tests.support.trees.flattened import Kept, flatten, tar_of


def gnu_tar(folder: Path, *words: str) -> bytes:
    done = subprocess.run(
        ["tar", "-C", str(folder), "-cf", "-", *words, "."], capture_output=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--format=gnu"],
        ["--format=pax"],
        ["--format=ustar"],
        ["--format=gnu", "--sparse"],
        ["--format=pax", "--sparse", "--sparse-version=0.0"],
        ["--format=pax", "--sparse", "--sparse-version=0.1"],
        ["--format=pax", "--sparse", "--sparse-version=1.0"],
    ],
    ids=" ".join,
)
def test_what_gnu_tar_writes(tmp_path: Path, words: list[str]) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"deep")
    (tmp_path / b"n\xff\xfe".decode("utf-8", "surrogateescape")).write_bytes(b"bytes")
    if "ustar" not in words[0]:
        (tmp_path / ("long" * 50)).write_bytes(b"long")
        (tmp_path / "link").symlink_to("t" * 300)
    with (tmp_path / "sparse").open("wb") as out:
        for at in range(60):  # more segments than a header of the old kind has room for
            out.seek(at * 100_000)
            out.write(b"%d" % at)
        out.truncate(10_000_000)
    if "ustar" not in words[0] and "gnu" in words[0]:
        words = [*words, "--owner=3000000", "--group=4000000000"]
    entries, contents, _ = flatten([gnu_tar(tmp_path, *words)])
    # Not rglob, which Python 3.11.2 ends at a link whose target is too long a name.
    paths = [
        Path(at, name) for at, folders, files in os.walk(tmp_path) for name in (*folders, *files)
    ]
    wanted = {
        str(path.relative_to(tmp_path)).encode("utf-8", "surrogateescape"): path for path in paths
    }
    assert entries.keys() == wanted.keys() | {b""}
    for path, source in wanted.items():
        entry = entries[path]
        about = source.lstat()
        assert entry.kind == about.st_mode >> 12
        if source.is_symlink():
            assert entry.link_target == str(source.readlink()).encode()
            continue
        assert entry.mode == about.st_mode & 0o7777
        seconds = 1 if "pax" in words[0] else 1_000_000_000
        assert entry.mtime_ns == about.st_mtime_ns // seconds * seconds
        if source.is_file():
            assert contents[path] == source.read_bytes()
    if "--owner=3000000" in words:
        assert (entries[b"sparse"].uid, entries[b"sparse"].gid) == (3_000_000, 4_000_000_000)


MEMBERS = [directory("d"), file("d/a", b"one" * 1000), file("d/b", b"two")]


def frames(raw: bytes) -> bytes:
    """zstd frames of unequal parts, with a skippable one behind, as zstd:chunked writes."""
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"extra"
    parts = [zstandard.compress(raw[:1000]), zstandard.compress(raw[1000:])]
    return b"".join([*parts, skippable])


def members(raw: bytes) -> bytes:
    """A gzip member for each few bytes, as stargz writes."""
    return b"".join(gzip.compress(raw[at : at + 700]) for at in range(0, len(raw), 700))


def padded(raw: bytes) -> bytes:
    """Two streams of xz with zeros between and behind them."""
    return lzma.compress(raw[:1000]) + bytes(8) + lzma.compress(raw[1000:]) + bytes(4)


def doubled(raw: bytes) -> bytes:
    return bz2.compress(raw[:1000]) + bz2.compress(raw[1000:])


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, members, zstandard.compress, frames, padded, doubled]
)
def test_however_a_layer_is_compressed(pack: object) -> None:
    packed = pack(tar_of(MEMBERS))  # type: ignore[operator]
    _, contents, _ = flatten([packed])
    assert contents == {b"d/a": b"one" * 1000, b"d/b": b"two"}
    if pack is not bytes:
        with pytest.raises(CorruptDataError):
            flatten([packed[: len(packed) // 2]])


def raw_member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def late_member(mtime_s: int) -> bytes:
    made = bytearray(raw_member("a"))
    made[136:148] = b"\x80" + mtime_s.to_bytes(11, "big")
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made) + END


LOOP = [symlink("a", "b"), symlink("b", "a"), file("a/x", b"1")]
END = bytes(1024)
HOSTILE: dict[str, bytes | Sequence[Member]] = {
    "a name that leads out": [file("../etc/passwd", b"1")],
    "a name that leads out behind others": [file("a/../../etc/passwd", b"1")],
    "a hard link to the outside": [hardlink("a", "../../etc/shadow")],
    "a hard link to nothing": [hardlink("a", "/etc/shadow")],
    "a hard link to a directory": [directory("d"), hardlink("a", "d")],
    "a file below a file": [file("a", b"1"), file("a/b", b"1")],
    "links in a circle": LOOP,
    "a link without a target": [symlink("a", "")],
    "a link with an endless target": [symlink("a", "x" * 5000)],
    "a name part that no file system takes": [file("x" * 256, b"1")],
    "an endless name": [file("/".join(["d" * 200] * 30), b"1")],
    "a root that is a file": [file("./", b"1"), file(".", b"1")],
    "a whiteout of nothing": [file("d/.wh.", b"")],
    "a whiteout of the parent": [file("d/.wh...", b"")],
    "attributes without end": [file("a", b"", xattrs={"user.a": b"x" * 70_000})],
    "a member of no known type": raw_member("a", b"Z") + END,
    "a size that is none": raw_member("a", size=1)[:124] + b"zzzzzzzzzzz\0" + bytes(1024),
    "a damaged header": b"x" + raw_member("a")[1:] + END,
    "content that ends early": raw_member("a", size=5000) + b"short",
    "a header that ends early": raw_member("a")[:300],
    "a pax header larger than any": raw_member("a", b"x", size=1 << 40) + END,
    "a pax header without a member": raw_member("a", b"x", size=0) + END,
    "a long name larger than any": raw_member("././@LongLink", b"L", size=1 << 33) + END,
    "an attribute that no name can have": [file("a", b"", xattrs={"user.a\0b": b"1"})],
    "a time beyond any clock": late_member(1 << 70),
    "members behind an end": raw_member("a") + bytes(512) + raw_member("b") + END,
    "links that give a name without end": [
        symlink("a", "/".join("d" * 1500)),
        symlink("a/b", "/".join("e" * 1500)),
        file("a/b/x", b"1"),
    ],
    "text": b"<html>not found</html>" * 100,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(what: str) -> None:
    with pytest.raises(CorruptDataError, match="the layer: "):
        flatten([HOSTILE[what]])


def test_a_layer_may_end_with_its_last_members_bytes() -> None:
    """umoci leaves out that member's padding and the end's blocks; container programs take it."""
    layer = raw_member("a", size=3) + b"one" + bytes(509) + raw_member("b", size=5) + b"other"
    assert flatten([layer])[1] == {b"a": b"one", b"b": b"other"}
    with pytest.raises(CorruptDataError, match="ends in the middle of a file"):
        flatten([layer[:-1]])


LONG = "/".join(["d\x1b\n" * 60] * 20)  # a path of 3.6 KB, in characters that no line takes


@pytest.mark.parametrize(
    "members",
    [
        [file(f"{LONG}/{'x' * 256}", b"1")],
        [hardlink(LONG, f"{LONG}/x")],
        [file(f"../{LONG}", b"1")],
        [file(f"{LONG}/.wh..", b"")],
        [file(LONG, b"", xattrs={"user.a": b"x" * 70_000})],
    ],
)
def test_messages_show_long_names_shortened_and_in_one_line(members: Sequence[Member]) -> None:
    with pytest.raises(CorruptDataError) as raised:
        flatten([members])
    told = str(raised.value)
    assert told.startswith("the layer: ")
    assert len(told) < 1000
    assert re.search(r"…\S+ \(3\d{3} bytes\)", told)
    assert told.isprintable()


def test_harmless_links_stay_as_they_are() -> None:
    entries, contents, _ = flatten(
        [
            [
                symlink("up", "../../../../etc/passwd"),
                symlink("abs", "/etc/shadow"),
                directory("etc"),
                file("/etc/shadow", b"its own"),
                symlink("out", "/.."),
                file("out/x", b"within"),
                hardlink("h", "/etc/shadow"),
            ]
        ]
    )
    assert entries[b"up"].link_target == b"../../../../etc/passwd"
    assert contents == {b"etc/shadow": b"its own", b"h": b"its own", b"x": b"within"}


def sparse_header(size: int, segments: str, stored: int = 0) -> bytes:
    info = tarfile.TarInfo("bomb")
    info.size = stored
    info.pax_headers = {"GNU.sparse.map": segments, "GNU.sparse.size": str(size)}
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    "header",
    [
        sparse_header(100, "0,10,5,10", 20),
        sparse_header(100, "90,20", 20),
        sparse_header(100, "0,10", 20),
        sparse_header(100, "0", 0),
        sparse_header(100, "0,x", 0),
        sparse_header(100, "10,-5", 0),
    ],
)
def test_sparse_maps_that_lie_are_refused(header: bytes) -> None:
    with pytest.raises(CorruptDataError):
        flatten([header + bytes(512) + END])


def test_bombs_end_at_the_limits_without_taking_memory() -> None:
    many = b"".join(raw_member(f"{n}") for n in range(50)) + END
    assert len(flatten([many], Limits(entries=50))[0]) == 51
    with pytest.raises(CorruptDataError, match="more than 49 entries"):
        flatten([many], Limits(entries=49))
    deep = [file("/".join(["d"] * 60), b"")]
    with pytest.raises(CorruptDataError, match="entries"):
        flatten([deep], Limits(entries=50))  # directories that are only implied count as well
    zeros = gzip.compress(raw_member("a", size=64 << 20) + bytes((64 << 20) + 1024))
    tracemalloc.start()
    with pytest.raises(CorruptDataError, match="unpacks to more"):
        flatten([zeros], Limits(unpacked_bytes=32 << 20))
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "member",
    [
        lambda n: file(f"{n}", b"", xattrs={"user.a": b"x" * 60_000}),
        lambda n: symlink(f"{n}", "t" * 4000),
        lambda n: directory(f"{n}/{'/'.join(['d' * 200] * 20)}"),
        lambda n: file(f"link/{n}", b""),
    ],
    ids=["attributes", "links", "paths", "paths through links"],
)
def test_what_is_kept_of_all_entries_is_bounded(member: Callable[[int], Member]) -> None:
    link = symlink("link", "/".join(["d" * 200] * 20))
    few = [link, *(member(n) for n in range(10))]
    assert len(flatten([few], Limits(entries=10_000))[0]) > 10
    with pytest.raises(CorruptDataError, match="paths, links and attributes"):
        flatten([[link, *(member(n) for n in range(600))]], Limits(entries=30_000, entry_bytes=40))


BOMB = """
import io, lzma, resource, sys
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build.layer_reader import decompress
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    print(sum(map(len, decompress(io.BytesIO(sys.stdin.buffer.read())))))
except CorruptDataError as error:
    print(error)
"""


@pytest.mark.parametrize(("dictionary", "said"), [(64 << 20, "1000"), (3 << 29, "emory")])
def test_an_xz_layer_takes_no_more_memory_than_its_usual_dictionaries(
    dictionary: int, said: str
) -> None:
    packed = bytearray(lzma.compress(bytes(1000)))
    at = 12 + packed[12:].index(b"\x21\x01") + 2  # the one byte that tells the dictionary's size
    bits = 2 * (dictionary.bit_length() - 1) - 24 + (dictionary.bit_count() - 1)
    packed[at] = bits
    end = 12 + 4 * (packed[12] + 1) - 4
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    done = subprocess.run(
        [sys.executable, "-c", BOMB], input=packed, capture_output=True, check=True
    )
    assert said in done.stdout.decode()


def numbered(count: int) -> Iterator[bytes]:
    """A layer of so many empty files, as it is asked for."""
    template = bytearray(raw_member("0"))
    for first in range(0, count, 1000):
        made = bytearray()
        for number in range(first, min(first + 1000, count)):
            template[:100] = b"%d" % number + bytes(100 - len(b"%d" % number))
            template[148:156] = b" " * 8
            template[148:156] = b"%06o\0 " % sum(template)
            made += template
        yield bytes(made)
    yield END


@pytest.mark.soak
def test_a_million_entries_are_taken_and_one_more_refused() -> None:
    for count in (1_000_000, 1_000_001):
        flattener = Flattener(Kept().store)
        layer = functools.partial(contextlib.nullcontext, numbered(count))
        if count > 1_000_000:
            with pytest.raises(CorruptDataError, match="more than 1000000 entries"):
                flattener.add(layer, "the layer")
            continue
        flattener.add(layer, "the layer")
        entries = flattener.entries()
        assert len(entries) == 1 + count
        assert len(metadata(entries, 4096)) < 200 << 20
