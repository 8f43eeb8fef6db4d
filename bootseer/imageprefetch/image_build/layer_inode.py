"""A file of a layer with the metadata that an image keeps, and checks of member names."""

from __future__ import annotations

from collections.abc import Mapping

from bootseer.blockimage.erofs_format import NAME_BYTES, xattr_index
from bootseer.blockimage.tree_entries import NO_XATTRS, Entry, Kind, Stored
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build.tar_reader import Member

MAX_PATH_BYTES = 4096
MAX_XATTR_BYTES = 64 << 10
SHOWN_BYTES = 160
_LINK_MODE = 0o777
_CAPABILITY = b"security.capability"
OVERLAY_OPAQUE = b"trusted.overlay.opaque"
"""What marks a directory that hides all of the lower ones."""


class Inode:
    """A file of any kind, with any number of names; member `number` of its layer.

    Raises CorruptDataError for metadata that no file system accepts.
    """

    __slots__ = (
        "gid",
        "kind",
        "link_target",
        "mode",
        "mtime_ns",
        "number",
        "rdev",
        "size_bytes",
        "stored",
        "uid",
        "xattrs",
    )

    def __init__(self, member: Member, kind: Kind, number: int) -> None:
        if kind is Kind.SYMLINK and not 0 < len(member.link_target) < MAX_PATH_BYTES:
            raise CorruptDataError("it is a link without a target, or with one that is too long")
        self.kind, self.number = kind, number
        self.mode = _LINK_MODE if kind is Kind.SYMLINK else member.mode
        self.uid, self.gid, self.mtime_ns = member.uid, member.gid, member.mtime_ns
        self.size_bytes = member.size_bytes if kind is Kind.FILE else 0
        self.link_target = member.link_target if kind is Kind.SYMLINK else b""
        self.rdev, self.xattrs = member.rdev, _xattrs(member.xattrs)
        self.stored: Stored | None = None

    def relink(self, member: Member) -> None:
        """Take the metadata of a further name's header, as unpacking programs do.

        Where they change the owner, the kernel removes the file's capabilities.
        """
        kept = dict(self.xattrs)
        if (self.uid, self.gid) != (member.uid, member.gid):
            kept.pop(_CAPABILITY, None)
            self.uid, self.gid = member.uid, member.gid
        self.xattrs = _xattrs({**kept, **member.xattrs})
        if self.kind is not Kind.SYMLINK:
            self.mode, self.mtime_ns = member.mode, member.mtime_ns

    def entry(self, path: bytes) -> Entry:
        return Entry(
            path=path,
            kind=self.kind,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            mtime_ns=self.mtime_ns,
            size_bytes=self.size_bytes,
            link_target=self.link_target,
            rdev=self.rdev,
            xattrs=self.xattrs,
            content=self.stored,
        )


def shown_name(name: bytes) -> str:
    """A name for a message, in one line; a long one is abbreviated."""
    if len(name) <= SHOWN_BYTES:
        return _printable(name)
    half = SHOWN_BYTES // 2
    return f"{_printable(name[:half])}…{_printable(name[-half:])} ({len(name)} bytes)"


def _printable(name: bytes) -> str:
    text = name.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def path_parts(name: bytes) -> list[bytes]:
    """A member's name as parts below the root. Raises CorruptDataError for one that leads out."""
    parts: list[bytes] = []
    for part in name.split(b"/"):
        if part in (b"", b"."):
            continue
        if part == b"..":
            if not parts:
                raise CorruptDataError("its name leads out of the image")
            parts.pop()
        elif len(part) > NAME_BYTES:
            raise CorruptDataError(f"a part of its name has more than {NAME_BYTES} bytes")
        else:
            parts.append(part)
    if len(name) > MAX_PATH_BYTES:
        raise CorruptDataError(f"its name has more than {MAX_PATH_BYTES} bytes")
    return parts


def _xattrs(given: dict[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The attributes that the image keeps: not those of overlayfs, nor unknown kinds."""
    if not given:
        return NO_XATTRS
    if any(b"\0" in name for name in given):
        raise CorruptDataError("it has an attribute with a NUL in its name")
    kept = {
        name: value
        for name, value in given.items()
        if not name.startswith((b"trusted.overlay.", b"user.overlay.")) and xattr_index(name)
    }
    if sum(len(name) + len(value) + 8 for name, value in kept.items()) > MAX_XATTR_BYTES:
        raise CorruptDataError(f"its attributes have more than {MAX_XATTR_BYTES} bytes")
    return kept


def overlay_opaque(xattrs: Mapping[bytes, bytes]) -> bool:
    return xattrs.get(OVERLAY_OPAQUE) == b"y"


def whiteout(path: bytes) -> Entry:
    """What hides a name of lower layers, as overlayfs has it: a device that is none."""
    return Entry(path=path, kind=Kind.CHARACTER, mode=0)
