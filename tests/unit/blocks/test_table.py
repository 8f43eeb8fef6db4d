"""The block table: its bytes, what it refuses, and blocks read through it."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import table
from bootseer.blocks.table import Codec, DigestKind, Limits, Stored, Table, TableSource
from bootseer.errors import CorruptDataError, UsageError
from bootseer.storage.local import LocalStore
from tests.support.samples.block_sources import some_bytes

BLOCK = 1024
KINDS = pytest.mark.parametrize("kind", list(DigestKind))


def write(path: Path, raw: bytes, kind: DigestKind = DigestKind.SHA256) -> Table:
    """Store an object block by block, compressed where that pays, and give its table."""
    blocks, stored = [], bytearray()
    for start in range(0, len(raw), BLOCK):
        block = raw[start : start + BLOCK]
        codec, packed = table.pack(block)
        blocks.append(Stored(len(stored), len(packed), codec, table.digest_of(kind, block)))
        stored += packed
    path.write_bytes(stored)
    return Table.of(len(raw), blocks, block_bytes=BLOCK, kind=kind)


def open_block(source: TableSource, index: int) -> bytes:
    place = source.locate(index)
    stored = bytearray(place.length)
    source.store.read_range(place.part, place.offset, stored)
    size = min(source.block_bytes, source.size_bytes - index * source.block_bytes)
    raw = stored if source.in_place else bytearray(size)
    source.open_block(index, memoryview(stored), memoryview(raw))
    return bytes(raw)


def signed(body: bytes) -> bytes:
    """A table whose own digest is right, whatever it says."""
    return body + hashlib.sha256(body).digest()


STORED = st.builds(
    lambda offset, length, codec, seed: Stored(
        offset, length, codec, hashlib.sha256(seed).digest()
    ),
    st.integers(0, 1 << 40),
    st.integers(1, BLOCK),
    st.sampled_from(Codec),
    st.binary(max_size=4),
)


@given(st.lists(STORED, max_size=20), st.integers(0, BLOCK - 1), st.booleans())
def test_a_table_comes_back(blocks: list[Stored], short: int, behind: bool):
    if behind:
        at = 0
        for number, block in enumerate(blocks):
            blocks[number] = block._replace(offset=at)
            at += block.length
    size = max(0, len(blocks) * BLOCK - short)
    data = Table.of(size, blocks, block_bytes=BLOCK).serialise()
    found = table.parse(data)
    assert [found[number] for number in range(found.blocks)] == blocks
    assert (found.size_bytes, found.block_bytes, found.blocks) == (size, BLOCK, len(blocks))
    assert found.serialise() == data


def test_a_block_takes_few_bytes(tmp_path: Path):
    data = write(tmp_path / "o", some_bytes(100 * BLOCK)).serialise()
    assert len(data) == 40 + 37 * 100 + 32


@given(st.binary(max_size=200))
def test_noise_is_refused_cleanly(noise: bytes):
    with pytest.raises(CorruptDataError):
        table.parse(noise)
    with pytest.raises(CorruptDataError):
        table.parse(signed(table.MAGIC + noise))


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path):
    data = write(tmp_path / "o", some_bytes(3 * BLOCK)).serialise()
    for length in range(len(data)):
        with pytest.raises(CorruptDataError):
            table.parse(data[:length])
    for at in range(len(data)):
        with pytest.raises(CorruptDataError):
            table.parse(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CorruptDataError):
        table.parse(data + b"\0")


def hostile(**changed: int) -> bytes:
    """One block's table with chosen lies, and a right digest."""
    values = {
        "kind": 1,
        "flags": 1,
        "block_bytes": BLOCK,
        "size_bytes": BLOCK,
        "blocks": 1,
        "stored_bytes": BLOCK,
        "length": BLOCK,
        "codec": 0,
        "offset": 0,
        **changed,
    }
    head = struct.pack(
        "<8sBB2xIQQQ",
        table.MAGIC,
        *(values[n] for n in ("kind", "flags", "block_bytes", "size_bytes", "blocks")),
        values["stored_bytes"],
    )
    body = struct.pack("<IBQ", values["length"], values["codec"], values["offset"])
    return signed(head + body + bytes(32))


@pytest.mark.parametrize(
    "lie",
    [
        {"kind": 3},
        {"flags": 2},
        {"block_bytes": 0},
        {"block_bytes": 1 << 31},
        {"size_bytes": BLOCK + 1},
        {"size_bytes": 0},
        {"blocks": 1 << 60, "size_bytes": 1 << 63},
        {"blocks": 2, "size_bytes": 2 * BLOCK},
        {"stored_bytes": BLOCK - 1},
        {"length": 0, "stored_bytes": 0},
        {"length": 4 * BLOCK, "stored_bytes": 4 * BLOCK},
        {"codec": 2},
        {"offset": 1},
        {"offset": 1 << 63, "stored_bytes": (1 << 63) + BLOCK},
    ],
    ids=str,
)
def test_lies_with_a_right_digest_are_refused(lie: dict[str, int]):
    assert table.parse(hostile()).blocks == 1
    with pytest.raises(CorruptDataError):
        table.parse(hostile(**lie))


