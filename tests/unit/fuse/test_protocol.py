"""The FUSE protocol as bytes: read and written, cut at every length, and fuzzed."""

from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.passthrough import Backings
from bootseer.fuse.operations import Attr, Entry, Handle, Inode
from bootseer.fuse.protocol import replies, requests
from bootseer.fuse.protocol.requests import Opcode, ProtocolError
from bootseer.fuse.serve.dispatch import Dispatcher
from bootseer.reporting import Reporter
from tests.support.trees.memory import WritableTree


def request(opcode: int, body: bytes = b"", *, unique: int = 7, inode: int = 3) -> bytes:
    head = requests.IN_HEADER.struct.pack(40 + len(body), opcode, unique, inode, 1, 2, 99, 0, 0)
    return head + body


def setattr_body() -> bytes:
    size = requests.FATTR_SIZE | requests.FATTR_MTIME
    return requests.SETATTR_IN.struct.pack(
        size, 0, 5, 1000, 0, 11, 22, 33, 1, 2, 3, 0o644, 0, 8, 9, 0
    )


READ_BODY = requests.READ_IN.struct.pack(5, 1 << 40, 4096, 0, 0, 0, 0)
WRITE_BODY = (
    requests.WRITE_IN.struct.pack(5, 4096, 6, requests.FUSE_WRITE_LOCKOWNER, 9, 0, 0) + b"abcdef"
)
RELEASE_BODY = requests.RELEASE_IN.struct.pack(5, 0, 0, 0)
FSYNC_BODY = requests.FSYNC_IN.struct.pack(5, 1, 0)
INIT_BODY = requests.INIT_IN.struct.pack(7, 38, 131072, 0xF000000F, 0x11, b"")
OLD_INIT_BYTES = 56
REQUESTS = {
    Opcode.LOOKUP: (b"a name\0", requests.Name(b"a name")),
    Opcode.UNLINK: (b"\xff\xfe\0", requests.Name(b"\xff\xfe")),
    Opcode.RMDIR: (b"x\0", requests.Name(b"x")),
    Opcode.FORGET: (struct.pack("<Q", 4), requests.Forget(4)),
    Opcode.BATCH_FORGET: (
        struct.pack("<IIQQQQ", 2, 0, 10, 1, 11, 5),
        requests.BatchForget(((Inode(10), 1), (Inode(11), 5))),
    ),
    Opcode.GETATTR: (struct.pack("<IIQ", 1, 0, 12), requests.Getattr(Handle(12))),
    Opcode.SETATTR: (
        setattr_body(),
        requests.Setattr(0b101000, Handle(5), 1000, 22_000_000_002, 0o644, 8, 9),
    ),
    Opcode.MKDIR: (struct.pack("<II", 0o755, 0o22) + b"d\0", requests.Mkdir(0o755, 0o22, b"d")),
    Opcode.RENAME: (struct.pack("<Q", 9) + b"a\0b\0", requests.Rename(Inode(9), 0, b"a", b"b")),
    Opcode.RENAME2: (
        struct.pack("<QII", 9, 1, 0) + b"a\0bc\0",
        requests.Rename(Inode(9), 1, b"a", b"bc"),
    ),
    Opcode.OPEN: (struct.pack("<II", 0o100000, 0), requests.Open(0o100000)),
    Opcode.OPENDIR: (struct.pack("<II", 0o200000, 0), requests.Open(0o200000)),
    Opcode.READ: (READ_BODY, requests.Read(Handle(5), 1 << 40, 4096)),
    Opcode.READDIR: (READ_BODY, requests.Read(Handle(5), 1 << 40, 4096)),
    Opcode.READDIRPLUS: (READ_BODY, requests.Read(Handle(5), 1 << 40, 4096)),
    Opcode.WRITE: (WRITE_BODY, requests.Write(Handle(5), 4096, memoryview(b"abcdef"), 9)),
    Opcode.RELEASE: (RELEASE_BODY, requests.HandleOnly(Handle(5))),
    Opcode.RELEASEDIR: (RELEASE_BODY, requests.HandleOnly(Handle(5))),
    Opcode.FLUSH: (requests.FLUSH_IN.struct.pack(5, 0, 0, 9), requests.Flush(Handle(5), 9)),
    Opcode.FSYNC: (FSYNC_BODY, requests.HandleOnly(Handle(5))),
    Opcode.FSYNCDIR: (FSYNC_BODY, requests.HandleOnly(Handle(5))),
    Opcode.GETXATTR: (struct.pack("<II", 64, 0) + b"user.k\0", requests.Getxattr(64, b"user.k")),
    Opcode.LISTXATTR: (struct.pack("<II", 0, 0), requests.Listxattr(0)),
    Opcode.CREATE: (
        struct.pack("<IIII", 0o101, 0o100644, 0o22, 0) + b"new\0",
        requests.Create(0o101, 0o100644, 0o22, b"new"),
    ),
    Opcode.INTERRUPT: (struct.pack("<Q", 77), requests.Interrupt(77)),
    Opcode.INIT: (INIT_BODY, requests.Init(7, 38, 131072, 0x11_F000_000F)),
}
EACH = pytest.mark.parametrize("opcode", list(REQUESTS), ids=lambda o: o.name)


