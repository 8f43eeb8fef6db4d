"""The checks of an index, which may be of a hostile archive. Pure.

The rules: each path is its root's or lies in a directory that the index itself holds, so nothing
can leave the root or be written through a link; no path twice, in whatever spelling; no name of our
own staging directories, whose journals a later restore would obey; only files, directories and
links; hard links only to files of the same root; no attribute that is a host's own; sizes, holes,
entries and frames within `Limits`; the frames cover the archive without gap and hold each file's
data exactly once.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, cast

from bootseer.depsnap.format.index_records import BadIndexError, Frame, Index, IndexRoot
from bootseer.depsnap.format.unit_layout import BLOCK, Segment
from bootseer.depsnap.types import (
    DIRECTORY,
    FILE,
    HARDLINK,
    HOST_XATTRS,
    SYMLINK,
    WORK_PREFIX,
    Digest,
    Limits,
    XAttrs,
)


def check(document: dict[str, Any], digest: Digest, end: int | None, limits: Limits) -> Index:
    """Check an index's document and make it an `Index`; the frames must end at `end` (None: not
    known). Raises BadIndexError, or what malformed JSON leads to (`json_faults.MALFORMED`)."""
    path = _strings(document["path"])
    count = len(path)
    if count > limits.entries:
        raise BadIndexError(f"{count} entries are beyond the limit of {limits.entries}")
    kind = document["kind"]
    if not isinstance(kind, str) or set(kind) - {FILE, DIRECTORY, SYMLINK, HARDLINK}:
        raise BadIndexError("an entry is neither file, directory nor link")
    if len(kind) != count:
        raise BadIndexError("columns of different length")
    columns = _columns(document, count)
    roots = _roots(document["roots"], count, path, kind)
    if limits.roots is not None and {r.root for r in roots} != set(limits.roots):
        raise BadIndexError("its roots are not those that its record names")
    parent, name = _names(roots, path, kind, limits)
    link = {int(k): v for k, v in document["link"].items()}
    _check_links(roots, path, kind, link)
    index = Index(
        digest=digest,
        tree_digest=Digest(str(document["tree"])),
        roots=roots,
        path=path,
        kind=kind,
        mode=columns["mode"],
        uid=columns["uid"],
        gid=columns["gid"],
        mtime_ns=columns["mtime_ns"],
        size=columns["size"],
        link=link,
        xattrs=_xattrs(document["xattrs"], kind, limits),
        segments=_segments(document["segments"], kind, columns["size"]),
        implied=frozenset(_numbers(document["implied"])),
        frames=_frames(document["frames"], end, limits),
        parent=parent,
        name=name,
        stored_bytes=sum(frame[0] for frame in document["frames"]),
        raw_bytes=0,
        logical_bytes=sum(columns["size"]),
        skipped=tuple(_strings(document["skipped"])),
    )
    if any(kind[i] != DIRECTORY for i in index.implied):
        raise BadIndexError("something else than a directory is marked as a mere parent")
    return _check_data(index, limits)


def _columns(document: dict[str, Any], count: int) -> dict[str, list[int]]:
    columns = {name: _numbers(document[name], count) for name in ("mode", "uid", "gid", "size")}
    columns["mtime_ns"] = _numbers(document["mtime_ns"], count, least=-(1 << 63))
    if max(columns["mode"], default=0) > 0o7777:
        raise BadIndexError("an impossible mode")
    if max(columns["uid"] + columns["gid"], default=0) >= (1 << 32) - 1:
        raise BadIndexError("an impossible owner")
    return columns


def _check_data(index: Index, limits: Limits) -> Index:
    """Check that frames hold each unit of each file exactly once; the index with `raw_bytes`."""
    if index.logical_bytes > limits.total:  # before any list as long as the files claim to be
        raise BadIndexError(
            f"{index.logical_bytes} bytes of files are beyond the limit of {limits.total}"
        )
    wanted: dict[tuple[int, int], int] = {}
    for entry, kind in enumerate(index.kind):
        if kind == FILE:
            if entry not in index.segments and index.size[entry] <= BLOCK:
                wanted[entry, 0] = index.size[entry]
            else:
                wanted.update({(u.entry, u.block): u.size for u in index.units_of(entry)})
        elif index.size[entry]:
            raise BadIndexError("something else than a file has a size")
    raw_bytes = sum(wanted.values())
    if raw_bytes > limits.raw:
        raise BadIndexError(f"{raw_bytes} bytes of data are beyond the limit of {limits.raw}")
    if index.logical_bytes - raw_bytes > limits.holes:
        raise BadIndexError(
            f"{index.logical_bytes - raw_bytes} bytes of holes are beyond the limit"
        )
    for frame in index.frames:
        flat = frame.units
        for entry, block, at in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            size = wanted.pop((entry, block), None)
            if size is None or at < 0 or at + size > frame.raw:
                raise BadIndexError("a frame holds data that no file, or another frame, has")
    if wanted:
        raise BadIndexError("a file's data is missing")
    return dataclasses.replace(index, raw_bytes=raw_bytes)


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise BadIndexError("a column of names is not one")
    return value


def _numbers(value: Any, count: int | None = None, least: int = 0) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise BadIndexError("a column of numbers is not one")
    if count is not None and len(value) != count:
        raise BadIndexError("columns of different length")
    if value and (min(value) < least or max(value) >= 1 << 63):
        raise BadIndexError("a number out of range")
    return cast("list[int]", value)


def _roots(value: Any, count: int, path: Sequence[str], kind: str) -> tuple[IndexRoot, ...]:
    out: list[IndexRoot] = []
    at = 0
    for item in value:
        (length,) = _numbers([item["count"]])
        (root,) = _strings([item["root"]])
        if os.path.normpath(root) != root or root[:1] != "/" or root[:2] == "//" or "\0" in root:
            raise BadIndexError(f"{root!r} is no absolute root")
        if not length or at + length > count or path[at] or kind[at] != DIRECTORY:
            raise BadIndexError(f"root {root!r} has no directory of its own")
        out.append(IndexRoot(root, at, length, tuple(_strings(item["deleted"]))))
        at += length
    if at != count or not out or len({r.root for r in out}) != len(out):
        raise BadIndexError("roots and entries do not match")
    return tuple(out)


def _names(
    roots: Sequence[IndexRoot], path: Sequence[str], kind: str, limits: Limits
) -> tuple[list[int], list[str]]:
    """Each entry's directory and name; the checks here keep every path inside its root."""
    parents: list[int] = []
    names: list[str] = []
    for root in roots:
        directories = {"": root.first}
        seen = {""}
        parents.append(-1)
        names.append("")
        for number in range(root.first + 1, root.first + root.count):
            full = path[number]
            above, slash, name = full.rpartition("/")
            parent = directories.get(above, -1) if slash or name else -1
            if (slash and not above) or parent < 0 or full in seen or not _is_safe(name, limits):
                raise BadIndexError(f"unsafe or duplicate path {full!r}")
            seen.add(full)
            parents.append(parent)
            names.append(name)
            if kind[number] == DIRECTORY:
                directories[full] = number
        for full in root.deleted:
            if full in seen or not all(_is_safe(part, limits) for part in full.split("/")):
                raise BadIndexError(f"unsafe deletion of {full!r}")
        longest = max((len(os.fsencode(p)) for p in seen if len(p) * 4 > limits.path), default=0)
        if longest > limits.path:
            raise BadIndexError("a path is longer than the limit")
    return parents, names


