"""A layer of an image from the upper directory of an overlay: what was changed there.

Format: OCI image specification, "Image Layer Filesystem Changeset": removed names are empty files
`.wh.NAME`, and `.wh..wh..opq` marks a directory that hides the lower ones. overlayfs has devices
0/0 and an attribute for the same (Documentation/filesystems/overlayfs.rst).
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Protocol, cast

from bootseer.errors import from_os_error
from bootseer.imageprefetch.image_build.flatten import OPAQUE, WHITEOUT
from bootseer.imageprefetch.image_build.layer_inode import overlay_opaque

MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"
LEVEL = 3
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")
_XATTR = "SCHILY.xattr."


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer that was written. `diff_id` is the digest of its tar bytes, `digest` of the file."""

    path: str
    digest: str
    diff_id: str
    size_bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The upper directory of an overlay over `lower`.

    `leaves_out` is asked for each path (`/usr/lib/x`); what is below one that is left out is not
    asked for.
    """

    upper: str
    lower: str
    leaves_out: Callable[[str], bool]

    def members(self) -> Iterator[tuple[tarfile.TarInfo, str]]:
        """What was changed, each folder ahead of what is in it, with its path ("" for a marker).

        A folder in which nothing was changed, and which is in the lower directory too, is no
        change.
        """
        return self._members_below("")

    def _members_below(self, folder: str) -> Iterator[tuple[tarfile.TarInfo, str]]:
        for name in sorted(os.listdir(os.path.join(self.upper, folder))):
            path = os.path.join(folder, name)
            if self.leaves_out(f"/{path}"):
                continue
            source = os.path.join(self.upper, path)
            about = os.lstat(source)
            if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
                yield _make_marker(folder, os.fsdecode(WHITEOUT) + name), ""
                continue
            xattrs = {os.fsencode(n): _read_xattr(source, n) for n in _list_xattrs(source)}
            member = _make_member(path, source, about, xattrs)
            if member.isdir():
                yield from self._folder(member, source, path, is_opaque=overlay_opaque(xattrs))
            elif not stat.S_ISSOCK(about.st_mode):  # which no layer can hold
                yield member, source

    def _folder(
        self, member: tarfile.TarInfo, source: str, path: str, *, is_opaque: bool
    ) -> Iterator[tuple[tarfile.TarInfo, str]]:
        own = [(member, source)]
        if is_opaque:
            own.append((_make_marker(path, os.fsdecode(OPAQUE)), ""))
        is_change = is_opaque or self._is_new(path)
        if is_change:
            yield from own
        for each in self._members_below(path):
            if not is_change:
                yield from own
                is_change = True
            yield each

    def _is_new(self, path: str) -> bool:
        """Whether a folder is not in the lower directory, or has another owner or mode there."""
        try:
            below = os.lstat(os.path.join(self.lower, path))
        except OSError:
            return True
        here = os.lstat(os.path.join(self.upper, path))
        return (below.st_mode, below.st_uid, below.st_gid) != (
            here.st_mode,
            here.st_uid,
            here.st_gid,
        )


def write_layer(changes: Changes, path: str) -> LayerFile:
    """Write changes as a layer to a new file. Raises the errors of `from_os_error`."""
    try:
        with open(path, "xb") as file:
            return _write(changes, path, file)
    except OSError as error:
        raise from_os_error(error, f"write a layer of {changes.upper} to {path}") from error


def _write(changes: Changes, path: str, file: IO[bytes]) -> LayerFile:
    import zstandard

    stored = _Hashed(file)
    packer = zstandard.ZstdCompressor(level=LEVEL, threads=-1, write_checksum=True).compressobj()
    raw = _Hashed(_Packed(packer, stored))
    entries = 0
    with tarfile.open(fileobj=cast("IO[bytes]", raw), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        names: dict[tuple[int, int], str] = {}  # of files with several names, the first one
        for member, source in changes.members():
            _add(tar, member, source, names)
            entries += 1
    stored.write(packer.flush())
    file.flush()
    os.fsync(file.fileno())
    return LayerFile(path, stored.digest, raw.digest, stored.size_bytes, entries)


class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...


class _Packed:
    """Compresses what is written to it."""

    def __init__(self, packer: _Compressor, file: _Writable) -> None:
        self._packer, self._file = packer, file

    def write(self, data: bytes, /) -> int:
        packed = self._packer.compress(data)
        if packed:
            self._file.write(packed)
        return len(data)


class _Hashed:
    """A file that is written to, with the digest of what was."""

    def __init__(self, file: _Writable) -> None:
        self._file, self._hash, self.size_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes, /) -> int:
        self._hash.update(data)
        self.size_bytes += len(data)
        self._file.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _add(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    source: str,
    names: dict[tuple[int, int], str],
) -> None:
    if not source or member.isdir():
        tar.addfile(member)
        return
    about = os.lstat(source)
    if about.st_nlink > 1:
        first = names.setdefault((about.st_dev, about.st_ino), member.name)
        if first != member.name:
            member.type, member.linkname, member.size = tarfile.LNKTYPE, first, 0
    if not member.isreg():
        tar.addfile(member)
        return
    with open(source, "rb") as content:
        tar.addfile(member, content)


def _make_marker(folder: str, name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(os.path.join(folder, name))


def _make_member(
    path: str, source: str, about: os.stat_result, xattrs: Mapping[bytes, bytes]
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.mode, member.uid, member.gid = stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid
    member.mtime = about.st_mtime_ns // 10**9
    kind = stat.S_IFMT(about.st_mode)
    member.type = _TYPES.get(kind, tarfile.REGTYPE)
    if kind == stat.S_IFREG:
        member.size = about.st_size
    elif kind == stat.S_IFLNK:
        member.linkname = os.readlink(source)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        member.devmajor, member.devminor = os.major(about.st_rdev), os.minor(about.st_rdev)
    member.pax_headers = {
        _XATTR + os.fsdecode(name): value.decode("utf-8", "surrogateescape")
        for name, value in xattrs.items()
        if not name.startswith(_OVERLAY)
    }
    nanoseconds = about.st_mtime_ns % 10**9
    if nanoseconds:  # .pyc files are checked against seconds; other programs look closer
        member.pax_headers["mtime"] = f"{member.mtime}.{nanoseconds:09d}"
    return member


_TYPES = {
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


def _list_xattrs(path: str) -> list[str]:
    try:
        return os.listxattr(path, follow_symlinks=False)
    except OSError:  # a file system without them
        return []


def _read_xattr(path: str, name: str) -> bytes:
    return os.getxattr(path, name, follow_symlinks=False)