def test_limits_hold(tmp_path: Path):
    data = write(tmp_path / "o", some_bytes(3 * BLOCK)).serialise()
    for limits in (Limits(blocks=2), Limits(block_bytes=BLOCK - 1), Limits(table_bytes=100)):
        with pytest.raises(CorruptDataError):
            table.parse(data, limits=limits)


def test_blocks_of_another_size_do_not_make_the_object():
    block = Stored(0, BLOCK, Codec.NONE, bytes(32))
    for size in (BLOCK + 1, 0):
        with pytest.raises(UsageError):
            Table.of(size, [block], block_bytes=BLOCK)
    with pytest.raises(UsageError):
        Table.of(BLOCK, [block._replace(digest=b"short")], block_bytes=BLOCK)


@KINDS
@pytest.mark.parametrize("text", [b"", b"\0" * 5000, b"word " * 999, some_bytes(4097)])
def test_an_object_is_read_through_its_table(tmp_path: Path, kind: DigestKind, text: bytes):
    found = table.parse(write(tmp_path / "o", text, kind).serialise())
    source = TableSource(found, LocalStore(str(tmp_path)), "o", source_class="image")
    assert b"".join(open_block(source, index) for index in range(found.blocks)) == text
    assert source.source_class == "image"
    assert source.ends_stretch("o", 0) == found.stored_bytes


def test_mixed_codecs_and_in_place(tmp_path: Path):
    mixed = write(tmp_path / "mixed", some_bytes(BLOCK) + bytes(BLOCK))
    assert not mixed.in_place
    plain = write(tmp_path / "plain", some_bytes(2 * BLOCK))
    assert plain.in_place
    source = TableSource(mixed, LocalStore(str(tmp_path)), "mixed")
    assert open_block(source, 0) == some_bytes(BLOCK)
    assert open_block(source, 1) == bytes(BLOCK)


def test_equal_tables_have_one_key_and_others_another(tmp_path: Path):
    store = LocalStore(str(tmp_path))
    some, same = (write(tmp_path / n, some_bytes(3000)) for n in ("a", "b"))
    other = write(tmp_path / "c", some_bytes(3000, seed=1))
    keys = [TableSource(t, store, "x").key for t in (some, same, other)]
    assert keys[0] == keys[1] != keys[2]


@KINDS
@pytest.mark.parametrize("text", [bytes(3 * BLOCK), some_bytes(3 * BLOCK)], ids=["zstd", "none"])
def test_every_flipped_byte_of_a_stored_block_is_noticed(
    tmp_path: Path, kind: DigestKind, text: bytes
):
    source = TableSource(write(tmp_path / "o", text, kind), LocalStore(str(tmp_path)), "o")
    place = source.locate(1)
    whole = (tmp_path / "o").read_bytes()
    step = 1 if place.length < 100 else 61
    for at in range(place.offset, place.offset + place.length, step):
        (tmp_path / "o").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if zstd_ignores(whole, place.offset, place.length, at):
            continue
        with pytest.raises(CorruptDataError, match="block 1 of o"):
            open_block(source, 1)


def zstd_ignores(whole: bytes, offset: int, length: int, at: int) -> bool:
    """A flipped bit that changes nothing of what is unpacked does no harm."""
    changed = bytearray(whole[offset : offset + length])
    changed[at - offset] ^= 1
    before = zstandard.ZstdDecompressor()
    try:
        packed = before.decompressobj().decompress(whole[offset : offset + length])
        return before.decompressobj().decompress(bytes(changed)) == packed
    except zstandard.ZstdError:
        return False


@pytest.mark.parametrize("claimed", [True, False], ids=["size in header", "size unknown"])
def test_a_bomb_makes_no_more_than_its_block(tmp_path: Path, claimed: bool):
    packed = zstandard.ZstdCompressor(write_content_size=claimed).compress(bytes(64 << 20))
    raw = memoryview(bytearray(BLOCK))
    with pytest.raises(CorruptDataError, match="more"):
        table.Unpacker().unpack(memoryview(packed), raw, "the bomb")


def test_a_frame_that_wants_a_huge_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    packing = compressor.compressobj()  # of unknown size, so that the window is not shrunk
    packed = packing.compress(bytes(BLOCK)) + packing.flush()
    with pytest.raises(CorruptDataError):
        table.Unpacker().unpack(memoryview(packed), memoryview(bytearray(BLOCK)), "it")


def test_a_short_frame_is_refused():
    packed = zstandard.compress(bytes(BLOCK - 1))
    with pytest.raises(CorruptDataError, match=f"{BLOCK - 1} bytes instead of {BLOCK}"):
        table.Unpacker().unpack(memoryview(packed), memoryview(bytearray(BLOCK)), "it")
