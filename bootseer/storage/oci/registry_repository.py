"""A repository of a registry."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from bootseer.context_managers import Closing
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.http.responses import Target, resolve
from bootseer.storage.oci.manifest import (
    ACCEPT,
    INDEX_TYPES,
    LIMIT_BYTES,
    OCI_INDEX,
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_bytes,
    digest_of,
    parse_manifest,
    parse_object,
)
from bootseer.storage.oci.platforms import choose_platform, this_platform
from bootseer.storage.oci.reference import DIGEST, Reference, check_digest, check_version
from bootseer.storage.oci.referrers import (
    changed_without,
    describe,
    fallback_tag,
    subject_of,
    wanted,
    with_referrer,
    without_referrer,
)
from bootseer.storage.oci.registry.blob_stream import RemoteStream
from bootseer.storage.oci.registry.blobs import BlobStore
from bootseer.storage.oci.registry.challenge import delete_scope
from bootseer.storage.oci.registry.mirrors import PULL, RESOLVE, Endpoint
from bootseer.storage.oci.registry.registry_client import Client, links
from bootseer.storage.oci.repository import Progress
from bootseer.storage.options import StoreOptions
from bootseer.storage.retry import retrying
from bootseer.storage.store import Store
from bootseer.system.lru import put_youngest
from bootseer.system.randomness import CHANCE

if TYPE_CHECKING:
    from bootseer.storage.oci.registry.upload import Uploader

KNOWN_MANIFESTS = 64
MOST_PAGES = 1000
TRIES = 20  # of writing an index that others write too
SETTLE_S = 0.05
PUT_RETRY_S = 10.0
HALF_WRITTEN = ("MANIFEST_BLOB_UNKNOWN", "DIGEST_INVALID")
"""What registries say of a manifest for the moment in which two push one of its blobs."""
DELETES_NOTHING = frozenset((400, 405, 501))
SURELY_DELETED = 6  # tries, seconds in all: a registry's copies may lag
MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
SURE = 2  # an entry that was there so often in a row is not lost any more


class RegistryRepository(Closing):
    """`Repository` over HTTP; any number of threads may use it."""

    def __init__(
        self,
        reference: Reference,
        options: StoreOptions,
        *,
        plain_http: bool | None = None,
        push: bool = False,
    ) -> None:
        self._reference = Reference(reference.host, reference.repository)
        self._client = Client(self._reference, options, plain_http=plain_http, push=push)
        self._blobs = BlobStore(self._client)
        self._uploader: Uploader | None = None
        self._retry_s = options.retry_s
        self._lock = threading.Lock()
        self._known: dict[str, tuple[bytes, str]] = {}
        self._has_referrers_api: dict[Endpoint, bool] = {}
        self.plain_http = not self._client.own.origin.tls
        """Whether the registry itself is asked without TLS."""

    def __repr__(self) -> str:
        return f"RegistryRepository({self._reference.place!r})"

    @property
    def reference(self) -> Reference:
        return self._reference

    @property
    def _uploads(self) -> Uploader:
        from bootseer.storage.oci.registry.upload import (
            Uploader,  # who only reads shall not wait for it
        )

        if self._uploader is None:
            self._uploader = Uploader(self._client)
        return self._uploader

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
        if descriptor.size_bytes > limit_bytes:
            raise CorruptDataError(
                f"{descriptor.digest} in {self._reference.place} has {descriptor.size_bytes}"
                f" bytes, more than the {limit_bytes} it may have"
            )
        return self._blobs.read(descriptor.digest, limit_bytes=limit_bytes)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> RemoteStream:
        return self._blobs.stream(digest, offset, verify=verify)

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        found: list[Descriptor] = []

        def ask(endpoint: Endpoint) -> list[Descriptor]:
            listed = self._referrers_at(endpoint, digest, artifact_type)
            if not listed and endpoint.is_mirror:
                raise NotFoundError(f"{endpoint.authority} knows no referrers of {digest}")
            return listed

        try:
            found = retrying(lambda: self._client.from_any(ask, RESOLVE), retry_s=self._retry_s)
        except NotFoundError:
            return []
        return wanted(found, artifact_type)

    def has_blob(self, digest: str) -> bool:
        return self._uploads.has(digest)

    def push_blob(
        self,
        source: str | bytes,
        digest: str,
        size_bytes: int,
        *,
        mount_from: str = "",
        progress: Progress | None = None,
    ) -> bool:
        from bootseer.storage.oci.registry.upload import Source

        return self._uploads.push(Source(source, digest, size_bytes), mount_from, progress)

    def push_manifest(self, raw: bytes, media_type: str, tag: str = "") -> Descriptor:
        made = describe(raw, media_type)
        subject = subject_of(parse_manifest(raw, media_type))
        for version in dict.fromkeys((made.digest, tag or made.digest)):
            knows_subject = self._put_manifest(raw, media_type, check_version(version))
        if subject and not knows_subject:
            self._add_referrer(subject, made)
        return made

    def delete_referrer(self, subject: str, digest: str) -> None:
        what = f"delete {digest} of {self._reference.place}"
        endpoint = self._client.own
        target = endpoint.target(f"manifests/{check_digest(digest)}")
        also = (delete_scope(endpoint.repository),)

        def ask() -> None:
            with self._client.send(
                endpoint, "DELETE", target, {}, self._client.attempt(), what, also=also
            ) as exchange:
                if exchange.status in DELETES_NOTHING:
                    raise NotSupportedError(
                        f"cannot {what}: the registry deletes nothing; have its owner allow it, or "
                        "delete it by the registry's own means"
                    )
                if exchange.status not in (200, 202, 204, 404):
                    raise self._client.error(exchange, what)

        retrying(ask, retry_s=self._retry_s)
        with self._lock:
            self._known.pop(digest, None)
        if self._listed_under(fallback_tag(subject), what):
            self._change_referrers(
                subject, lambda known: without_referrer(known, digest), f"finish: {what}"
            )

    def tags(self) -> list[str]:
        what = f"list the tags of {self._reference.place}"

        def ask() -> list[str]:
            endpoint = self._client.own
            found: set[str] = set()
            target = endpoint.target("tags/list", "n=1000")
            for _ in range(MOST_PAGES):
                with self._client.send(
                    endpoint, "GET", target, {}, self._client.attempt(), what
                ) as exchange:
                    if exchange.status != 200:
                        raise self._client.error(exchange, what)
                    page = parse_object(exchange.read_all(LIMIT_BYTES), what)
                    following = next(links(exchange), None)
                found.update(t for t in page.get("tags") or () if isinstance(t, str))
                if following is None:
                    return sorted(found)
                target = resolve(Target(endpoint.origin, target), following, what).request
            raise CorruptDataError(f"cannot {what}: the list has no end")

        return retrying(ask, retry_s=self._retry_s)

    def close(self) -> None:
        self._blobs.close()

    def _fetch(self, version: str, ability: str) -> tuple[bytes, str]:
        """A manifest's checked bytes and media type, which are remembered by digest."""
        what = f"read the manifest {version} of {self._reference.place}"

        def ask(endpoint: Endpoint) -> tuple[bytes, str]:
            return self._manifest_at(endpoint, version, what)

        raw, media_type = retrying(
            lambda: self._client.from_any(ask, ability), retry_s=self._retry_s
        )
        digest = version if DIGEST.fullmatch(version) else digest_of(raw)
        with self._lock:
            put_youngest(self._known, digest, (raw, media_type), KNOWN_MANIFESTS)
        return raw, media_type

    def _manifest_at(self, endpoint: Endpoint, version: str, what: str) -> tuple[bytes, str]:
        attempt, accept = self._client.attempt(), {"Accept": ACCEPT}
        tail = f"manifests/{version}"
        with self._client.open(endpoint, "GET", tail, accept, attempt, what) as exchange:
            if exchange.status != 200:
                raise self._client.error(exchange, what)
            media_type = (exchange.headers.get("Content-Type") or "").partition(";")[0].strip()
            said = (exchange.headers.get("Docker-Content-Digest") or "").strip()
            raw = exchange.read_all(LIMIT_BYTES)
        for digest in {version, said}:
            if DIGEST.fullmatch(digest):
                check_bytes(raw, digest, f"the manifest {version} from {endpoint.authority}")
        # What is no manifest (a proxy's page, say) must not be taken for one, nor be pinned.
        return raw, parse_manifest(raw, media_type, f"the manifest {version}").media_type

    def _referrers_at(
        self, endpoint: Endpoint, digest: str, artifact_type: str
    ) -> list[Descriptor]:
        if self._has_referrers_api.get(endpoint, True):
            listed = self._referrers_by_api(endpoint, digest, artifact_type)
            if listed is not None:
                return listed
        what = f"list the referrers of {digest} in {self._reference.place}"
        try:
            raw, media_type = self._manifest_at(endpoint, fallback_tag(digest), what)
        except NotFoundError:
            return []
        # Not sooner: a registry with the API may refuse it for a repository that is not there yet.
        self._has_referrers_api[endpoint] = False
        parsed = parse_manifest(raw, media_type, f"the referrers of {digest}")
        return list(parsed.manifests) if isinstance(parsed, Index) else []

    def _referrers_by_api(
        self, endpoint: Endpoint, digest: str, artifact_type: str
    ) -> list[Descriptor] | None:
        """All pages of the API's answer; None when there is no such API here."""
        what = f"list the referrers of {digest} in {self._reference.place}"
        query = f"artifactType={quote(artifact_type, safe='')}" if artifact_type else ""
        target = endpoint.target(f"referrers/{digest}", query)
        found: list[Descriptor] = []
        for _ in range(MOST_PAGES):
            with self._client.send(
                endpoint, "GET", target, {"Accept": OCI_INDEX}, self._client.attempt(), what
            ) as exchange:
                kind = (exchange.headers.get("Content-Type") or "").partition(";")[0].strip()
                missing = exchange.status in (400, 404, 405, 501)
                if missing or (exchange.status == 200 and kind not in INDEX_TYPES):
                    return None
                if exchange.status != 200:
                    raise self._client.error(exchange, what)
                page = parse_manifest(exchange.read_all(LIMIT_BYTES), kind, what)
                following = next(links(exchange), None)
            found += page.manifests if isinstance(page, Index) else ()
            if following is None:
                return found
            target = resolve(Target(endpoint.origin, target), following, what).request
        raise CorruptDataError(f"cannot {what}: the list has no end")

    def _put_manifest(self, raw: bytes, media_type: str, version: str) -> bool:
        """Store a manifest; whether the registry took notice of its subject."""
        return retrying(
            lambda: self._put_manifest_once(raw, media_type, version),
            retry_s=min(self._retry_s, PUT_RETRY_S),
        )

    def _put_manifest_once(self, raw: bytes, media_type: str, version: str) -> bool:
        what = f"push the manifest {version} to {self._reference.place}"
        endpoint = self._client.own
        headers = {"Content-Type": media_type}

        with self._client.send(
            endpoint,
            "PUT",
            endpoint.target(f"manifests/{version}"),
            headers,
            self._client.attempt(),
            what,
            body=raw,
        ) as exchange:
            if exchange.status not in (200, 201, 202):
                error = self._client.error(exchange, what)
                if any(code in str(error) for code in HALF_WRITTEN):
                    raise StoreUnavailableError(f"{error}; push its blobs first")
                raise error
            said = (exchange.headers.get("Docker-Content-Digest") or "").strip()
            if said.startswith("sha256:") and said != digest_of(raw):
                raise CorruptDataError(f"cannot {what}: the registry stored other bytes")
            return bool(exchange.headers.get("OCI-Subject"))

    def _add_referrer(self, subject: str, made: Descriptor) -> None:
        what = f"enter a referrer of {subject} in {self._reference.place}"
        self._change_referrers(subject, lambda known: with_referrer(known, made), what, made)

    def _change_referrers(
        self,
        subject: str,
        change: Callable[[Sequence[Descriptor]], bytes | None],
        what: str,
        made: Descriptor | None = None,
    ) -> None:
        """Change a subject's index, which others may be writing at the same time.

        Registries replace a tag without asking what it was, so a change can get lost: it is
        looked for again after as long as another's read and write may take. `change` gives the
        new index, or None when there is nothing to change. That `made` was deleted meanwhile, as
        one too many of its kind, is no fault.
        """
        tag, seen, deleted = fallback_tag(subject), 0, 0
        gone: frozenset[str] = frozenset()
        for tries in range(TRIES):
            began_s = time.monotonic()
            listed = self._listed_under(tag, what)
            changed = changed_without(listed, gone, change)
            if changed is None:
                seen += 1
                if seen == SURE:
                    return
            else:
                seen = 0
                try:
                    # One try: what was read is too old to be written later.
                    self._put_manifest_once(changed, OCI_INDEX, tag)
                    gone, deleted = frozenset(), 0  # somebody may push it again
                except StoreUnavailableError as error:
                    if tries == TRIES - 1:
                        raise
                    if any(code in str(error) for code in HALF_WRITTEN):
                        # Somebody deleted one, and has not taken it out yet or was killed before.
                        gone = self._missing((*listed, made) if made else listed, what)
                        deleted = deleted + 1 if made and made.digest in gone else 0
                        if deleted == SURELY_DELETED:
                            return
            took_s = time.monotonic() - began_s
            time.sleep(CHANCE.uniform(1, 2 + tries) * max(SETTLE_S, 2 * took_s))
        raise StoreUnavailableError(
            f"cannot {what}: others change its index all the time; push again"
        )

    def _missing(self, listed: Sequence[Descriptor], what: str) -> frozenset[str]:
        """Digests of manifests that the registry itself surely has no more."""
        endpoint = self._client.own

        def there(one: Descriptor) -> bool:
            plain = MEDIA_TYPE.fullmatch(one.media_type)  # others wrote it
            accept = {"Accept": f"{one.media_type}, {ACCEPT}" if plain else ACCEPT}
            tail, attempt = f"manifests/{one.digest}", self._client.attempt()
            try:
                with self._client.open(endpoint, "HEAD", tail, accept, attempt, what) as exchange:
                    return exchange.status != 404
            except BootseerError:
                return True

        return frozenset(one.digest for one in listed if not there(one))

    def _listed_under(self, tag: str, what: str) -> tuple[Descriptor, ...]:
        """What the index under a referrers' tag lists at the registry itself."""
        try:
            raw, kind = retrying(
                lambda: self._manifest_at(self._client.own, tag, what), retry_s=self._retry_s
            )
        except NotFoundError:
            return ()
        parsed = parse_manifest(raw, kind, what)
        return parsed.manifests if isinstance(parsed, Index) else ()
