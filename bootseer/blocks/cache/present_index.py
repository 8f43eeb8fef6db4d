"""Which blocks of a cached object are there: the file `present` of the node cache.

A header names the object; one entry a block follows: 16 zero bytes while it is absent, else the
xxh3-128 of its raw bytes, seeded with its number. So the entry says that the block is there and
checks it: a block counts only while the bytes in `data` match it. docs/blocks.md has the format and
why no fsync is needed.

The header also says whether `data` is frozen: then no process ever writes to it again (see
`sealed_objects`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from typing import NamedTuple

import xxhash

from bootseer.blocks.source import BlockSource, block_count

MAGIC = b"BSCACHE\x01"
FROZEN = b"BSCACHE\x02"
HEADER = struct.Struct("<8s32sQQ8x")
ENTRY_BYTES = 16
ABSENT = bytes(ENTRY_BYTES)
_ONE = b"\x01" + bytes(ENTRY_BYTES - 1)
MAX_BLOCKS = 1 << 24

# struct flock of open-file-description locks: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")


class Identity(NamedTuple):
    """What a cached object is: equal identities have equal blocks."""

    digest: bytes
    size_bytes: int
    block_bytes: int

    @property
    def folder(self) -> str:
        """Its folder's name in the cache."""
        return self.digest[:20].hex()

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return -(-self.size_bytes // self.block_bytes)

    @property
    def header(self) -> bytes:
        """The first bytes of its `present`."""
        return HEADER.pack(MAGIC, self.digest, self.size_bytes, self.block_bytes)

    @property
    def table_bytes(self) -> int:
        """Length of its `present`."""
        return HEADER.size + self.blocks * ENTRY_BYTES


def identity_of(source: BlockSource) -> Identity | None:
    """The identity under which a source may be cached; None when it must not be."""
    if not source.key or not 0 < block_count(source) <= MAX_BLOCKS:
        return None
    return identity_for(source.key, source.size_bytes, source.block_bytes)


def identity_for(key: str, size_bytes: int, block_bytes: int) -> Identity:
    """The identity of an object that has this key."""
    text = f"{size_bytes} {block_bytes} {key}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return Identity(digest, size_bytes, block_bytes)


def parse_header(data: bytes) -> Identity | None:
    """The identity that a header names; None when it is none of this version."""
    if len(data) < HEADER.size:
        return None
    magic, digest, size_bytes, block_bytes = HEADER.unpack_from(data)
    identity = Identity(digest, size_bytes, block_bytes)
    usable = magic in (MAGIC, FROZEN) and size_bytes > 0 and block_bytes > 0
    return identity if usable and identity.blocks <= MAX_BLOCKS else None


def read_identity(fd: int) -> Identity | None:
    """The identity that a `present` names."""
    return parse_header(os.pread(fd, HEADER.size, 0))


def is_frozen(fd: int) -> bool:
    """Whether the object's `data` must never be written to, punched or cut again."""
    return os.pread(fd, len(FROZEN), 0) == FROZEN


def freeze(fd: int) -> None:
    """Mark the object as frozen. Raises OSError.

    Either only the caller has it open, or all its blocks are there.
    """
    if os.pwrite(fd, FROZEN, 0) != len(FROZEN):
        raise OSError(errno.ENOSPC, "short write")


def is_whole(fd: int, identity: Identity) -> bool:
    """Whether all blocks are there."""
    entries = read_entries(fd, 0, identity.blocks)
    if ABSENT not in entries:  # anywhere: quick, and nearly always enough
        return True
    return not any(entries.startswith(ABSENT, at) for at in range(0, len(entries), ENTRY_BYTES))


def check_of(index: int, raw: memoryview | bytes) -> bytes:
    """The entry of a block that is there. The block's number is part of it, to detect swaps."""
    digest = xxhash.xxh3_128_digest(raw, seed=index)
    return digest if digest != ABSENT else _ONE


def position(index: int) -> int:
    """Where a block's entry starts."""
    return HEADER.size + index * ENTRY_BYTES


def read_entry(fd: int, index: int) -> bytes:
    """A block's entry; ABSENT also when the file is cut short."""
    entry = os.pread(fd, ENTRY_BYTES, position(index))
    return entry if len(entry) == ENTRY_BYTES else ABSENT


def write_entry(fd: int, index: int, entry: bytes) -> None:
    """Set a block's entry; OSError when the medium fails."""
    # Entries never cross a page, so no reader sees half of one.
    if os.pwrite(fd, entry, position(index)) != ENTRY_BYTES:
        raise OSError(errno.ENOSPC, "short write")


def read_entries(fd: int, first: int, count: int) -> bytes:
    """The entries of a run of blocks, padded with absent ones where the file is cut short."""
    wanted = count * ENTRY_BYTES
    return os.pread(fd, wanted, position(first)).ljust(wanted, b"\0")


def claim_entry(fd: int, index: int) -> bool:
    """Lock one entry for this open file; False while another open file holds it.

    The kernel releases it when the file is closed, however its process ends.
    """
    return _lock(fd, fcntl.F_WRLCK, index)


def unclaim_entry(fd: int, index: int) -> None:
    """Release an entry's lock; one that is not held is no error."""
    _lock(fd, fcntl.F_UNLCK, index)


def claimed_elsewhere(fd: int, index: int) -> bool:
    """Whether another open file holds an entry's lock."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position(index), ENTRY_BYTES, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _lock(fd: int, kind: int, index: int) -> bool:
    wanted = _FLOCK.pack(kind, os.SEEK_SET, position(index), ENTRY_BYTES, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    return True
