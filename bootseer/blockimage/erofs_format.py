"""The EROFS on-disk format, as far as our images need it. Pure: records to bytes.

Written from the format's description in the Linux kernel (fs/erofs/erofs_fs.h, and
Documentation/filesystems/erofs.rst). What we use: blocks of 4 KiB, extended inodes, files in
chunks on one extra device, inline directories, links and extended attributes. Everything else of
the format is left out, so that kernels from 5.16 on can mount it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from bootseer.blockimage.tree_entries import FileExtent

BLOCK_BYTES = 4096
SLOT_BYTES = 32
INODE_BYTES = 64
NAME_BYTES = 255
NULL_BLOCK = 0xFFFFFFFF
FIRST_INODE_BYTES = 1280  # behind the superblock and the device's slot

_SUPER_OFFSET = 1024
_DEVICE_OFFSET = 1152
_DEVICE_SLOT_BYTES = 128
_MAGIC = 0xE0F5E1E2
_COMPAT_CHECKSUM, _COMPAT_MTIME = 1, 2
_INCOMPAT_CHUNKED, _INCOMPAT_DEVICES = 4, 8
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_DEVICE = struct.Struct("<64sII56x")
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_DIRENT = struct.Struct("<QHBx")
_XATTR_HEAD_BYTES = 12
_CHUNK = struct.Struct("<HHI")

PLAIN, INLINE, CHUNKED = 0, 2, 4
_EXTENDED = 1
_CHUNK_INDEXES = 0x20
_DATA_DEVICE = 1
# File types of directory entries, by `st_mode >> 12`.
_FILE_TYPES = {8: 1, 4: 2, 2: 3, 6: 4, 1: 5, 12: 6, 10: 7}
_XATTR_PREFIXES = (
    (1, b"user."),
    (4, b"trusted."),
    (6, b"security."),
)
_XATTR_WHOLE = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}


def xattr_index(name: bytes) -> tuple[int, bytes] | None:
    """A name's prefix number and what is left of it; None for what EROFS cannot hold."""
    if name in _XATTR_WHOLE:
        return _XATTR_WHOLE[name], b""
    for index, prefix in _XATTR_PREFIXES:
        if name.startswith(prefix) and len(prefix) < len(name) <= len(prefix) + 255:
            return index, name[len(prefix) :]
    return None


def xattr_body(xattrs: Mapping[bytes, bytes]) -> bytes:
    """The inline attributes behind an inode; empty for none. Their names must be storable."""
    if not xattrs:
        return b""
    body = bytearray(_XATTR_HEAD_BYTES)
    for name in sorted(xattrs):
        indexed = xattr_index(name)
        if indexed is None:
            raise ValueError(f"EROFS has no place for the attribute {name!r}")
        index, rest = indexed
        value = xattrs[name]
        body += struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        body += bytes(-len(body) % 4)
    return bytes(body)


def inode(
    *,
    layout: int,
    xattr_bytes: int,
    mode: int,
    size_bytes: int,
    place: int,
    owner: tuple[int, int],
    mtime_ns: int,
    links: int,
) -> bytes:
    """An extended inode; `place` is its block address, device number or chunk format."""
    seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
    count = 1 + (xattr_bytes - _XATTR_HEAD_BYTES) // 4 if xattr_bytes else 0
    return _INODE.pack(
        _EXTENDED | layout << 1,
        count,
        mode,
        0,
        size_bytes,
        place,
        0,  # an inode number that kernels do not use: they derive it from the inode's position
        *owner,
        seconds & 0xFFFFFFFFFFFFFFFF,
        nanoseconds,
        links,
    )


def device_number(rdev: int) -> int:
    """Linux's `st_rdev` as 32 bits: 12 of the major and 20 of the minor number."""
    major = (rdev >> 8) & 0xFFF | (rdev >> 32) & ~0xFFF
    minor = rdev & 0xFF | (rdev >> 12) & ~0xFF
    return (minor & 0xFF) | (major & 0xFFF) << 8 | (minor & 0xFFF00) << 12


def chunk_format(chunk_bytes: int) -> int:
    """What an inode in chunks has for its place."""
    return _CHUNK_INDEXES | (chunk_bytes.bit_length() - 1 - 12)


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    """Into how many chunks a file is cut."""
    return -(-size_bytes // chunk_bytes)


def chunk_indexes(size_bytes: int, chunk_bytes: int, extents: Iterable[FileExtent]) -> bytes:
    """Where a file's chunks lie on the data device; what no extent covers is a hole."""
    count = chunk_count(size_bytes, chunk_bytes)
    out = bytearray(_CHUNK.pack(0, 0, NULL_BLOCK) * count)
    for extent in extents:
        first = extent.file_offset // chunk_bytes
        block = extent.data_offset // BLOCK_BYTES
        for number in range(chunk_count(extent.length, chunk_bytes)):
            place = block + number * (chunk_bytes // BLOCK_BYTES)
            _CHUNK.pack_into(out, 8 * (first + number), 0, _DATA_DEVICE, place)
    return bytes(out)


def split_names(names: Sequence[bytes]) -> list[int]:
    """Where each block of a directory begins: numbers of sorted names (".", ".." included)."""
    starts, used = [0], 0
    for number, name in enumerate(names):
        size = _DIRENT.size + len(name)
        if used + size > BLOCK_BYTES:
            starts.append(number)
            used = 0
        used += size
    return starts


def directory_bytes(names: Sequence[bytes]) -> int:
    """A directory's size: whole blocks, and the last one as far as it is used."""
    starts = split_names(names)
    last = sum(_DIRENT.size + len(name) for name in names[starts[-1] :])
    return (len(starts) - 1) * BLOCK_BYTES + last


def directory(names: Sequence[tuple[bytes, int, int]]) -> bytes:
    """A directory's content of sorted (name, nid, `st_mode >> 12`)."""
    starts = split_names([name for name, _, _ in names])
    out = bytearray()
    for start, end in zip(starts, [*starts[1:], len(names)], strict=True):
        out += bytes(-len(out) % BLOCK_BYTES)
        at = (end - start) * _DIRENT.size
        for name, nid, kind in names[start:end]:
            out += _DIRENT.pack(nid, at, _FILE_TYPES[kind])
            at += len(name)
        out += b"".join(name for name, _, _ in names[start:end])
    return bytes(out)


def superblock(
    *, inodes: int, root_nid: int, blocks: int, device_blocks: int, uuid: bytes
) -> bytes:
    """Everything from byte 0 to the first inode."""
    fields = (
        _COMPAT_CHECKSUM | _COMPAT_MTIME,
        BLOCK_BYTES.bit_length() - 1,
        0,
        root_nid,
        inodes,
        0,
        0,
        blocks,
        0,
        0,
        uuid,
        b"",
        _INCOMPAT_CHUNKED | _INCOMPAT_DEVICES,
        0,
        1,
        _DEVICE_OFFSET // _DEVICE_SLOT_BYTES,
        0,
        0,
        0,
        0,
    )
    return (
        bytes(_SUPER_OFFSET) + _SUPER.pack(_MAGIC, 0, *fields) + _DEVICE.pack(b"", device_blocks, 0)
    )


def write_checksum(block: bytearray) -> None:
    """Put the checksum of the first block, which must be whole, into its superblock."""
    checked = bytes(block[_SUPER_OFFSET:BLOCK_BYTES])
    struct.pack_into("<I", block, _SUPER_OFFSET + 4, _crc32c(checked))


def _crc32c(data: bytes) -> int:
    """CRC-32C as the kernel keeps it: begun with ones, not inverted at the end."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc
