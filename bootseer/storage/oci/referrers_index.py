"""Editing the referrers index of registries without a referrers API, under a tag of its own.

Source: the distribution specification 1.1, "Referrers Tag Schema". Registries replace a tag
without asking what it was, so that a change can be lost to another client's: the entry is looked
for again after as long as another's read and write may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from bootseer.errors import NotFoundError, StoreUnavailableError
from bootseer.storage.oci.manifest import Descriptor, Index, index_bytes, parse_manifest
from bootseer.storage.oci.media_types import OCI_INDEX
from bootseer.storage.oci.referrers import referrers_tag
from bootseer.storage.oci.registry.manifests import (
    IncompleteManifestError,
    get_manifest,
    is_missing,
    put_manifest,
)
from bootseer.storage.oci.registry.registry_client import RegistryClient
from bootseer.storage.retry import retry_call
from bootseer.system.randomness import CHANCE

ATTEMPTS = 20  # at writing an index that others write too
SETTLE_S = 0.05
CONFIRMATIONS = 2  # an entry that was seen so often in a row is not lost any more
DELETED_ATTEMPTS = 6  # seconds in all: a registry's copies may lag

Change = Callable[[Sequence[Descriptor]], bytes | None]
"""Gives the index with a change made, or None when there is nothing to change."""


class ReferrersIndex:
    """The indexes of referrers in one repository of a registry."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client

    def add(self, subject: str, referrer: Descriptor) -> None:
        """Enter a manifest; that it was deleted meanwhile, as one too many, is no error."""
        what = f"enter a referrer of {subject} in {self._client.reference.place}"
        self._edit(subject, lambda known: with_referrer(known, referrer), what, referrer)

    def remove(self, subject: str, digest: str, what: str) -> None:
        """Take a manifest out of a subject's index, if there is one."""
        if self._entries(referrers_tag(subject), what):
            self._edit(subject, lambda known: without_referrer(known, digest), f"finish: {what}")

    def _edit(
        self, subject: str, change: Change, what: str, added: Descriptor | None = None
    ) -> None:
        tag, confirmed, deleted = referrers_tag(subject), 0, 0
        missing: frozenset[str] = frozenset()
        for number in range(ATTEMPTS):
            began_s = time.monotonic()
            entries = self._entries(tag, what)
            changed = changed_without(entries, missing, change)
            if changed is None:
                confirmed += 1
                if confirmed == CONFIRMATIONS:
                    return
            else:
                confirmed = 0
                try:
                    # Not repeated: what was read is too old to be written later.
                    put_manifest(self._client, changed, OCI_INDEX, tag)
                    missing, deleted = frozenset(), 0  # an entry may be pushed again
                except StoreUnavailableError as error:
                    if number == ATTEMPTS - 1:
                        raise
                    if isinstance(error, IncompleteManifestError):
                        # An entry was deleted, and is not taken out yet, or never will be.
                        looked_at = (*entries, added) if added else entries
                        missing = frozenset(
                            one.digest for one in looked_at if is_missing(self._client, one, what)
                        )
                        deleted = deleted + 1 if added and added.digest in missing else 0
                        if deleted == DELETED_ATTEMPTS:
                            return
            took_s = time.monotonic() - began_s
            time.sleep(CHANCE.uniform(1, 2 + number) * max(SETTLE_S, 2 * took_s))
        raise StoreUnavailableError(
            f"cannot {what}: others change its index all the time; push again"
        )

    def _entries(self, tag: str, what: str) -> tuple[Descriptor, ...]:
        """What the index under a tag lists at the registry itself."""
        client = self._client
        try:
            raw, media_type = retry_call(
                lambda: get_manifest(client, client.upstream, tag, what),
                retry_s=client.options.retry_s,
            )
        except NotFoundError:
            return ()
        parsed = parse_manifest(raw, media_type, what)
        return parsed.manifests if isinstance(parsed, Index) else ()


def with_referrer(known: Sequence[Descriptor], added: Descriptor) -> bytes | None:
    """The index with one more entry; None when it has it already."""
    if any(one.digest == added.digest for one in known):
        return None
    return index_bytes([*known, added])


def without_referrer(known: Sequence[Descriptor], digest: str) -> bytes | None:
    """The index without an entry; None when it has no such entry."""
    left = [one for one in known if one.digest != digest]
    return index_bytes(left) if len(left) < len(known) else None


def changed_without(
    known: Sequence[Descriptor], missing: Container[str], change: Change
) -> bytes | None:
    """The index changed, and without missing manifests; None when both leave it as it is."""
    left = [one for one in known if one.digest not in missing]
    changed = change(left)
    return index_bytes(left) if changed is None and len(left) < len(known) else changed
