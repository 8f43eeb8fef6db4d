"""The names of a striped checkpoint on its store, and finding what is current.

`<name>.stripes/CURRENT` points to `<name>.stripes/v-<time>-<hex>/`, which holds `manifest.json`
and the stripes (of a file) or `data/` (of a tree).
"""

from __future__ import annotations

import dataclasses
import posixpath
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import BadFieldError, digest_of
from bootseer.stripedfs.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    POINTER_LIMIT_BYTES,
    KeptAttributes,
    Link,
    Manifest,
    Pointer,
    TreeFile,
    TreeManifest,
    inside,
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


def folder_of(name: str) -> str:
    """The folder of a checkpoint, which may be named with or without its suffix.

    Raises UsageError for a name that no file can have.
    """
    if not is_name(name):
        raise UsageError(f"{name!r} is no checkpoint's name; name one in the folder")
    return name if name.endswith(SUFFIX) else name + SUFFIX


def is_name(name: str) -> bool:
    """Whether a checkpoint can have this name: its folder would be a name, but `..` is none."""
    return name.removesuffix(SUFFIX).rpartition("/")[2] not in ("", ".", "..")


def current(store: Store, name: str) -> Version | None:
    """The current version of a checkpoint; None when none was ever published under this name.

    A symbolic link of this name is no version; see `pointed`.
    """
    found = pointed(store, name)
    return None if isinstance(found, Link) else found


def pointed(store: Store, name: str) -> Version | Link | None:
    """What a name's pointer says: a version, or that the name is a symbolic link; None: neither."""
    folder = folder_of(name)
    pointer_name = f"{folder}/{CURRENT}"
    data = b""
    try:
        data = store.read(pointer_name, limit_bytes=POINTER_LIMIT_BYTES)
        pointer = Pointer.parse(data, f"{pointer_name} in {store.url}")
    except NotFoundError:
        return None
    except (AccessDeniedError, CorruptDataError):
        if not data.lstrip().startswith(b"{") and _is_plain_on_the_web(store, name):
            return None
        raise
    if isinstance(pointer, Link):
        return pointer
    return Version(f"{folder}/{pointer.version}", pointer)


def kept_attributes(store: Store, name: str) -> KeptAttributes | None:
    """What mode and time of a plain file or folder were set to; None when they never were."""
    place = f"{folder_of(name)}/{ATTRIBUTES}"
    try:
        data = store.read(place, limit_bytes=POINTER_LIMIT_BYTES)
        return KeptAttributes.parse(data, f"{place} in {store.url}")
    except (NotFoundError, AccessDeniedError, CorruptDataError, NotSupportedError):
        return None  # the file is none the worse


class LeadsOutError(NotFoundError):
    """A symbolic link leads out of what was opened as the store: its folder may hold more."""


def target_of(store: Store, name: str, link: Link) -> str:
    """The name that a link leads to. Raises LeadsOutError for one outside of the store."""
    try:
        inside(name, link.target)
    except BadFieldError as error:
        raise LeadsOutError(
            f"the link {name} in {store.url} cannot be followed: {error}"
        ) from error
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link.target))


def resolve(store: Store, name: str) -> str:
    """The name that is reached through links of this name; those of its folders are none of it.

    Raises LeadsOutError, and NotFoundError for links in a circle.
    """
    at = name
    for _ in range(MOST_LINKS):
        found = pointed(store, at)
        if not isinstance(found, Link):
            return at
        at = target_of(store, at.removesuffix(SUFFIX), found)
    raise in_a_circle(store, name)


def in_a_circle(store: Store, name: str) -> NotFoundError:
    """The error of links that lead to one another."""
    return NotFoundError(f"{name} in {store.url} is a link that leads to itself; remove it")


class Seen(NamedTuple):
    """A current version as it was read, and what its checkpoint's folder was like before that."""

    version: Version | Link | KeptAttributes
    mtime_s: float
    first_s: float
    """When this time of modification and this version were first seen together."""
    read_s: float


