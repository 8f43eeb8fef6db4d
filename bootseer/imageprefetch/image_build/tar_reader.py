"""Parsing tar headers. Pure.

The formats of image layers: ustar (POSIX 1003.1-1988), pax (POSIX 1003.1-2001), GNU's long names,
base-256 numbers and sparse files, old and in pax records (versions 0.0, 0.1 and 1.0 of the GNU tar
manual), and `SCHILY.xattr` records. Where the formats are ambiguous, this module does as container
programs do; docs/block-image-format.md lists these cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bootseer.blockimage.tree_entries import Kind
from bootseer.errors import CorruptDataError

BLOCK = 512
MAX_HEADER_BYTES = 1 << 20  # of one pax header or long name
MAX_SEGMENTS = 1 << 18
_NO_BLOCK = bytes(BLOCK)
_HEADER_ONLY = b"123456"
_KINDS = {
    b"0": Kind.FILE,
    b"7": Kind.FILE,
    b"S": Kind.FILE,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHARACTER,
    b"4": Kind.BLOCK,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_XATTR = b"SCHILY.xattr."
_DECIMAL = re.compile(rb"(-?)(\d{1,19})(?:\.(\d*))?")


class Pax(NamedTuple):
    """The records of a pax header: the last of each key, and all of GNU's sparse 0.0 in order."""

    records: dict[bytes, bytes]
    sparse: list[bytes]


NO_PAX = Pax({}, [])


@dataclass(slots=True)
class Member:
    """One member of a tar file.

    `kind` is None for a hard link, whose target is `link_target`. `stored_bytes` follow in the
    archive (before padding); `segments` are their places in the file, None where they are all of
    it. `sparse_map_inside`: the stored bytes begin with the segments. `sparse_goes_on`: a block
    with further segments follows.
    """

    name: bytes
    kind: Kind | None
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size_bytes: int
    stored_bytes: int
    link_target: bytes = b""
    rdev: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    segments: list[tuple[int, int]] | None = None
    sparse_map_inside: bool = False
    sparse_goes_on: bool = False


def is_end(block: bytes) -> bool:
    """Whether a block is one of the two that end an archive."""
    return block == _NO_BLOCK


def check_sum(block: bytes) -> None:
    """Raise CorruptDataError unless a header's checksum is right, of signed or unsigned bytes."""
    wanted = number(block[148:156], "a checksum")
    blank = block[:148] + b"        " + block[156:]
    total = sum(blank)
    if wanted != total and wanted != total - 256 * sum(byte >= 128 for byte in blank):
        raise CorruptDataError("a tar header is damaged: its checksum is wrong")


def number(text: bytes, what: str) -> int:
    """A number in octal digits, or in GNU's base 256."""
    if text[0] & 0x80:
        return int.from_bytes(bytes([text[0] & 0x7F]) + text[1:], "big") - (
            1 << (8 * len(text) - 1) if text[0] & 0x40 else 0
        )
    digits = text.strip(b" \0")
    end = digits.find(b"\0")
    digits = digits[:end] if end >= 0 else digits
    if not digits:
        return 0
    try:
        return int(digits, 8)
    except ValueError as error:
        raise CorruptDataError(f"a tar header is damaged: {what} is no number") from error


def text_of(field_bytes: bytes) -> bytes:
    """A field's text, which ends at the first NUL."""
    return field_bytes.partition(b"\0")[0]


def parse_pax(data: bytes) -> Pax:
    """Read records of the form `LENGTH KEY=VALUE\\n`."""
    records: dict[bytes, bytes] = {}
    sparse: list[bytes] = []
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 12)
        digits = data[at:space] if space > 0 else b""
        if not digits.isdigit():
            if not data[at:].strip(b"\0"):
                break
            raise CorruptDataError("a pax header is damaged: a record has no length")
        end = at + int(digits)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end > len(data) or data[end - 1 : end] != b"\n" or not equals or not key:
            raise CorruptDataError("a pax header is damaged: a record does not end where it says")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            sparse.append(value)
        else:
            records[key] = value
        at = end
    return Pax(records, sparse)


def parse_member(
    block: bytes, pax: Pax = NO_PAX, long_name: bytes = b"", long_link: bytes = b""
) -> Member:
    """A member by its header and the headers before it."""
    flag = block[156:157]
    name = text_of(block[:100])
    if block[257:265] == b"ustar\x0000" and (prefix := text_of(block[345:500])):
        name = prefix + b"/" + name
    name = long_name or name
    if flag == b"\0":
        flag = b"5" if name.endswith(b"/") else b"0"
    if flag != b"1" and flag not in _KINDS:
        raise CorruptDataError(f"a tar member has the type {flag!r}, which no layer may hold")
    stored = number(block[124:136], "a size")
    member = Member(
        name=name,
        kind=_KINDS.get(flag),
        mode=number(block[100:108], "a mode") & 0o7777,
        uid=number(block[108:116], "an owner"),
        gid=number(block[116:124], "a group"),
        mtime_ns=number(block[136:148], "a time") * 1_000_000_000,
        size_bytes=0,
        stored_bytes=stored,
        link_target=long_link or text_of(block[157:257]),
    )
    if member.kind in (Kind.CHARACTER, Kind.BLOCK):
        major = number(block[329:337], "a device")
        minor = number(block[337:345], "a device")
        member.rdev = _device(major, minor)
    if pax.records:
        _apply(member, pax.records)
    if flag in _HEADER_ONLY:
        member.stored_bytes = 0
    _check_numbers(member)
    member.size_bytes = member.stored_bytes
    if flag == b"S":
        _old_sparse(member, block)
    elif b"GNU.sparse.major" in pax.records or pax.sparse or b"GNU.sparse.map" in pax.records:
        _pax_sparse(member, pax)
    return member


