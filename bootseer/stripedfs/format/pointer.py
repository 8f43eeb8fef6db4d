"""The names of a striped checkpoint on its store, and its current version.

`<name>.stripes/CURRENT` points to `<name>.stripes/v-<time>-<hex>/`, which holds `manifest.json`
and the stripes (of a file) or `data/` (of a tree).
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import BadFieldError, compute_digest
from bootseer.stripedfs.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    POINTER_LIMIT_BYTES,
    Link,
    Manifest,
    Pointer,
    StoredAttributes,
    TreeFile,
    TreeManifest,
    check_target,
)
from bootseer.stripedfs.format.stripe_layout import stripe_name

SUFFIX = ".stripes"
CURRENT = "CURRENT"
ATTRIBUTES = "ATTRIBUTES"
MANIFEST = "manifest.json"
DATA = "data"
TICK_S = 2.0
TRUST_S = 300.0
MOST_LINKS = 40
"""As many as Linux follows for one path."""
T = TypeVar("T", Manifest, TreeManifest)


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One whole version of a checkpoint: its folder on the store, and the pointer that named it."""

    folder: str
    pointer: Pointer

    @property
    def is_tree(self) -> bool:
        """True for a directory checkpoint."""
        return self.pointer.kind == "tree"


@dataclasses.dataclass(frozen=True, slots=True)
class StripedObject:
    """One striped file: the folder that holds its stripes, and its manifest."""

    folder: str
    manifest: Manifest

    def part(self, stripe: int) -> str:
        """The store's name of a stripe."""
        return f"{self.folder}/{stripe_name(stripe)}"


def checkpoint_folder(name: str) -> str:
    """The folder of a checkpoint, which may be named with or without its suffix.

    Raises UsageError for a name that a file cannot have.
    """
    if not is_checkpoint_name(name):
        raise UsageError(f"{name!r} is no checkpoint's name; name one in the folder")
    return name if name.endswith(SUFFIX) else name + SUFFIX


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint can have this name: neither `..` nor the suffix alone."""
    return name.removesuffix(SUFFIX).rpartition("/")[2] not in ("", ".", "..")


def read_current(store: Store, name: str) -> Version | None:
    """The current version of a checkpoint; None when none was ever published under this name.

    None also for a symbolic link of this name; see `read_pointer`.
    """
    version = read_pointer(store, name)
    return None if isinstance(version, Link) else version


def read_pointer(store: Store, name: str) -> Version | Link | None:
    """What the pointer of a name says: a version, or a symbolic link; None without a pointer."""
    folder = checkpoint_folder(name)
    pointer_name = f"{folder}/{CURRENT}"
    data = b""
    try:
        data = store.read(pointer_name, limit_bytes=POINTER_LIMIT_BYTES)
        pointer = Pointer.parse(data, f"{pointer_name} in {store.url}")
    except NotFoundError:
        return None
    except (AccessDeniedError, CorruptDataError):
        if not data.lstrip().startswith(b"{") and _is_plain_web_object(store, name):
            return None
        raise
    if isinstance(pointer, Link):
        return pointer
    return Version(f"{folder}/{pointer.version}", pointer)


def read_attributes(store: Store, name: str) -> StoredAttributes | None:
    """The mode and time that were set of a plain file or folder; None when they never were."""
    place = f"{checkpoint_folder(name)}/{ATTRIBUTES}"
    try:
        data = store.read(place, limit_bytes=POINTER_LIMIT_BYTES)
        return StoredAttributes.parse(data, f"{place} in {store.url}")
    except (NotFoundError, AccessDeniedError, CorruptDataError, NotSupportedError):
        return None  # the file can be read without them


class LinkOutsideError(NotFoundError):
    """A symbolic link leads out of the folder that was opened as the store."""


def resolve_target(store: Store, name: str, link: Link) -> str:
    """The name that a link leads to. Raises LinkOutsideError for one outside of the store."""
    try:
        check_target(name, link.target)
    except BadFieldError as error:
        raise LinkOutsideError(
            f"the link {name} in {store.url} cannot be followed: {error}"
        ) from error
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link.target))


def follow_links(store: Store, name: str) -> str:
    """The name that a name leads to through symbolic links; links among its folders stay.

    Raises LinkOutsideError, and NotFoundError for links in a circle.
    """
    at = name
    for _ in range(MOST_LINKS):
        link = read_pointer(store, at)
        if not isinstance(link, Link):
            return at
        at = resolve_target(store, at.removesuffix(SUFFIX), link)
    raise circular_link_error(store, name)


def circular_link_error(store: Store, name: str) -> NotFoundError:
    """The error of links that lead to one another."""
    return NotFoundError(f"{name} in {store.url} is a link that leads to itself; remove it")


class CachedPointer(NamedTuple):
    """What was read of a name's pointer or attributes, and when."""

    content: Version | Link | StoredAttributes
    mtime_s: float
    """The time of the checkpoint's folder, listed before the content was read."""
    first_s: float
    """When this time and this content were first read together."""
    read_s: float


