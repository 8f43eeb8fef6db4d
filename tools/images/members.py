"""What a layer holds, as tar members written by hand: any name, owner, time, link or device."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MTIME_S = 1_700_000_000
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_CHUNK = 1 << 20

Name = str | bytes


@dataclass(frozen=True, slots=True)
class Repeated:
    """Content that is `pattern` over and over, `size_bytes` long: large, made as it is written."""

    pattern: bytes
    size_bytes: int

    def pieces(self) -> Iterator[bytes]:
        """The content in pieces of about a MiB."""
        whole = self.pattern * max(1, _CHUNK // len(self.pattern))
        left = self.size_bytes
        while left > 0:
            yield whole[:left]
            left -= len(whole)


Content = bytes | Path | Repeated


@dataclass(frozen=True, slots=True)
class Member:
    """One tar member; only regular files have content."""

    info: tarfile.TarInfo
    content: Content = b""


def _member(
    name: Name,
    kind: bytes,
    mode: int,
    *,
    uid: int = 0,
    gid: int = 0,
    mtime_s: float = MTIME_S,
    xattrs: Mapping[str, bytes] | None = None,
    content: Content = b"",
) -> Member:
    text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    info = tarfile.TarInfo(text)
    info.type, info.mode, info.uid, info.gid, info.mtime = kind, mode, uid, gid, mtime_s
    values = (xattrs or {}).items()
    info.pax_headers = {
        f"SCHILY.xattr.{k}": v.decode("utf-8", "surrogateescape") for k, v in values
    }
    if kind == tarfile.REGTYPE:
        info.size = _size(content)
    return Member(info, content)


def file(
    name: Name,
    content: Content = b"",
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime_s: float = MTIME_S,
    xattrs: Mapping[str, bytes] | None = None,
) -> Member:
    """A regular file. `mtime_s` may have a fraction; `xattrs` are whole names to raw values."""
    return _member(
        name,
        tarfile.REGTYPE,
        mode,
        uid=uid,
        gid=gid,
        mtime_s=mtime_s,
        xattrs=xattrs,
        content=content,
    )


def directory(
    name: Name,
    *,
    mode: int = 0o755,
    uid: int = 0,
    gid: int = 0,
    mtime_s: float = MTIME_S,
    xattrs: Mapping[str, bytes] | None = None,
) -> Member:
    """A directory; its parents are not made by themselves."""
    return _member(name, tarfile.DIRTYPE, mode, uid=uid, gid=gid, mtime_s=mtime_s, xattrs=xattrs)


def symlink(
    name: Name, target: Name, *, uid: int = 0, gid: int = 0, mtime_s: float = MTIME_S
) -> Member:
    """A symbolic link; `target` is stored as it stands."""
    made = _member(name, tarfile.SYMTYPE, 0o777, uid=uid, gid=gid, mtime_s=mtime_s)
    made.info.linkname = _text(target)
    return made


def hardlink(name: Name, target: Name) -> Member:
    """Another name of the file `target`, which comes before it."""
    made = _member(name, tarfile.LNKTYPE, 0o644)
    made.info.linkname = _text(target)
    return made


def device(
    name: Name,
    kind: Literal["char", "block"],
    major: int,
    minor: int,
    *,
    mode: int = 0o600,
) -> Member:
    """A device node."""
    made = _member(name, tarfile.CHRTYPE if kind == "char" else tarfile.BLKTYPE, mode)
    made.info.devmajor, made.info.devminor = major, minor
    return made


def fifo(name: Name, *, mode: int = 0o600) -> Member:
    """A named pipe."""
    return _member(name, tarfile.FIFOTYPE, mode)


def whiteout(path: str) -> Member:
    """What takes `path` of a lower layer away."""
    folder, _, name = path.rpartition("/")
    return file(f"{folder}/{WHITEOUT}{name}" if folder else f"{WHITEOUT}{name}")


def opaque(folder: str) -> Member:
    """What hides all that lower layers have in `folder`."""
    return file(f"{folder}/{OPAQUE}")


def pieces(content: Content) -> Iterator[bytes]:
    """The content, a MiB or so at a time."""
    if isinstance(content, bytes):
        yield content
    elif isinstance(content, Repeated):
        yield from content.pieces()
    else:
        with content.open("rb") as source:
            while piece := source.read(_CHUNK):
                yield piece


def _size(content: Content) -> int:
    if isinstance(content, bytes):
        return len(content)
    return content.size_bytes if isinstance(content, Repeated) else content.stat().st_size


def _text(name: Name) -> str:
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
