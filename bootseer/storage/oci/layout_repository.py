"""A repository in a directory: the OCI image layout.

Source: OCI image specification 1.1, image layout. A tag is the annotation
`org.opencontainers.image.ref.name` of an entry of `index.json`; a manifest with a subject is
listed there too, and so is the index of the referrers tag schema where another tool wrote one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO

from bootseer import light_dataclasses as dataclasses
from bootseer.context_managers import Closing
from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.storage.local import LocalStore
from bootseer.storage.oci.manifest import (
    LIMIT_BYTES,
    MOST_DESCRIPTORS,
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_bytes,
    index_bytes,
    parse_manifest,
    parse_object,
)
from bootseer.storage.oci.media_types import INDEX_TYPES, MANIFEST_TYPES
from bootseer.storage.oci.platforms import choose_platform, this_platform
from bootseer.storage.oci.reference import (
    DEFAULT_TAG,
    DIGEST,
    LAYOUT_SCHEME,
    Reference,
    check_digest,
)
from bootseer.storage.oci.referrers import (
    describe_manifest,
    filter_referrers,
    referrers_tag,
    subject_of,
)
from bootseer.storage.oci.registry.blob_stream import read_bytes
from bootseer.storage.oci.registry.upload import BlobSource
from bootseer.storage.oci.repository import Progress
from bootseer.storage.read_only_store import ReadOnlyStore
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import PreferredReads, Stat, Store
from bootseer.system.atomic import Draft
from bootseer.system.file_lock import FileLock, acquire_directory
from bootseer.system.regular_files import opener

TAG = "org.opencontainers.image.ref.name"
MARKER = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()


def blob_name(digest: str) -> str:
    """A blob's name below the layout; UsageError for a text that is no digest."""
    algorithm, _, encoded = check_digest(digest).partition(":")
    return f"blobs/{algorithm}/{encoded}"


class LayoutStore(ReadOnlyStore):
    """`Store` over a layout's blobs, named by digest."""

    kind = "image layouts, as stores,"
    unlisted = "name blobs by digest"

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files = LocalStore(directory)

    @property
    def url(self) -> str:
        return LAYOUT_SCHEME + self._directory

    def __repr__(self) -> str:
        return f"LayoutStore({self.url!r})"

    @property
    def preferred(self) -> PreferredReads:
        return self._files.preferred

    def stat(self, name: str) -> Stat:
        stat = self._files.stat(blob_name(name))
        return Stat(name, stat.size_bytes, stat.mtime_s, False, name)

    def local_path(self, name: str) -> str | None:
        return self._files.local_path(blob_name(name))

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        self._files.read_range(blob_name(name), offset, buffer)

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._files.read_scatter(blob_name(name), offset, buffers, attempt, filled)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        data = self._files.read(blob_name(name), limit_bytes=limit_bytes)
        check_bytes(data, name, f"{name} in {self.url}")
        return data

    def close(self) -> None:
        self._files.close()


class LayoutBlobStream(Closing):
    """`BlobStream` over a layout's file, which it closes."""

    def __init__(
        self, file: FileIO, path: str, digest: str, size_bytes: int, *, verify: bool
    ) -> None:
        self._file, self._path = file, path
        self.size_bytes = size_bytes
        self._cancelled = self._over = False
        algorithm, _, self._expected = digest.partition(":")
        self._hash = hashlib.new(algorithm) if verify else None

    def readinto(self, view: memoryview, /) -> int:
        if self._over or not view:
            return 0
        if self._cancelled:
            raise StoreUnavailableError(f"cannot read {self._path}: it was given up")
        try:
            count = self._file.readinto(view)
        except OSError as error:
            raise from_os_error(error, f"read the blob {self._path}") from error
        if not count:
            self.close()
            if self._hash is not None and self._hash.hexdigest() != self._expected:
                raise CorruptDataError(f"{self._path} is not what its name says; it is not used")
        elif self._hash is not None:
            self._hash.update(view[:count])
        return count or 0

    def read(self, size: int = -1, /) -> bytes:
        return read_bytes(self.readinto, size)

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> None:
        self._over = True
        self._file.close()


