"""Referrers: what names a manifest as its subject. Pure: documents and names.

Source: the distribution specification 1.1, "Listing referrers" and the referrers tag schema: a
registry without that API keeps an index under a tag that is made from the subject's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from bootseer.storage.oci.manifest import (
    Descriptor,
    Index,
    Manifest,
    digest_of,
    index_bytes,
    parse_manifest,
)


def fallback_tag(digest: str) -> str:
    """The tag of a subject's index; the scheme's colon becomes a dash, 128 characters at most."""
    algorithm, _, encoded = digest.partition(":")
    return f"{algorithm}-{encoded}"[:128]


def describe(raw: bytes, media_type: str) -> Descriptor:
    """How a referrers' index describes a manifest: with its annotations and artifact type."""
    parsed = parse_manifest(raw, media_type)
    return Descriptor(
        media_type,
        digest_of(raw),
        len(raw),
        parsed.annotations,
        parsed.artifact_type,
    )


def subject_of(parsed: Manifest | Index) -> str:
    """The digest of a manifest's subject; "" without."""
    return parsed.subject.digest if parsed.subject is not None else ""


def wanted(found: Iterable[Descriptor], artifact_type: str) -> list[Descriptor]:
    """Those of an artifact type ("": all), each digest once: registries need not filter."""
    once = {one.digest: one for one in found}
    return [one for one in once.values() if artifact_type in ("", one.artifact_type)]


def with_referrer(known: Sequence[Descriptor], added: Descriptor) -> bytes | None:
    """The index with one more entry; None when it has it already."""
    if any(one.digest == added.digest for one in known):
        return None
    return index_bytes([*known, added])


def without_referrer(known: Sequence[Descriptor], digest: str) -> bytes | None:
    """The index without an entry; None when it has no such."""
    left = [one for one in known if one.digest != digest]
    return index_bytes(left) if len(left) < len(known) else None


def changed_without(
    known: Sequence[Descriptor],
    gone: Container[str],
    change: Callable[[Sequence[Descriptor]], bytes | None],
) -> bytes | None:
    """The index changed, and without what is `gone`; None when both leave it as it is."""
    left = [one for one in known if one.digest not in gone]
    changed = change(left)
    return index_bytes(left) if changed is None and len(left) < len(known) else changed