def current_or_seen(store: Store, name: str, mtime_s: float, seen: Seen | None) -> Seen | None:
    """What is current in a folder that was last modified at `mtime_s`; None as `current`.

    Publishing renames the pointer, which modifies the folder: it need not be read again in one
    that was not modified. Two changes in one tick of the store's clock look like one, so a time
    that was seen first a moment ago proves nothing; and as the folders of some gateways never
    change their time, it is believed for `TRUST_S` only.
    """
    now_s = time.monotonic()
    if seen is not None and (not mtime_s or seen.mtime_s != mtime_s):
        seen = None
    if seen is not None and seen.read_s - seen.first_s > TICK_S and now_s - seen.read_s < TRUST_S:
        return seen
    version = pointed(store, name) or kept_attributes(store, name)
    if version is None:
        return None
    first_s = seen.first_s if seen is not None and seen.version == version else now_s
    return Seen(version, mtime_s, first_s, now_s)


def _is_plain_on_the_web(store: Store, name: str) -> bool:
    """Whether a web server has `name` itself.

    Many refuse what is not there (an object store without the right to list, an address signed
    for one object alone), or answer a page for whatever is asked.
    """
    if not store.url.startswith(("http://", "https://")):
        return False
    try:
        return not store.stat(name).is_folder
    except (NotFoundError, AccessDeniedError, CorruptDataError):
        return False


def load(store: Store, name: str) -> tuple[Version, Manifest | TreeManifest] | None:
    """The current version with its manifest; None as `current`, and for a symbolic link.

    A version that was replaced and collected while we looked is looked for once more. Raises
    CorruptDataError for damage, and when the version that is pointed to is gone.
    """
    found = current(store, name)
    return None if found is None else load_version(store, name, found)


def load_version(
    store: Store, name: str, found: Version
) -> tuple[Version, Manifest | TreeManifest] | None:
    """As `load`, of a checkpoint whose pointer was just read."""
    try:
        return found, manifest_of(store, found)
    except NotFoundError as error:
        again = current(store, name)
        if again is None:  # removed meanwhile
            raise
        if again.folder == found.folder:
            raise gone(store, found) from error
        return again, manifest_of(store, again)


def gone(store: Store, version: Version) -> CorruptDataError:
    """The error of a version that is pointed to and lacks its manifest."""
    return CorruptDataError(
        f"{version.folder} in {store.url} is gone or incomplete, yet it is the current "
        "version; put the checkpoint anew"
    )


def manifest_of(store: Store, version: Version) -> Manifest | TreeManifest:
    """A version's manifest, checked against its pointer."""
    pointer = version.pointer
    name = f"{version.folder}/{MANIFEST}"
    expected = (pointer.manifest_bytes, pointer.manifest_digest)
    parsed: Manifest | TreeManifest
    if version.is_tree:
        parsed = _read(store, name, expected, TreeManifest.parse)
        size_bytes = parsed.size_bytes
    else:
        parsed = _read(store, name, expected, Manifest.parse)
        size_bytes = parsed.layout.size_bytes
    if size_bytes != pointer.size_bytes:
        raise CorruptDataError(
            f"{name} in {store.url} is of {size_bytes} bytes, its pointer says "
            f"{pointer.size_bytes}; put the checkpoint anew"
        )
    return parsed


def striped_file(store: Store, version: Version, entry: TreeFile) -> StripedObject:
    """A striped file of a tree with its manifest, checked against the tree's.

    Raises CorruptDataError, also where the manifest is missing: the tree names it.
    """
    folder = f"{version.folder}/{entry.object}"
    name = f"{folder}/{MANIFEST}"
    try:
        manifest = _read(store, name, (entry.manifest_bytes, entry.digest), Manifest.parse)
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


def _read(
    store: Store, name: str, expected: tuple[int, bytes], parse: Callable[[bytes, str], T]
) -> T:
    where = f"{name} in {store.url}"
    data = store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES)
    # Parsed first: that a newer bootseer wrote it is the better message.
    parsed = parse(data, where)
    if (len(data), digest_of(data)) != expected:
        raise CorruptDataError(f"{where} is not the one that was published; put it anew")
    return parsed
