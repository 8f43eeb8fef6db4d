"""The documents of a striped checkpoint: pointer, file manifest, tree manifest, attributes.

Pure: bytes to records and back. docs/stripe-format.md explains every field. `parse` checks every
field; its `where` names the object in messages. It raises CorruptDataError for a truncated, damaged
or hostile document, and NotSupportedError for one of a newer version.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import posixpath
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import CorruptDataError, UsageError
from bootseer.stripedfs.format import json_fields
from bootseer.stripedfs.format.json_fields import DIGEST_BYTES, BadFieldError, compute_digest
from bootseer.stripedfs.format.stripe_layout import (
    MAX_CHUNK_BYTES,
    MAX_WIDTH,
    MIN_CHUNK_BYTES,
    Layout,
    check_chunk_bytes,
)

POINTER_LIMIT_BYTES = 4 << 10
MANIFEST_LIMIT_BYTES = 64 << 20
VERSION_PATTERN = re.compile(r"v-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}\Z")
Kind = Literal["file", "tree"]


@dataclasses.dataclass(frozen=True, slots=True)
class Attributes:
    """Permission bits and time of the last change (ns since 1970), None where they were not set."""

    mode: int | None = None
    mtime_ns: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        given = {"mode": self.mode, "mtime_ns": self.mtime_ns}
        return {name: value for name, value in given.items() if value is not None}

    def update(self, given: Attributes) -> Attributes:
        """These attributes, replaced by those that are given."""
        mode = self.mode if given.mode is None else given.mode
        return Attributes(mode, self.mtime_ns if given.mtime_ns is None else given.mtime_ns)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Attributes | None:
        """The attributes in a document; None when it has none. Raises BadFieldError."""
        mode = _read_mode(document) if "mode" in document else None
        mtime_ns = _read_mtime(document) if "mtime_ns" in document else None
        return None if mode is None and mtime_ns is None else Attributes(mode, mtime_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredAttributes:
    """The attributes of a plain file or folder, in an object of their own.

    `stamp` identifies the file that they were set for: they do not count for another one of its
    name. It is empty for a folder.
    """

    stamp: str
    attributes: Attributes

    def encode(self) -> bytes:
        """The document's bytes."""
        return json_fields.encode("attributes", {"stamp": self.stamp} | self.attributes.to_json())

    @staticmethod
    def parse(data: bytes, where: str) -> StoredAttributes:
        document = json_fields.decode(data, "attributes", where)
        try:
            stamp = json_fields.read_field(document, "stamp", str)
            return StoredAttributes(stamp, Attributes.from_json(document) or Attributes())
        except BadFieldError as error:
            raise CorruptDataError(f"{where} is damaged: {error}; remove it") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """What `CURRENT` says: which version is the checkpoint, and its manifest's exact bytes.

    `shares_folder`: further files of the directory lie in the plain folder of the same name.
    `attributes`: a file's mode and time, where they were set.
    """

    kind: Kind
    version: str
    size_bytes: int
    manifest_bytes: int
    manifest_digest: bytes
    shares_folder: bool = False
    attributes: Attributes | None = None

    def encode(self) -> bytes:
        """The document's bytes."""
        body: dict[str, Any] = {
            "of": self.kind,
            "current": self.version,
            "size_bytes": self.size_bytes,
            "manifest_bytes": self.manifest_bytes,
            "manifest_digest": self.manifest_digest.hex(),
        }
        if self.attributes is not None:
            body |= self.attributes.to_json()
        if self.shares_folder:
            return json_fields.encode("pointer", body | {"beside": True}, version=2)
        return json_fields.encode("pointer", body)

    @staticmethod
    def parse(data: bytes, where: str) -> Pointer | Link:
        document = json_fields.decode(data, "pointer", where)
        try:
            kind, version = document.get("of"), document.get("current")
            if kind == "link":
                target = json_fields.read_field(document, "target", str)
                _count_steps_up(target)
                return Link(
                    target, json_fields.read_integer(document, "mtime_ns", -json_fields.MAX_INTEGER)
                )
            if kind != "file" and kind != "tree":
                raise BadFieldError("it points to neither a file nor a tree")
            if type(version) is not str or not VERSION_PATTERN.match(version):
                raise BadFieldError("current is no version's name")
            return Pointer(
                kind,
                version,
                json_fields.read_integer(document, "size_bytes"),
                json_fields.read_integer(document, "manifest_bytes", 1, MANIFEST_LIMIT_BYTES),
                json_fields.read_digest(document, "manifest_digest"),
                kind == "tree" and document.get("beside") is True,
                Attributes.from_json(document) if kind == "file" else None,
            )
        except BadFieldError as error:
            raise CorruptDataError(f"{where} is damaged: {error}; write it anew") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What `CURRENT` says of a symbolic link: a document of version 2.

    `target` is relative. A reader that follows it must make sure that it stays in what the reader
    may see (`check_target`).
    """

    target: str
    mtime_ns: int

    def encode(self) -> bytes:
        """The document's bytes. Raises UsageError when they exceed what readers accept."""
        body = {"of": "link", "target": self.target, "mtime_ns": self.mtime_ns}
        data = json_fields.encode("pointer", body, version=2)
        if len(data) > POINTER_LIMIT_BYTES:
            raise UsageError("the link's target is too long; give it a shorter one")
        return data


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """One striped file: its layout and the digest of every chunk, 16 bytes each, in order."""

    layout: Layout
    digests: bytes

    def __post_init__(self) -> None:
        if len(self.digests) != self.layout.chunk_count * DIGEST_BYTES:
            raise UsageError(
                f"{self.layout.chunk_count} chunks need as many digests, not "
                f"{len(self.digests) / DIGEST_BYTES:g}"
            )

    def digest(self, index: int) -> bytes:
        """The digest of chunk `index`."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    @property
    def root(self) -> bytes:
        """Digest of the size, the chunk size and all chunk digests: it identifies the bytes."""
        head = struct.pack("<QQ", self.layout.size_bytes, self.layout.chunk_bytes)
        return compute_digest(head + self.digests)

    @property
    def key(self) -> str:
        """Names the file's bytes, for ever; the width is not part of it."""
        return f"xxh3-128-{self.root.hex()}-{self.layout.size_bytes}"

    def encode(self) -> bytes:
        """The document's bytes. Raises UsageError when they exceed what readers accept."""
        layout = self.layout
        data = json_fields.encode(
            "file",
            {
                "size_bytes": layout.size_bytes,
                "chunk_bytes": layout.chunk_bytes,
                "width": layout.width,
                "stripe_bytes": list(layout.stripe_lengths()),
                "digest": "xxh3-128",
                "root": self.root.hex(),
                "chunks": base64.b64encode(self.digests).decode("ascii"),
            },
        )
        return _limit(data, f"{layout.chunk_count} chunks are too many; give a larger chunk size")

    @staticmethod
    def parse(data: bytes, where: str) -> Manifest:
        document = json_fields.decode(data, "file", where)
        try:
            return _parse_manifest(document)
        except BadFieldError as error:
            raise CorruptDataError(f"{where} is damaged: {error}; write it anew") from error


