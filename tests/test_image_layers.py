"""Layers of every make, and hostile ones: what the tree is, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from images_lab import (
    Layer,
    Member,
    directory,
    file,
    hardlink,
    opaque,
    symlink,
    whiteout,
    write_tar,
)

from bootseer.blockimage.entries import Content, Entry, Kind, Stored
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.flatten import Flattener, Limits
from bootseer.imageprefetch.layers import ahead, unpacked


class Kept:
    """Stands for the data: keeps contents by digest."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.times = 0

    def store(self, content: Content, size_bytes: int) -> Stored:
        self.times += 1
        out = bytearray()
        taken = b"".join(map(bytes, content.chunks(1 << 20)))
        at = 0
        for offset, length in content.segments or [(0, size_bytes)]:
            out += bytes(offset - len(out)) + taken[at : at + length]
            at += length
        assert at == len(taken)
        out += bytes(size_bytes - len(out))
        digest = hashlib.sha256(out).digest()
        self.held[digest] = bytes(out)
        return Stored(digest, (), 4096)


def tar_of(members: Sequence[Member]) -> bytes:
    out = io.BytesIO()
    write_tar(out, Layer(members))
    return out.getvalue()


def flatten(
    layers: Sequence[bytes | Sequence[Member]], limits: Limits | None = None
) -> tuple[dict[bytes, Entry], dict[bytes, bytes], Kept]:
    """Entries by path and contents by path, of layers from the lowest to the top."""
    kept = Kept()
    flattener = Flattener(kept.store, limits or Limits())
    for layer in reversed(layers):
        raw = layer if isinstance(layer, bytes) else tar_of(layer)

        @contextlib.contextmanager
        def opened(raw: bytes = raw) -> Iterator[Iterator[bytes]]:
            with ahead(unpacked(io.BytesIO(raw))) as pieces:
                yield pieces

        flattener.add(opened, "the layer")
    entries = {entry.path: entry for entry in flattener.entries()}
    contents = {}
    for path, entry in entries.items():
        own = entries[entry.hardlink_of] if entry.hardlink_of is not None else entry
        if own.kind is Kind.FILE:
            stored = own.content
            contents[path] = kept.held[stored.digest] if isinstance(stored, Stored) else b""
    return entries, contents, kept


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
    wanted = {
        str(path.relative_to(tmp_path)).encode("utf-8", "surrogateescape"): path
        for path in tmp_path.rglob("*")
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


@pytest.mark.parametrize("pack", [bytes, gzip.compress, members, zstandard.compress, frames])
def test_however_a_layer_is_compressed(pack: object) -> None:
    packed = pack(tar_of(MEMBERS))  # type: ignore[operator]
    _, contents, _ = flatten([packed])
    assert contents == {b"d/a": b"one" * 1000, b"d/b": b"two"}
    if pack is not bytes:
        with pytest.raises(CorruptDataError):
            flatten([packed[: len(packed) // 2]])


def test_only_what_is_seen_is_stored() -> None:
    lower = [file(f"f{n}", b"lower %d" % n) for n in range(50)]
    upper = [file(f"f{n}", b"upper %d" % n) for n in range(40)] + [whiteout("f45")]
    _, contents, kept = flatten([lower, upper])
    assert kept.times == 49
    assert contents[b"f3"] == b"upper 3"
    assert contents[b"f44"] == b"lower 44"
    assert b"f45" not in contents


def test_directories_that_are_only_implied_take_the_lower_layers_word() -> None:
    lower = [directory("d", mode=0o700, uid=5), file("d/a", b"1")]
    entries, _, _ = flatten([lower, [file("d/b", b"2"), file("new/x", b"3")]])
    assert (entries[b"d"].mode, entries[b"d"].uid) == (0o700, 5)
    assert (entries[b"new"].mode, entries[b"new"].uid) == (0o755, 0)


@pytest.mark.parametrize("between", [whiteout("d"), file("d", b"a file for a while")])
def test_what_lay_below_something_gone_stays_gone(between: Member) -> None:
    lowest = [directory("d", uid=5, mode=0o700), directory("d/sub"), file("d/sub/old", b"1")]
    layers = [lowest, [between], [file("d/sub/new", b"3")]]
    entries, contents, _ = flatten(layers)
    assert contents == {b"d/sub/new": b"3"}
    assert (entries[b"d"].uid, entries[b"d"].mode) == (0, 0o755)
    renewed = [whiteout("d"), file("d/new", b"2")]
    for layers in ([lowest, renewed], [lowest, renewed, [directory("x"), file("d/x", b"")]]):
        entries, contents, _ = flatten(layers)
        assert contents[b"d/new"] == b"2"
        assert b"d/sub/old" not in contents
        assert entries[b"d"].uid == 0


def test_whiteouts_hide_lower_layers_only_wherever_they_stand() -> None:
    lower = [directory("d"), file("d/x", b"1"), file("d/y", b"1"), file("f", b"1")]
    upper = [whiteout("d/x"), file("d/x", b"2"), opaque("d"), file("f", b"2"), whiteout("f")]
    _, contents, _ = flatten([lower, upper])
    assert contents == {b"d/x": b"2", b"f": b"2"}


def test_of_two_members_of_one_name_the_later_counts() -> None:
    layer = [file("a", b"1"), hardlink("b", "a"), file("a", b"2"), file("d", b""), directory("d")]
    entries, contents, _ = flatten([layer])
    assert contents == {b"a": b"2", b"b": b"1"}
    assert entries[b"d"].kind is Kind.DIRECTORY


def test_an_overlayfs_whiteout_and_opaque_mark_count_too() -> None:
    gone = tarfile.TarInfo("a")
    gone.type = tarfile.CHRTYPE
    lower = [file("a", b"1"), directory("d"), file("d/x", b"1")]
    upper = [Member(gone), directory("d", xattrs={"trusted.overlay.opaque": b"y"})]
    entries, contents, _ = flatten([lower, upper])
    assert contents == {}
    assert entries[b"d"].xattrs == {}


def raw_member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


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
    "text": b"<html>not found</html>" * 100,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(what: str) -> None:
    with pytest.raises(CorruptDataError, match="the layer: "):
        flatten([HOSTILE[what]])


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


PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("/".join)
STEPS = st.lists(
    st.tuples(st.sampled_from(["file", "directory", "whiteout", "opaque"]), PATHS), max_size=8
)


def below(path: str, tree: dict[str, bytes | None]) -> list[str]:
    return [name for name in tree if name.startswith(f"{path}/")]


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def stacked(layers: list[list[tuple[str, str]]]) -> dict[str, bytes | None]:
    """The plain way, from the lowest layer up: a file's content by its path, None for folders."""
    tree: dict[str, bytes | None] = {}
    for number, steps in enumerate(layers):
        own: dict[str, bytes | None] = {}
        hidden: list[str] = []
        for what, path in steps:
            own.update(dict.fromkeys(parents(path)))
            if what in ("whiteout", "opaque"):
                hidden += [path] * (what == "whiteout")
                if what == "opaque":
                    own[path] = None
                    hidden.append(f"{path}/")
                continue
            if what == "file":
                for name in below(path, own):
                    del own[name]
            own[path] = b"%d %s" % (number, path.encode()) if what == "file" else None
        for path in hidden:
            for name in [*below(path.rstrip("/"), tree), path]:
                tree.pop(name, None)
        for path, content in own.items():
            if content is not None or tree.get(path) is not None:
                for name in [*below(path, tree), path]:
                    tree.pop(name, None)
        tree.update(own)
    return tree


def sound(steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The steps without those that lie below a file of their own layer."""
    files: set[str] = set()
    out = []
    for what, path in steps:
        if files & {*parents(path), *([path] if what == "opaque" else [])}:
            continue
        files -= {path} if what == "directory" else set()
        files |= {path} if what == "file" else set()
        out.append((what, path))
    return out


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS.map(sound), min_size=1, max_size=4))
def test_any_layers_from_the_top_down_are_as_from_the_bottom_up(
    layers: list[list[tuple[str, str]]],
) -> None:
    makers = {"directory": directory, "whiteout": whiteout, "opaque": opaque}
    made = [
        [
            file(path, b"%d %s" % (number, path.encode())) if what == "file" else makers[what](path)
            for what, path in steps
        ]
        for number, steps in enumerate(layers)
    ]
    entries, contents, _ = flatten(made)
    shown = {
        path.decode(): contents.get(path) if entry.kind is Kind.FILE else None
        for path, entry in entries.items()
        if path
    }
    assert shown == stacked(layers)
