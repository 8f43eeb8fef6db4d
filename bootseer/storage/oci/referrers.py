"""Referrers: manifests that name another one as their subject. Pure.

Source: the distribution specification 1.1, "Listing Referrers" and "Referrers Tag Schema": a
registry without that API keeps an index under a tag that is made from the subject's digest.
"""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.storage.oci.manifest import (
    Descriptor,
    Index,
    Manifest,
    digest_of,
    parse_manifest,
)


def referrers_tag(digest: str) -> str:
    """The tag of a subject's index: its digest with a dash for the colon, cut to 128 characters."""
    algorithm, _, encoded = digest.partition(":")
    return f"{algorithm}-{encoded}"[:128]


def describe_manifest(raw: bytes, media_type: str) -> Descriptor:
    """A manifest's descriptor for a referrers index: with its annotations and artifact type."""
    parsed = parse_manifest(raw, media_type)
    return Descriptor(
        media_type,
        digest_of(raw),
        len(raw),
        parsed.annotations,
        parsed.artifact_type,
    )


def subject_of(parsed: Manifest | Index) -> str:
    """The digest of a manifest's subject; "" without one."""
    return parsed.subject.digest if parsed.subject is not None else ""


def filter_referrers(listed: Iterable[Descriptor], artifact_type: str) -> list[Descriptor]:
    """Referrers of an artifact type ("": all), each once: registries need not filter them."""
    unique = {one.digest: one for one in listed}
    return [one for one in unique.values() if artifact_type in ("", one.artifact_type)]
