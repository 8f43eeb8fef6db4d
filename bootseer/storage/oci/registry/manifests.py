"""Single requests for manifests: get, put, delete, and whether one exists."""

from __future__ import annotations

import re

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotSupportedError,
    StoreUnavailableError,
)
from bootseer.storage.oci.manifest import (
    ACCEPT,
    LIMIT_BYTES,
    Descriptor,
    check_bytes,
    digest_of,
    parse_manifest,
)
from bootseer.storage.oci.reference import DIGEST
from bootseer.storage.oci.registry.challenge import delete_scope
from bootseer.storage.oci.registry.mirrors import Endpoint
from bootseer.storage.oci.registry.registry_client import RegistryClient

INCOMPLETE_CODES = ("MANIFEST_BLOB_UNKNOWN", "DIGEST_INVALID")
"""What registries say of a manifest for the moment in which two push one of its blobs."""
DELETE_REFUSED = frozenset((400, 405, 501))
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)


class IncompleteManifestError(StoreUnavailableError):
    """A manifest that names a blob or manifest which the registry does not have."""


def get_manifest(
    client: RegistryClient, endpoint: Endpoint, version: str, what: str
) -> tuple[bytes, str]:
    """A manifest's checked bytes, and its media type."""
    accept, tail = {"Accept": ACCEPT}, f"manifests/{version}"
    with client.open(endpoint, "GET", tail, accept, client.attempt(), what) as exchange:
        if exchange.status != 200:
            raise client.error(exchange)
        media_type = (exchange.headers.get("Content-Type") or "").partition(";")[0].strip()
        announced = (exchange.headers.get("Docker-Content-Digest") or "").strip()
        raw = exchange.read_all(LIMIT_BYTES)
    for digest in {version, announced}:
        if DIGEST.fullmatch(digest):
            check_bytes(raw, digest, f"the manifest {version} from {endpoint.authority}")
    # Other documents (a proxy's page, say) must not be taken for a manifest, nor be pinned.
    return raw, parse_manifest(raw, media_type, f"the manifest {version}").media_type


def put_manifest(client: RegistryClient, raw: bytes, media_type: str, version: str) -> bool:
    """Store a manifest under a tag or digest; whether the registry took note of its subject.

    One attempt. Raises IncompleteManifestError while the registry lacks a part of it.
    """
    what = f"push the manifest {version} to {client.reference.place}"
    endpoint = client.upstream
    target, headers = endpoint.target(f"manifests/{version}"), {"Content-Type": media_type}
    with client.send(
        endpoint, "PUT", target, headers, client.attempt(), what, body=raw
    ) as exchange:
        if exchange.status not in (200, 201, 202):
            error = client.error(exchange)
            if any(code in str(error) for code in INCOMPLETE_CODES):
                raise IncompleteManifestError(f"{error}; push its blobs first")
            raise error
        announced = (exchange.headers.get("Docker-Content-Digest") or "").strip()
        if announced.startswith("sha256:") and announced != digest_of(raw):
            raise CorruptDataError(f"cannot {what}: the registry stored other bytes")
        return bool(exchange.headers.get("OCI-Subject"))


def delete_manifest(client: RegistryClient, digest: str, what: str) -> None:
    """Delete a manifest; a missing one is no error."""
    endpoint = client.upstream
    target, also = endpoint.target(f"manifests/{digest}"), (delete_scope(endpoint.repository),)
    with client.send(endpoint, "DELETE", target, {}, client.attempt(), what, also=also) as exchange:
        if exchange.status in DELETE_REFUSED:
            raise NotSupportedError(
                f"cannot {what}: the registry deletes nothing; have its owner allow it, or "
                "delete it by the registry's own means"
            )
        if exchange.status not in (200, 202, 204, 404):
            raise client.error(exchange)


def is_missing(client: RegistryClient, descriptor: Descriptor, what: str) -> bool:
    """Whether the registry itself says that it does not have a manifest."""
    known = _MEDIA_TYPE.fullmatch(descriptor.media_type)  # other tools wrote the descriptor
    accept = {"Accept": f"{descriptor.media_type}, {ACCEPT}" if known else ACCEPT}
    tail = f"manifests/{descriptor.digest}"
    try:
        with client.open(client.upstream, "HEAD", tail, accept, client.attempt(), what) as exchange:
            return exchange.status == 404
    except BootseerError:
        return False
