"""Names of images, parsed as container runtimes do. Pure but for looking for a directory.

Source: the grammar of the `reference` package of distribution, whose names Docker, Podman and
containerd share, with Docker Hub's short forms.
"""

from __future__ import annotations

import functools
import os
import re

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError

DEFAULT_HOST = "docker.io"
DEFAULT_TAG = "latest"
LAYOUT_SCHEME = "oci-layout:"
OCI_SCHEMES = ("oci://", "docker://")
LONGEST_NAME = 255

DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:\[[0-9a-fA-F:.]+\]|{_LABEL}(?:\.{_LABEL})*)(?::[0-9]{{1,5}})?")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """An image's name. `host` is "" for a directory, which `repository` then names.

    `tag` is "latest" where the text has neither tag nor digest, and "" where it has a digest
    alone; with both, the digest is what is meant.
    """

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def version(self) -> str:
        """What a registry is asked for: the digest when there is one, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def place(self) -> str:
        """The repository without a version: `host/repository`, or `oci-layout:DIR`."""
        return f"{self.host}/{self.repository}" if self.host else LAYOUT_SCHEME + self.repository

    @property
    def name(self) -> str:
        """The canonical spelling of this reference; equal references have equal names."""
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.place}{tag}" + (f"@{self.digest}" if self.digest else "")

    def with_digest(self, digest: str) -> str:
        """The name of one image of this repository by its digest, whatever its tag becomes."""
        return f"{self.place}@{digest}"

    def __str__(self) -> str:
        return self.name


def parse_reference(text: str) -> Reference:
    """Parse `[oci://][HOST/]REPOSITORY[:TAG][@DIGEST]` or `oci-layout:DIR[:TAG][@DIGEST]`.

    Raises UsageError for a text that is no such name.
    """
    if text.startswith(LAYOUT_SCHEME):
        return _parse_layout(text)
    bare = next((text.removeprefix(s) for s in OCI_SCHEMES if text.startswith(s)), text)
    name, at, digest = bare.partition("@")
    head, slash, rest = name.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost" or head.startswith("[")):
        host, path = head, rest
    else:
        host, path = DEFAULT_HOST, name
    path, colon, tag = path.partition(":")
    if host in ("index.docker.io", "registry-1.docker.io"):
        host = DEFAULT_HOST
    if host == DEFAULT_HOST and path and "/" not in path:
        path = f"library/{path}"
    good = (
        (not at or DIGEST.fullmatch(digest))
        and (not colon or _TAG.fullmatch(tag))
        and is_repository(path)
        and _HOST.fullmatch(host)
    )
    if not good:
        if at and not DIGEST.fullmatch(digest):
            text = f"***@{digest}"  # a login may precede the @
        raise UsageError(f"{text!r} is not an image's name; write [HOST/]NAME[:TAG][@DIGEST]")
    return Reference(host.lower(), path, tag or ("" if digest else DEFAULT_TAG), digest)


def is_repository(path: str) -> bool:
    """Whether a text can be the name of a repository."""
    parts = path.split("/")
    return len(path) <= LONGEST_NAME and all(_PART.fullmatch(part) for part in parts)


@functools.lru_cache(maxsize=1024)  # each read of a blob asks
def check_digest(digest: str) -> str:
    """Return a digest, or raise UsageError for a text that is none."""
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{digest[:100]!r} is not a digest; write sha256: and 64 hex digits")
    return digest


def check_version(version: str) -> str:
    """Return a tag or a digest, or raise UsageError."""
    if not DIGEST.fullmatch(version) and not _TAG.fullmatch(version):
        raise UsageError(f"{version[:100]!r} is neither a tag nor a digest")
    return version


def _parse_layout(text: str) -> Reference:
    """Parse an image layout's name. A directory that exists under the whole name is meant."""
    place, at, digest = text.removeprefix(LAYOUT_SCHEME).partition("@")
    tag = ""
    head, colon, last = place.rpartition(":")
    if colon and _TAG.fullmatch(last) and not os.path.isdir(place):
        place, tag = head, last
    if not place or (at and not DIGEST.fullmatch(digest)):
        raise UsageError(f"{text!r} names no image layout; write oci-layout:DIR[:TAG][@DIGEST]")
    return Reference("", os.path.abspath(place), tag, digest)