def read_if_changed(
    store: Store, name: str, mtime_s: float, cached: CachedPointer | None
) -> CachedPointer | None:
    """Read the pointer or attributes in a folder that was last modified at `mtime_s`, or neither.

    Publishing renames the pointer, which modifies the folder: nothing is read again in a folder
    that was not modified. Two changes in one tick of the store's clock look like one, so a time
    that was first seen a moment ago proves nothing; and as the folders of some gateways never
    change their time, what was cached counts for `TRUST_S` only.
    """
    now_s = time.monotonic()
    if cached is not None and (not mtime_s or cached.mtime_s != mtime_s):
        cached = None
    if (
        cached is not None
        and cached.read_s - cached.first_s > TICK_S
        and now_s - cached.read_s < TRUST_S
    ):
        return cached
    content = read_pointer(store, name) or read_attributes(store, name)
    if content is None:
        return None
    first_s = cached.first_s if cached is not None and cached.content == content else now_s
    return CachedPointer(content, mtime_s, first_s, now_s)


def _is_plain_web_object(store: Store, name: str) -> bool:
    """Whether a web server has `name` itself.

    Many deny access to what is not there (an object store without the right to list, an address
    signed for one object alone), or answer every request with a page.
    """
    if not store.url.startswith(("http://", "https://")):
        return False
    try:
        return not store.stat(name).is_folder
    except (NotFoundError, AccessDeniedError, CorruptDataError):
        return False


def load_current(store: Store, name: str) -> tuple[Version, Manifest | TreeManifest] | None:
    """The current version with its manifest; None as `read_current`.

    When it was replaced and collected meanwhile, the version after it. Raises CorruptDataError for
    damage, and when the version that is pointed to is missing.
    """
    version = read_current(store, name)
    return None if version is None else load_version(store, name, version)


def load_version(
    store: Store, name: str, version: Version
) -> tuple[Version, Manifest | TreeManifest]:
    """As `load_current`, of a checkpoint whose pointer was just read."""
    try:
        return version, read_manifest(store, version)
    except NotFoundError as error:
        newer = read_current(store, name)
        if newer is None:  # removed meanwhile
            raise
        if newer.folder == version.folder:
            raise lost_version_error(store, version) from error
        return newer, read_manifest(store, newer)


def lost_version_error(store: Store, version: Version) -> CorruptDataError:
    """The error of a version that is pointed to and lacks its manifest."""
    return CorruptDataError(
        f"{version.folder} in {store.url} is gone or incomplete, yet it is the current "
        "version; put the checkpoint anew"
    )


def read_manifest(store: Store, version: Version) -> Manifest | TreeManifest:
    """A version's manifest, checked against its pointer."""
    pointer = version.pointer
    name = f"{version.folder}/{MANIFEST}"
    expected = (pointer.manifest_bytes, pointer.manifest_digest)
    parsed: Manifest | TreeManifest
    if version.is_tree:
        parsed = _read_checked(store, name, expected, TreeManifest.parse)
        size_bytes = parsed.size_bytes
    else:
        parsed = _read_checked(store, name, expected, Manifest.parse)
        size_bytes = parsed.layout.size_bytes
    if size_bytes != pointer.size_bytes:
        raise CorruptDataError(
            f"{name} in {store.url} is of {size_bytes} bytes, its pointer says "
            f"{pointer.size_bytes}; put the checkpoint anew"
        )
    return parsed


def read_striped_file(store: Store, version: Version, entry: TreeFile) -> StripedObject:
    """A striped file of a tree with its manifest, checked against the tree's.

    Raises CorruptDataError, also where the manifest is missing, as the tree names it.
    """
    folder = f"{version.folder}/{entry.object}"
    name = f"{folder}/{MANIFEST}"
    try:
        manifest = _read_checked(store, name, (entry.manifest_bytes, entry.digest), Manifest.parse)
    except NotFoundError as error:
        raise CorruptDataError(
            f"the manifest of {entry.path} of {version.folder} in {store.url} is missing; put the "
            "checkpoint anew"
        ) from error
    if manifest.layout.size_bytes != entry.size_bytes:
        raise CorruptDataError(
            f"{name} in {store.url} is of {manifest.layout.size_bytes} bytes, the tree says "
            f"{entry.size_bytes}; put the checkpoint anew"
        )
    return StripedObject(folder, manifest)


def _read_checked(
    store: Store, name: str, expected: tuple[int, bytes], parse: Callable[[bytes, str], T]
) -> T:
    where = f"{name} in {store.url}"
    data = store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES)
    # Parsed first: that a newer bootseer wrote it is the better message.
    parsed = parse(data, where)
    if (len(data), compute_digest(data)) != expected:
        raise CorruptDataError(f"{where} is not the one that was published; put it anew")
    return parsed