def _is_safe(name: str, limits: Limits) -> bool:
    if name in ("", ".", "..") or "\0" in name or "/" in name or name.startswith(WORK_PREFIX):
        return False
    # Two texts may be one name on disk, as "é" and its two bytes escaped.
    if not name.isascii() and os.fsdecode(os.fsencode(name)) != name:
        return False
    return len(name) * 4 <= limits.name or len(os.fsencode(name)) <= limits.name


def _check_links(
    roots: Sequence[IndexRoot], path: Sequence[str], kind: str, link: dict[int, str]
) -> None:
    wanted = {number for number, k in enumerate(kind) if k in (SYMLINK, HARDLINK)}
    if wanted != set(link):
        raise BadIndexError("links and entries do not match")
    for number, text in link.items():
        if not isinstance(text, str) or "\0" in text or not text:
            raise BadIndexError(f"{path[number]!r} links to nothing")
        os.fsencode(text)  # ValueError for what is no text of a file system
    for root in roots:
        numbers = range(root.first, root.first + root.count)
        hard = [n for n in numbers if kind[n] == HARDLINK]
        if hard:
            files = {path[n] for n in numbers if kind[n] == FILE}
            for number in hard:
                if link[number] not in files:
                    raise BadIndexError(f"{path[number]!r} is a hard link to no file of its root")


def _xattrs(value: Any, kind: str, limits: Limits) -> dict[int, XAttrs]:
    out: dict[int, XAttrs] = {}
    for key, pairs in value.items():
        number = int(key)
        try:
            decoded = tuple((str(n), base64.b64decode(v, validate=True)) for n, v in pairs)
        except binascii.Error as error:
            raise BadIndexError("unreadable extended attribute") from error
        total = sum(len(n) + len(v) for n, v in decoded)
        if kind[number] not in (FILE, DIRECTORY) or number < 0 or total > limits.xattrs:
            raise BadIndexError("extended attributes on a link, or beyond the limit")
        if any("\0" in n or n.startswith(HOST_XATTRS) for n, _ in decoded):
            raise BadIndexError("an extended attribute that is a host's own, or no name")
        out[number] = decoded
    return out


def _segments(value: Any, kind: str, size: Sequence[int]) -> dict[int, tuple[Segment, ...]]:
    out: dict[int, tuple[Segment, ...]] = {}
    for key, flat in value.items():
        number, numbers = int(key), _numbers(flat)
        pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        at = 0
        for offset, length in pairs:
            if offset < at or not length:
                raise BadIndexError("a sparse file's segments overlap")
            at = offset + length
        if number < 0 or kind[number] != FILE or at > size[number]:
            raise BadIndexError("a sparse file's segments do not fit it")
        out[number] = pairs
    return out


def _frames(value: Any, end: int | None, limits: Limits) -> list[Frame]:
    """The frames, back to back from the first byte to the index: no byte is unaccounted for."""
    out = []
    at = 0
    for stored, raw, digest, upto, flat in value:
        _numbers([stored, raw, upto])
        if raw > limits.frame_raw or not 0 < stored <= raw + (raw >> 7) + 1024:
            raise BadIndexError(f"a frame of {stored} bytes, {raw} unpacked, is beyond the limit")
        if not isinstance(digest, str) or len(digest) != 64:
            raise BadIndexError("a frame without digest")
        out.append(Frame(at, stored, raw, digest, upto, _numbers(flat)))
        at += stored
    if end is not None and at != end:
        raise BadIndexError("its frames do not fill it")
    return out
