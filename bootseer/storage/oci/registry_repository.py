"""A repository of a registry."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from bootseer.context_managers import Closing
from bootseer.errors import CorruptDataError, NotFoundError, NotSupportedError, UsageError
from bootseer.storage.oci.manifest import (
    LIMIT_BYTES,
    Descriptor,
    Index,
    Manifest,
    Platform,
    digest_of,
    parse_manifest,
    parse_object,
)
from bootseer.storage.oci.media_types import INDEX_TYPES, OCI_INDEX
from bootseer.storage.oci.platforms import choose_platform, this_platform
from bootseer.storage.oci.reference import DIGEST, Reference, check_digest, check_version
from bootseer.storage.oci.referrers import (
    describe_manifest,
    filter_referrers,
    referrers_tag,
    subject_of,
)
from bootseer.storage.oci.registry.blob_stream import RegistryBlobStream
from bootseer.storage.oci.registry.blobs import BlobStore
from bootseer.storage.oci.registry.manifests import delete_manifest, get_manifest, put_manifest
from bootseer.storage.oci.registry.mirrors import PULL, RESOLVE, Endpoint
from bootseer.storage.oci.registry.registry_client import RegistryClient
from bootseer.storage.options import StoreOptions
from bootseer.storage.retry import retry_call
from bootseer.storage.store import Store, check_limit
from bootseer.system.lru import put_youngest

if TYPE_CHECKING:
    from bootseer.storage.http.exchange import Exchange
    from bootseer.storage.oci.referrers_index import ReferrersIndex
    from bootseer.storage.oci.registry.upload import Uploader
    from bootseer.storage.oci.repository import Progress

KNOWN_MANIFESTS = 64
PUT_RETRY_S = 10.0


class RegistryRepository(Closing):
    """`Repository` over HTTP; any number of threads may use it."""

    def __init__(self, client: RegistryClient) -> None:
        self._client, self._retry_s = client, client.options.retry_s
        self._reference = client.reference
        self._blobs = BlobStore(client)
        self._uploads: Uploader | None = None
        self._lock = threading.Lock()
        self._known: dict[str, tuple[bytes, str]] = {}
        self._has_referrers_api: dict[Endpoint, bool] = {}

    @classmethod
    def open(
        cls,
        reference: Reference,
        options: StoreOptions,
        *,
        plain_http: bool | None = None,
        push: bool = False,
    ) -> Self:
        """The repository of a reference, by this node's settings; see `open_repository`."""
        place = Reference(reference.host, reference.repository)
        return cls(RegistryClient.from_files(place, options, plain_http=plain_http, push=push))

    def __repr__(self) -> str:
        return f"RegistryRepository({self._reference.place!r})"

    @property
    def reference(self) -> Reference:
        return self._reference

    @property
    def plain_http(self) -> bool:
        return not self._client.upstream.origin.tls

    @property
    def store(self) -> Store:
        return self._blobs

    def resolve(self, version: str) -> Descriptor:
        check_version(version)
        is_digest = DIGEST.fullmatch(version) is not None
        with self._lock:
            known = self._known.get(version)
        if known is None:
            known = self._fetch(version, PULL if is_digest else RESOLVE)
        raw, media_type = known
        return Descriptor(media_type, version if is_digest else digest_of(raw), len(raw))

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        if not DIGEST.fullmatch(digest):
            raise UsageError(f"{digest[:100]!r} is no digest; resolve a tag first")
        with self._lock:
            known = self._known.get(digest)
        raw, media_type = known or self._fetch(digest, PULL)
        if not isinstance(descriptor, str) and descriptor.size_bytes != len(raw):
            raise CorruptDataError(
                f"{digest} in {self._reference.place} has {len(raw)} bytes, not the"
                f" {descriptor.size_bytes} that it should have"
            )
        return parse_manifest(raw, media_type, f"{digest} in {self._reference.place}")

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        descriptor = self.resolve(version)
        parsed = self.manifest(descriptor)
        if isinstance(parsed, Index):
            what = f"{self._reference.place} ({version})"
            descriptor = choose_platform(parsed.manifests, platform or this_platform(), what)
            parsed = self.manifest(descriptor)
        if isinstance(parsed, Index):
            raise NotSupportedError(
                f"{descriptor.digest} in {self._reference.place} is an index within an index;"
                " name an image by its digest"
            )
        return descriptor, parsed

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        shown = f"{descriptor.digest} in {self._reference.place}"
        check_limit(shown, descriptor.size_bytes, limit_bytes)
        return self._blobs.read(descriptor.digest, limit_bytes=limit_bytes)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> RegistryBlobStream:
        return self._blobs.stream(digest, offset, verify=verify)

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        def ask(endpoint: Endpoint) -> Sequence[Descriptor]:
            listed = self._referrers_at(endpoint, digest, artifact_type)
            if not listed and endpoint.is_mirror:
                raise NotFoundError(f"{endpoint.authority} knows no referrers of {digest}")
            return listed

        try:
            listed = retry_call(lambda: self._client.ask_any(ask, RESOLVE), retry_s=self._retry_s)
        except NotFoundError:
            return []
        return filter_referrers(listed, artifact_type)

    def has_blob(self, digest: str) -> bool:
        return self._uploader().has(digest)

    def push_blob(
        self,
        source: str | bytes,
        digest: str,
        size_bytes: int,
        *,
        progress: Progress | None = None,
    ) -> bool:
        from bootseer.storage.oci.registry.upload import BlobSource  # not needed to read

        blob = BlobSource(source, digest, size_bytes)
        return self._uploader().push(blob, progress)

    def push_manifest(self, raw: bytes, media_type: str, tag: str = "") -> Descriptor:
        descriptor = describe_manifest(raw, media_type)
        subject = subject_of(parse_manifest(raw, media_type))
        for version in dict.fromkeys((descriptor.digest, tag or descriptor.digest)):
            knows_subject = self._put(raw, media_type, check_version(version))
        if subject and not knows_subject:
            self._referrers_index().add(subject, descriptor)
        return descriptor

    def delete_referrer(self, subject: str, digest: str) -> None:
        check_digest(digest)
        what = f"delete {digest} of {self._reference.place}"
        retry_call(lambda: delete_manifest(self._client, digest, what), retry_s=self._retry_s)
        with self._lock:
            self._known.pop(digest, None)
        self._referrers_index().remove(subject, digest, what)

    def tags(self) -> list[str]:
        what = f"list the tags of {self._reference.place}"
        endpoint = self._client.upstream

        def parse_page(exchange: Exchange) -> dict[str, None]:
            if exchange.status != 200:
                raise self._client.error(exchange)
            page = parse_object(exchange.read_all(LIMIT_BYTES), what)
            return {tag: None for tag in page.get("tags") or () if isinstance(tag, str)}

        def ask() -> list[str]:
            target = endpoint.target("tags/list", "n=1000")
            tags = self._client.list_pages(endpoint, target, {}, what, parse_page)
            return sorted(tags or ())

        return retry_call(ask, retry_s=self._retry_s)

    def close(self) -> None:
        self._blobs.close()

    def _fetch(self, version: str, ability: str) -> tuple[bytes, str]:
        """A manifest's checked bytes and media type, which are remembered by digest."""
        what = f"read the manifest {version} of {self._reference.place}"

        def ask(endpoint: Endpoint) -> tuple[bytes, str]:
            return get_manifest(self._client, endpoint, version, what)

        raw, media_type = retry_call(
            lambda: self._client.ask_any(ask, ability), retry_s=self._retry_s
        )
        digest = version if DIGEST.fullmatch(version) else digest_of(raw)
        with self._lock:
            put_youngest(self._known, digest, (raw, media_type), KNOWN_MANIFESTS)
        return raw, media_type

    def _referrers_at(
        self, endpoint: Endpoint, digest: str, artifact_type: str
    ) -> Sequence[Descriptor]:
        if self._has_referrers_api.get(endpoint, True):
            listed = self._referrers_by_api(endpoint, digest, artifact_type)
            if listed is not None:
                return listed
        what = f"list the referrers of {digest} in {self._reference.place}"
        try:
            raw, media_type = get_manifest(self._client, endpoint, referrers_tag(digest), what)
        except NotFoundError:
            return []
        # Not sooner: a registry with the API may refuse it for a repository that is not there yet.
        self._has_referrers_api[endpoint] = False
        parsed = parse_manifest(raw, media_type, f"the referrers of {digest}")
        return parsed.manifests if isinstance(parsed, Index) else []

    def _referrers_by_api(
        self, endpoint: Endpoint, digest: str, artifact_type: str
    ) -> Sequence[Descriptor] | None:
        """All pages of the referrers API's list; None when this endpoint has no such API."""
        what = f"list the referrers of {digest} in {self._reference.place}"
        query = f"artifactType={quote(artifact_type, safe='')}" if artifact_type else ""

        def parse_page(exchange: Exchange) -> dict[str, Descriptor] | None:
            kind = (exchange.headers.get("Content-Type") or "").partition(";")[0].strip()
            missing = exchange.status in (400, 404, 405, 501)
            if missing or (exchange.status == 200 and kind not in INDEX_TYPES):
                return None
            if exchange.status != 200:
                raise self._client.error(exchange)
            page = parse_manifest(exchange.read_all(LIMIT_BYTES), kind, what)
            manifests = page.manifests if isinstance(page, Index) else ()
            return {manifest.digest: manifest for manifest in manifests}

        target, accept = endpoint.target(f"referrers/{digest}", query), {"Accept": OCI_INDEX}
        listed = self._client.list_pages(endpoint, target, accept, what, parse_page)
        return None if listed is None else list(listed.values())

    def _put(self, raw: bytes, media_type: str, version: str) -> bool:
        return retry_call(
            lambda: put_manifest(self._client, raw, media_type, version),
            retry_s=min(self._retry_s, PUT_RETRY_S),
        )

    def _uploader(self) -> Uploader:
        from bootseer.storage.oci.registry.upload import Uploader  # not needed to read

        if self._uploads is None:
            self._uploads = Uploader(self._client)
        return self._uploads

    def _referrers_index(self) -> ReferrersIndex:
        from bootseer.storage.oci.referrers_index import ReferrersIndex  # not needed to read

        return ReferrersIndex(self._client)