@EACH
def test_a_whole_request_is_read(opcode: Opcode) -> None:
    body, expected = REQUESTS[opcode]
    parsed = requests.parse(memoryview(request(opcode, body)))
    assert parsed == (opcode, 7, 3, 1, 2, 99, expected)


@EACH
def test_a_request_cut_anywhere_is_refused(opcode: Opcode) -> None:
    body, expected = REQUESTS[opcode]
    whole = request(opcode, body)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError, match="request"):
            requests.parse(memoryview(whole)[:length])
        if length < 40 or (opcode == Opcode.INIT and length == OLD_INIT_BYTES):
            continue
        # The same, but with a header that tells the truth about the shorter request.
        honest = struct.pack("<I", length) + whole[4:length]
        try:
            parsed = requests.parse(memoryview(honest))
        except ProtocolError:
            continue
        # What is left may be whole only where the rest was unused.
        assert parsed.body == expected
        assert length >= 40 + len(body.rstrip(b"\0")), "a request without its end was taken"


@EACH
def test_bytes_after_the_request_are_refused(opcode: Opcode) -> None:
    with pytest.raises(ProtocolError, match="says"):
        requests.parse(memoryview(request(opcode, REQUESTS[opcode][0]) + b"\0"))


def test_extensions_after_the_names_are_left_alone() -> None:
    body = struct.pack("<IIII", 1, 0o644, 0, 0) + b"new\0" + b"\x18\0\0\0\x20\0\0\0" + bytes(16)
    assert requests.parse(memoryview(request(Opcode.CREATE, body))).body.name == b"new"


@pytest.mark.parametrize("body", [b"", b"\0", b"no end"], ids=["none", "empty", "no end"])
def test_a_name_must_be_one(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="name"):
        requests.parse(memoryview(request(Opcode.LOOKUP, body)))


def test_a_write_may_not_say_more_than_it_brings() -> None:
    body = requests.WRITE_IN.struct.pack(5, 0, 7, 0, 0, 0, 0) + b"abcdef"
    with pytest.raises(ProtocolError, match="7 bytes to write, 6 sent"):
        requests.parse(memoryview(request(Opcode.WRITE, body)))


def test_a_batch_may_not_say_more_than_it_brings() -> None:
    with pytest.raises(ProtocolError, match="do not fit"):
        requests.parse(memoryview(request(Opcode.BATCH_FORGET, struct.pack("<IIQQ", 9, 0, 1, 1))))


def test_an_old_kernels_init_is_read() -> None:
    parsed = requests.parse(memoryview(request(Opcode.INIT, struct.pack("<IIII", 7, 31, 65536, 9))))
    assert parsed.body == requests.Init(7, 31, 65536, 9)


def test_the_hot_path_reads_what_the_parser_reads() -> None:
    whole = request(Opcode.READ, READ_BODY, unique=1 << 63 | 5)
    parsed = requests.parse(memoryview(whole))
    assert requests.READ_FIELDS.unpack_from(whole) == (
        parsed.opcode,
        parsed.unique,
        parsed.inode,
        *parsed.body,
    )


@given(st.binary(max_size=400))
def test_any_bytes_give_a_request_or_a_clean_error(data: bytes) -> None:
    try:
        requests.parse(memoryview(data))
    except ProtocolError:
        pass