def _check_numbers(member: Member) -> None:
    if not 0 <= member.stored_bytes < 1 << 62:
        raise CorruptDataError("a tar member has an impossible size")
    if not (0 <= member.uid < 1 << 32 and 0 <= member.gid < 1 << 32):
        raise CorruptDataError("a tar member has an impossible owner")
    if not -(1 << 63) <= member.mtime_ns // 1_000_000_000 < 1 << 63:
        raise CorruptDataError("a tar member has an impossible time")


def _device(major: int, minor: int) -> int:
    if not 0 <= major < 1 << 12 or not 0 <= minor < 1 << 20:
        raise CorruptDataError("a tar member has an impossible device number")
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def _apply(member: Member, records: dict[bytes, bytes]) -> None:
    """Apply pax records, which override the header; an empty one is ignored."""
    for key, value in records.items():
        if not value:
            continue
        if key.startswith(_XATTR):
            member.xattrs[key[len(_XATTR) :]] = value
        elif key == b"path":
            member.name = _no_nul(value)
        elif key == b"linkpath":
            member.link_target = _no_nul(value)
        elif key == b"size":
            member.stored_bytes = _integer(value)
        elif key == b"uid":
            member.uid = _integer(value)
        elif key == b"gid":
            member.gid = _integer(value)
        elif key == b"mtime":
            member.mtime_ns = nanoseconds(value)


def _no_nul(value: bytes) -> bytes:
    if b"\0" in value:
        raise CorruptDataError("a pax header has a name with a NUL in it")
    return value


def _integer(value: bytes) -> int:
    if not value.isdigit() or len(value) > 19:
        raise CorruptDataError(f"a pax header has {value[:40]!r} for a number")
    return int(value)


def nanoseconds(value: bytes) -> int:
    """A time in decimal seconds, exactly; digits beyond a nanosecond are cut off."""
    match = _DECIMAL.fullmatch(value)
    if match is None:
        raise CorruptDataError(f"a pax header has {value[:40]!r} for a time")
    sign, seconds, fraction = match.groups()
    whole = int(seconds) * 1_000_000_000 + int(((fraction or b"") + b"000000000")[:9])
    whole = -whole if sign else whole
    if not -(1 << 63) <= whole // 1_000_000_000 < 1 << 63:
        raise CorruptDataError(f"a pax header has {value[:40]!r} for a time")
    return whole


def _old_sparse(member: Member, block: bytes) -> None:
    member.segments, member.sparse_goes_on = [], bool(block[482])
    add_old_segments(member, block[386:482])
    member.size_bytes = number(block[483:495], "a sparse file's size")


def add_old_segments(member: Member, rows: bytes) -> None:
    """Add the segments of an old GNU header, or of a block after it; an empty row ends them."""
    assert member.segments is not None
    for at in range(0, len(rows) - 23, 24):
        row = rows[at : at + 24]
        if not row[0]:
            return
        place = number(row[:12], "a segment"), number(row[12:], "a segment")
        member.segments.append(place)
    if len(member.segments) > MAX_SEGMENTS:
        raise CorruptDataError(f"a sparse file has more than {MAX_SEGMENTS} segments")


def _pax_sparse(member: Member, pax: Pax) -> None:
    records = pax.records
    if name := records.get(b"GNU.sparse.name"):
        member.name = _no_nul(name)
    size = records.get(b"GNU.sparse.realsize") or records.get(b"GNU.sparse.size")
    if size is None:
        raise CorruptDataError("a sparse file does not say its size")
    member.size_bytes = _integer(size)
    if records.get(b"GNU.sparse.major", b"0") != b"0":
        if (records[b"GNU.sparse.major"], records.get(b"GNU.sparse.minor")) != (b"1", b"0"):
            raise CorruptDataError("a sparse file is of a version that is not known here")
        member.sparse_map_inside = True
        return
    numbers = pax.sparse
    if b"GNU.sparse.map" in records:
        numbers = records[b"GNU.sparse.map"].split(b",") if records[b"GNU.sparse.map"] else []
    member.segments = pairs(numbers)


def pairs(numbers: Sequence[bytes]) -> list[tuple[int, int]]:
    """The segments of a list of numbers: offset, length, offset, length, …"""
    if len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
        raise CorruptDataError("a sparse file's segments are damaged, or too many")
    values = [_integer(value) for value in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def settle_segments(member: Member, stored_bytes: int) -> None:
    """Check a sparse member's segments against its stored bytes, and drop empty ones."""
    assert member.segments is not None
    end = total = 0
    for offset, length in member.segments:
        if offset < end or length < 0:
            raise CorruptDataError("a sparse file's segments are not in order")
        end = offset + length
        total += length
    if end > member.size_bytes or total != stored_bytes or member.size_bytes < 0:
        raise CorruptDataError("a sparse file's segments do not fit its size")
    member.segments = [segment for segment in member.segments if segment[1]]
