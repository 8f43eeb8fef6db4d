"""docker-archives: the tar files that `docker save` and `podman save` write.

`manifest.json` lists the images, each with its names and with the members that hold its config and
its layers, the lowest first. Older writers link equal layers to one another.
"""

from __future__ import annotations

import json
import os
import tarfile
from typing import IO, Any, BinaryIO, cast

from bootseer.errors import CorruptDataError, NotFoundError, UsageError, from_os_error
from bootseer.imageprefetch.image_build.layer_reader import decompress
from bootseer.storage.oci.config import LIMIT_BYTES

_MANIFEST_BYTES = 4 << 20
_MAX_MEMBERS = 100_000
_HEADER_BYTES = 1 << 20  # of one member's pax records or long name
_HEADERS_BYTES = 96 << 20  # of all members


class DockerArchive:
    """The members of an archive by name. `path` is the uncompressed file, `given` the archive."""

    def __init__(self, given: str, path: str, members: dict[str, tarfile.TarInfo]) -> None:
        self.given, self.path, self._members = given, path, members

    @classmethod
    def open(cls, path: str, folder: str, limit_bytes: int) -> DockerArchive:
        """Open an archive; a compressed one is unpacked into `folder`, up to `limit_bytes`."""
        try:
            plain_path = _decompress_file(path, folder, limit_bytes)
            return cls(path, plain_path, _members(plain_path))
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptDataError(f"{path} is no docker-archive: {error}") from error
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error

    def image(self, name: str) -> tuple[bytes, list[tuple[int, int]]]:
        """An image's config, and offset and length of its layers, the lowest first.

        `name` may be "" if there is only one image. Raises NotFoundError and UsageError.
        """
        entry = self._entry(name)
        config, layers = entry.get("Config"), entry.get("Layers")
        if not isinstance(config, str) or not isinstance(layers, list):
            raise CorruptDataError(f"{self.given} does not say what its image is made of")
        return self._read(config, LIMIT_BYTES), [self._section(layer) for layer in layers]

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            listed = json.loads(self._read("manifest.json", _MANIFEST_BYTES))
        except (ValueError, RecursionError) as error:
            raise CorruptDataError(f"the manifest.json of {self.given} is no JSON") from error
        rows = listed if isinstance(listed, list) else []
        entries = [entry for entry in rows if isinstance(entry, dict)]
        if not entries:
            raise CorruptDataError(f"{self.given} lists no image")
        if not name:
            if len(entries) > 1:
                known = ", ".join(sorted(t for entry in entries for t in _tags(entry))[:10])
                raise UsageError(f"{self.given} holds several images; name one of {known}")
            return entries[0]
        for entry in entries:
            if name in _tags(entry) or f"{name}:latest" in _tags(entry):
                return entry
        known = ", ".join(sorted(t for entry in entries for t in _tags(entry))[:10])
        raise NotFoundError(f"{self.given} has no image {name}; it has {known or 'unnamed ones'}")

    def _section(self, name: object) -> tuple[int, int]:
        """Offset and length of a regular member, links followed."""
        for _ in range(10):
            member = self._members.get(os.path.normpath(str(name)))
            if member is None:
                break
            if member.isreg():
                return member.offset_data, member.size
            folder = os.path.dirname(member.name) if member.issym() else ""
            name = os.path.join(folder, member.linkname)
        raise CorruptDataError(f"{self.given} lacks {str(name)[:200]}, which it lists")

    def _read(self, name: str, limit_bytes: int) -> bytes:
        offset, length = self._section(name)
        if length > limit_bytes:
            raise CorruptDataError(
                f"{name[:200]} in {self.given} is larger than {limit_bytes} bytes"
            )
        with open(self.path, "rb") as source:
            source.seek(offset)
            return source.read(length)


def _tags(entry: dict[str, Any]) -> list[str]:
    tags = entry.get("RepoTags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _members(path: str) -> dict[str, tarfile.TarInfo]:
    out: dict[str, tarfile.TarInfo] = {}
    with (
        open(path, "rb") as source,
        tarfile.open(fileobj=cast(IO[bytes], _HeaderFile(source)), mode="r:") as archive,
    ):
        for number, member in enumerate(archive):
            if number >= _MAX_MEMBERS:
                raise CorruptDataError(f"{path} has more than {_MAX_MEMBERS} members")
            out[os.path.normpath(member.name)] = member
    return out


class _HeaderFile:
    """A file for `tarfile`, which reads only headers; their size is limited."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._left = source, _HEADERS_BYTES
        self.seek, self.tell = source.seek, source.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= min(_HEADER_BYTES, self._left):
            raise CorruptDataError(f"{self._source.name} has headers larger than any")
        self._left -= size
        return self._source.read(size)


def _decompress_file(path: str, folder: str, limit_bytes: int) -> str:
    """The archive itself, or an unpacked copy of a compressed one."""
    with open(path, "rb") as source:
        head = source.read(263)
        if head[257:262] == b"ustar":
            return path
        source.seek(0)
        copy = os.path.join(folder, "archive.tar")
        with open(copy, "wb") as out:
            for piece in decompress(source):
                if (limit_bytes := limit_bytes - len(piece)) < 0:
                    out.truncate(0)  # otherwise it would stay for days
                    raise CorruptDataError(
                        f"{path} unpacks to more than is allowed; raise the limit if it may"
                    )
                out.write(piece)
    return copy