@given(st.integers(0, 4200), st.binary(max_size=200))
def test_any_body_gives_a_request_or_a_clean_error(opcode: int, body: bytes) -> None:
    try:
        parsed = requests.parse(memoryview(request(opcode, body)))
    except ProtocolError:
        return
    assert (parsed.unique, parsed.inode, parsed.pid) == (7, 3, 99)


@given(st.integers(0, 60), st.binary(max_size=200), st.booleans())
def test_any_request_gets_one_answer(opcode: int, body: bytes, read_only: bool) -> None:
    """Of a tree that knows no such inode or handle: an errno, never an exception."""
    faults = Reporter("fuse.fault")
    tree = WritableTree()
    options = MountOptions(read_only=read_only)
    dispatcher = Dispatcher(tree, options, Backings(-1, None, faults), faults)
    unique, number, answer = dispatcher.dispatch(memoryview(request(opcode, body, inode=77)))
    assert unique == 7
    assert number >= 0
    assert not (number and answer)


ENTRIES = [
    Entry(f"name-{n}".encode() * (n % 5 + 1), Attr(Inode(n), stat.S_IFREG | 0o444, n * 100))
    for n in range(2, 60)
]


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("size", [300, 512, 4096, 1 << 20])
def test_a_listing_in_pieces_is_whole(plus: bool, size: int) -> None:
    found, offset = [], 0
    while True:
        if plus:
            packed = replies.pack_listing(ENTRIES, Inode(1), offset, size, plus_timeout_s=60.0)
        else:
            packed = replies.pack_listing(ENTRIES, Inode(1), offset, size)
        assert len(packed) <= size
        if not packed:
            break
        for inode, following, name, attr_size in unpack_listing(packed, plus):
            assert following == offset + 1
            offset = following
            found.append((inode, name, attr_size))
    sizes = {e.attr.inode: e.attr.size_bytes if plus else None for e in ENTRIES}
    dots = [(1, b".", 0 if plus else None), (1, b"..", 0 if plus else None)]
    assert found == dots + [(e.attr.inode, e.name, sizes[e.attr.inode]) for e in ENTRIES]


def unpack_listing(packed: bytes, plus: bool) -> list[tuple[int, int, bytes, int | None]]:
    found = []
    position = 0
    while position < len(packed):
        attr_size = None
        if plus:
            attr_size = struct.unpack_from("<Q", packed, position + 48)[0]
            position += replies.ENTRY_OUT.struct.size
        inode, following, length, _ = replies.DIRENT.struct.unpack_from(packed, position)
        start = position + replies.DIRENT.struct.size
        found.append((inode, following, packed[start : start + length], attr_size))
        position = start + -(-length // 8) * 8
    return found


def test_attributes_say_what_was_given() -> None:
    attr = Attr(Inode(5), stat.S_IFREG | 0o640, 4097, -1_500_000_000, 3, 11, 12, 13)
    fields = replies.ATTR.struct.unpack(replies.pack_attributes(attr))
    names = [name for name, _ in replies.ATTR.fields]
    said = dict(zip(names, fields, strict=True))
    assert said["size"] == 4097
    assert said["blocks"] == 9
    assert said["mode"] == stat.S_IFREG | 0o640
    assert (said["nlink"], said["uid"], said["gid"], said["rdev"]) == (3, 11, 12, 13)
    assert struct.unpack("<q", struct.pack("<Q", said["mtime"])) == (-2,)
    assert said["mtimensec"] == 500_000_000


def test_timeouts_keep_their_fraction() -> None:
    attr = Attr(Inode(5), stat.S_IFREG, 0)
    fields = replies.ENTRY_OUT.struct.unpack(replies.pack_entry(attr, 1.5))
    assert fields[2:6] == (1, 1, 500_000_000, 500_000_000)


def test_init_splits_the_flags_into_their_words() -> None:
    packed = replies.pack_init(
        minor=45,
        max_readahead=1,
        flags=replies.PASSTHROUGH | replies.INIT_EXT | 1,
        max_background=64,
        max_write=1 << 20,
        max_pages=256,
    )
    names = [name for name, _ in replies.INIT_OUT.fields]
    said = dict(zip(names, replies.INIT_OUT.struct.unpack(packed), strict=True))
    assert (said["major"], said["minor"]) == (7, requests.MINOR)
    assert said["flags"] == 1 | 1 << 30
    assert said["flags2"] == 1 << 5
    assert said["_max_stack_depth"] == 1
    assert (said["max_background"], said["congestion_threshold"]) == (64, 48)