def _parse_manifest(document: dict[str, Any]) -> Manifest:
    size = json_fields.read_integer(document, "size_bytes")
    chunk = json_fields.read_integer(document, "chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    width = json_fields.read_integer(document, "width", 1, MAX_WIDTH)
    if document.get("digest") != "xxh3-128":
        raise BadFieldError("digest is not xxh3-128")
    try:
        digests = base64.b64decode(json_fields.read_field(document, "chunks", str), validate=True)
        layout = Layout(size, check_chunk_bytes(chunk), width)
    except (binascii.Error, ValueError) as error:
        raise BadFieldError("chunks is no base64 text") from error
    except UsageError as error:
        raise BadFieldError(str(error)) from error
    # Before anything is derived from the size, which may be wrong.
    if len(digests) != layout.chunk_count * DIGEST_BYTES:
        raise BadFieldError(f"chunks holds {len(digests)} bytes for {layout.chunk_count} chunks")
    if document.get("stripe_bytes") != list(layout.stripe_lengths()):
        raise BadFieldError("stripe_bytes does not follow from the size")
    manifest = Manifest(layout, digests)
    if json_fields.read_digest(document, "root") != manifest.root:
        raise BadFieldError("root is not the digest of its chunks")
    return manifest


@dataclasses.quickly_made
@dataclasses.dataclass(frozen=True, slots=True)
class TreeFile:
    """A file of a tree.

    Striped: `object` is the folder of its stripes and manifest, `digest` that of the manifest's
    `manifest_bytes` bytes. Plain: `object` holds the bytes, `digest` is theirs.
    """

    path: str
    mode: int
    mtime_ns: int
    size_bytes: int
    striped: bool
    object: str
    digest: bytes
    manifest_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        body: dict[str, Any] = {"type": "striped" if self.striped else "plain", "path": self.path}
        body |= {"mode": self.mode, "mtime_ns": self.mtime_ns, "size_bytes": self.size_bytes}
        body |= {"object": self.object, "digest": self.digest.hex()}
        if self.striped:
            body["manifest_bytes"] = self.manifest_bytes
        return body


@dataclasses.quickly_made
@dataclasses.dataclass(frozen=True, slots=True)
class TreeFolder:
    """A folder of a tree; the empty ones are kept too."""

    path: str
    mode: int
    mtime_ns: int

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        return {
            "type": "folder",
            "path": self.path,
            "mode": self.mode,
            "mtime_ns": self.mtime_ns,
        }


@dataclasses.quickly_made
@dataclasses.dataclass(frozen=True, slots=True)
class TreeLink:
    """A symbolic link whose target stays within the tree."""

    path: str
    target: str

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        return {"type": "link", "path": self.path, "target": self.target}


TreeEntry = TreeFile | TreeFolder | TreeLink


@dataclasses.dataclass(frozen=True, slots=True)
class TreeManifest:
    """A directory as one checkpoint: its entries by ascending path, each parent listed."""

    mode: int
    chunk_bytes: int
    entries: tuple[TreeEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.files())

    def files(self) -> Iterator[TreeFile]:
        """The files alone."""
        return (entry for entry in self.entries if isinstance(entry, TreeFile))

    def encode(self) -> bytes:
        """The document's bytes. Raises UsageError when they exceed what readers accept."""
        data = json_fields.encode(
            "tree",
            {
                "mode": self.mode,
                "chunk_bytes": self.chunk_bytes,
                "size_bytes": self.size_bytes,
                "digest": "xxh3-128",
                "entries": [entry.to_json() for entry in self.entries],
            },
        )
        return _limit(data, f"{len(self.entries)} entries are too many; put parts of the folder")

    @staticmethod
    def parse(data: bytes, where: str) -> TreeManifest:
        document = json_fields.decode(data, "tree", where)
        try:
            tree = TreeManifest(
                json_fields.read_integer(document, "mode", 0, 0o7777),
                json_fields.read_integer(document, "chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES),
                parse_entries(document),
            )
            check_tree(tree.entries)
        except BadFieldError as error:
            raise CorruptDataError(f"{where} is damaged: {error}; write it anew") from error
        return tree


def parse_entries(document: dict[str, Any]) -> tuple[TreeEntry, ...]:
    """Every entry checked by itself. Raises BadFieldError."""
    return tuple(_parse_entry(body) for body in json_fields.read_field(document, "entries", list))


def _parse_entry(body: object) -> TreeEntry:
    if type(body) is not dict:
        raise BadFieldError("an entry is no object")
    path = json_fields.check_path(body.get("path"), "path")
    kind = body.get("type")
    try:
        if kind == "folder":
            return TreeFolder(path, _read_mode(body), _read_mtime(body))
        if kind == "link":
            return TreeLink(path, check_target(path, json_fields.read_field(body, "target", str)))
        if kind == "striped" or kind == "plain":
            return _parse_file(body, path, striped=kind == "striped")
    except BadFieldError as error:
        raise BadFieldError(f"{path!r}: {error}") from error
    raise BadFieldError(f"{path!r} is of no known type")


def _parse_file(body: dict[str, Any], path: str, *, striped: bool) -> TreeFile:
    size = json_fields.read_integer(
        body, "size_bytes", high=(1 << 63) - 1 if striped else MAX_CHUNK_BYTES
    )
    manifest = (
        json_fields.read_integer(body, "manifest_bytes", 1, MANIFEST_LIMIT_BYTES) if striped else 0
    )
    name = json_fields.check_path(body.get("object"), "object")
    return TreeFile(
        path,
        _read_mode(body),
        _read_mtime(body),
        size,
        striped,
        name,
        json_fields.read_digest(body, "digest"),
        manifest,
    )


def _read_mode(body: dict[str, Any]) -> int:
    return json_fields.read_integer(body, "mode", 0, 0o7777)


def _read_mtime(body: dict[str, Any]) -> int:
    return json_fields.read_integer(body, "mtime_ns", -json_fields.MAX_INTEGER)


def check_target(path: str, target: str) -> str:
    """Return the target of the link `path`; BadFieldError unless it surely stays in the tree.

    `..` may only come first: after the name of another link it could lead anywhere.
    """
    if _count_steps_up(target) > path.count("/"):
        raise BadFieldError(f"the link's target {target!r} may lead out of the tree")
    return target


def _count_steps_up(target: str) -> int:
    """The number of `..` that a link's target begins with. Raises BadFieldError for a bad one."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    if not target or target.startswith("/") or "\0" in target or len(target) > 4095:
        raise BadFieldError(f"the link's target {target!r} is not relative")
    if ".." in parts[up:]:
        raise BadFieldError(f"the link's target {target!r} may lead out of the tree")
    return up


def check_tree(entries: Iterable[TreeEntry]) -> None:
    """Raise BadFieldError unless entries ascend, differ, and lie in listed folders."""
    listed = tuple(entries)
    for before, after in itertools.pairwise(listed):
        if before.path >= after.path:
            raise BadFieldError(f"{after.path!r} is listed twice or out of order")
    folders = {entry.path for entry in listed if isinstance(entry, TreeFolder)}
    for entry in listed:
        parent = posixpath.dirname(entry.path)
        if parent and parent not in folders:
            raise BadFieldError(f"{entry.path!r} lies in no listed folder")
    names = [entry.object for entry in listed if isinstance(entry, TreeFile)]
    if len(set(names)) != len(names):
        raise BadFieldError("two files share one object")


def _limit(data: bytes, advice: str) -> bytes:
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise UsageError(f"the manifest would have {len(data)} bytes: {advice}")
    return data