class LayoutRepository(Closing):
    """`Repository` in a directory, which the first push makes when it does not exist."""

    def __init__(self, directory: str, *, writable: bool = False) -> None:
        self._directory, self._writable = directory, writable
        self._store = LayoutStore(directory)

    def __repr__(self) -> str:
        return f"LayoutRepository({self._directory!r})"

    @property
    def reference(self) -> Reference:
        return Reference("", self._directory)

    @property
    def plain_http(self) -> bool:
        return False

    @property
    def store(self) -> Store:
        return self._store

    def resolve(self, version: str) -> Descriptor:
        entries = self._entries()
        if DIGEST.fullmatch(version):
            for entry in entries:
                if entry.digest == version:
                    return _without_tag(entry)
            raw = self._manifest_bytes(version)
            parsed = parse_manifest(raw, "", self._describe(version))
            return Descriptor(parsed.media_type, version, len(raw))
        tagged = [one for one in entries if one.annotations.get(TAG) == version]
        if not tagged and version == DEFAULT_TAG:
            candidates = [one for one in entries if TAG not in one.annotations] or entries
            tagged = candidates if len(candidates) == 1 else []
        if not tagged:
            tags = ", ".join(self.tags()) or "none"
            raise NotFoundError(
                f"{LAYOUT_SCHEME}{self._directory} has no tag {version}; its tags: {tags}"
            )
        return _without_tag(tagged[-1])

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        kind = "" if isinstance(descriptor, str) else descriptor.media_type
        return parse_manifest(self._manifest_bytes(digest), kind, self._describe(digest))

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        descriptor = self.resolve(version)
        parsed = self.manifest(descriptor)
        if isinstance(parsed, Index):
            chosen = platform or this_platform()
            descriptor = choose_platform(parsed.manifests, chosen, self._describe(version))
            parsed = self.manifest(descriptor)
        if isinstance(parsed, Index):
            raise NotSupportedError(f"{self._describe(version)} is an index within an index")
        return descriptor, parsed

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        return self._store.read(descriptor.digest, limit_bytes=limit_bytes)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> LayoutBlobStream:
        path = os.path.join(self._directory, blob_name(digest))
        try:
            file = open(path, "rb", buffering=0, opener=opener)  # noqa: SIM115 - the stream's
        except OSError as error:
            raise from_os_error(error, f"read the blob {path}") from error
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return LayoutBlobStream(file, path, digest, size_bytes, verify=verify and not offset)

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        listed: list[Descriptor] = []
        for entry in self._entries():
            if entry.annotations.get(TAG) == referrers_tag(digest):
                parsed = self.manifest(entry)
                listed += parsed.manifests if isinstance(parsed, Index) else ()
            elif entry.media_type in MANIFEST_TYPES | INDEX_TYPES:
                raw = self._manifest_bytes(entry.digest)
                if digest.encode() not in raw:
                    continue
                if subject_of(parse_manifest(raw, entry.media_type)) == digest:
                    listed.append(describe_manifest(raw, entry.media_type))
        return filter_referrers(listed, artifact_type)

    def has_blob(self, digest: str) -> bool:
        return os.path.exists(os.path.join(self._directory, blob_name(digest)))

    def push_blob(
        self,
        source: str | bytes,
        digest: str,
        size_bytes: int,
        *,
        progress: Progress | None = None,
    ) -> bool:
        self._check_writable()
        blob = BlobSource(source, check_digest(digest), size_bytes)
        blob.check()
        is_new = not self.has_blob(digest)
        if is_new:
            self._write(blob_name(digest), blob.pieces(0, size_bytes))
        if progress is not None:
            progress(size_bytes)
        return is_new

    def push_manifest(self, raw: bytes, media_type: str, tag: str = "") -> Descriptor:
        self._check_writable()
        descriptor = describe_manifest(raw, media_type)
        self._write(blob_name(descriptor.digest), [raw])
        self._write_if_missing("oci-layout", MARKER)
        entry = dataclasses.replace(descriptor, annotations={TAG: tag} if tag else {})
        with self._acquire_lock():
            entries = self._entries()
            known = [one for one in entries if one.digest == descriptor.digest]
            entries = [
                one
                for one in entries
                # An entry without a tag is redundant next to one of the same digest with a tag.
                if not (tag and one.annotations.get(TAG) == tag)
                and not (one.digest == descriptor.digest and TAG not in one.annotations)
            ]
            if tag or not any(TAG in one.annotations for one in known):
                entries.append(entry)
            self._write("index.json", [index_bytes(entries)])
        return descriptor

    def delete_referrer(self, subject: str, digest: str) -> None:
        self._check_writable()
        with self._acquire_lock():
            left = [one for one in self._entries() if one.digest != digest]
            self._write("index.json", [index_bytes(left)])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, blob_name(check_digest(digest))))

    def tags(self) -> list[str]:
        return sorted({one.annotations[TAG] for one in self._entries() if TAG in one.annotations})

    def close(self) -> None:
        self._store.close()

    def _describe(self, version: str) -> str:
        return f"{version} in {LAYOUT_SCHEME}{self._directory}"

    def _entries(self) -> list[Descriptor]:
        """The entries of `index.json`; none before the first push."""
        path = os.path.join(self._directory, "index.json")
        try:
            with open(path, "rb", opener=opener) as file:
                raw = file.read(LIMIT_BYTES + 1)
        except FileNotFoundError as error:
            if self._writable:
                return []
            raise NotFoundError(
                f"{self._directory} is no image layout: it has no index.json; check the path"
            ) from error
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        if len(raw) > LIMIT_BYTES:
            raise CorruptDataError(f"{path} has more than {LIMIT_BYTES} bytes")
        # Some tools leave the schema's version out here.
        listed = parse_object(raw, path).get("manifests") or []
        if not isinstance(listed, list) or len(listed) > MOST_DESCRIPTORS:
            raise CorruptDataError(f"{path} has no list of manifests, or one that is too long")
        return [Descriptor.parse(one, path) for one in listed]

    def _manifest_bytes(self, digest: str) -> bytes:
        return self._store.read(digest, limit_bytes=LIMIT_BYTES)

    def _check_writable(self) -> None:
        if not self._writable:
            raise AccessDeniedError(f"{LAYOUT_SCHEME}{self._directory} was opened for reading")

    def _write(self, name: str, pieces: Iterator[bytes] | list[bytes]) -> None:
        path = os.path.join(self._directory, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with Draft(path, mode=0o644, exact_mode=True) as draft:
                for piece in pieces:
                    draft.write(piece)
                draft.publish()
        except OSError as error:
            raise from_os_error(error, f"write {path}") from error

    def _write_if_missing(self, name: str, data: bytes) -> None:
        if not os.path.exists(os.path.join(self._directory, name)):
            self._write(name, [data])

    def _acquire_lock(self) -> FileLock:
        """One writer of `index.json` at a time on this machine."""
        try:
            return acquire_directory(self._directory)
        except OSError as error:
            raise from_os_error(error, f"open {self._directory}") from error


def _without_tag(entry: Descriptor) -> Descriptor:
    """An entry's descriptor as a registry has it: the tag is the index's, not the manifest's."""
    annotations = {key: text for key, text in entry.annotations.items() if key != TAG}
    return dataclasses.replace(entry, annotations=annotations)
