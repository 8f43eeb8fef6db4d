"""From an image's name to its block image and hot set, in few round trips.

The registry is asked for the name's digest, its referrers, the manifests of block image and hot
set, and then for the pack, whose one stream brings everything that a mount needs. What this node
has in its cache is not fetched again; while the registry is away, it is mounted as it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.pack_format import Boot
from bootseer.blockimage.serve.opened_image import BlockImage, FrameStream
from bootseer.blocks.table import TableSource, identity_of_table, parse
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.imageprefetch.block_image_repo import (
    META_LIMIT_BYTES,
    TABLE_LIMIT_BYTES,
    BlockImageBlobs,
    blobs_of,
    check_boot,
    fetch_manifest,
    find_block_image,
    unpack_metadata,
)
from bootseer.imageprefetch.image_cache import (
    CachedFrames,
    CachingFrames,
    ImageCache,
    KeptImage,
    KeptPack,
)
from bootseer.imageprefetch.resolve.deadline import BackgroundCall, BoundedRepository, FirstLook
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.manifest import digest_of
from bootseer.storage.oci.reference import Reference, parse_reference
from bootseer.storage.options import DEFAULTS, StoreOptions

if TYPE_CHECKING:
    from _socket import socket

    from bootseer.blocks.source import BlockSource
    from bootseer.imageprefetch.resolve.helped_repository import HelpedRepository
    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Repository, RepositoryReader

HURRIED_S = 3.0  # the limit of the registry when the cache has everything
LOOK_S = 120.0  # the registry's limit for everything that a mount needs
CONFIG_LOOK_S = 5.0  # for the config, which may say that the image is for other machines
CONFIG_S = 0.25  # of that, once everything else has been answered
_AWAY = (StoreUnavailableError, DeadlineError, AccessDeniedError)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image ready to be mounted. `block_image` is the digest of the block image's manifest.

    - `key` gives the name of its data in traces; the first call parses the block table.
    - `hot_set` is the digest of the pack that is replayed, "" for none.
    - `fetched_bytes` is what the registry sent for the mount itself; `offline`: it was away.
    - `published`: this workload has a hot set in the registry, as far as that could be asked.
    - `keep` writes to the cache what was fetched.
    """

    digest: str
    block_image: str
    image: BlockImage
    key: Callable[[], str]
    hot_set: str
    hot_bytes: int
    fetched_bytes: int
    offline: bool
    published: bool
    keep: Callable[[], None]


class Resolver:
    """Resolves one image's name; `begin` makes one. `note` gets every choice that is not usual.

    - `spare_meta` is a file for metadata that the cache cannot take.
    - `pinned` is the digest that the name had before, "" for none; a digest may be an index's, of
      which only this machine's image is kept.
    - `options` are for what the mount itself asks of the registry, `patient` for its reads later.
    - `helper` is the link of a registry helper, which has asked for everything already.
    - `look_s` limits all requests before the mount, from `look_begun_s` on: see `deadline`.
    - Unless `platform_known`, only an image for this machine's platform is opened.
    """

    def __init__(
        self,
        ref: str,
        reference: Reference,
        cache: ImageCache,
        *,
        pinned: str,
        workload: str,
        options: StoreOptions,
        patient: StoreOptions,
        plain_http: bool | None,
        look_s: float,
        look_begun_s: float,
        spare_meta: str,
        note: Note,
        helper: socket | None,
        platform_known: bool,
    ) -> None:
        self._ref, self._reference, self._cache = ref, reference, cache
        self._pinned, self._workload, self._note = pinned, workload, note
        self._options, self._patient, self._plain_http = options, patient, plain_http
        self._spare_meta, self._platform_known = spare_meta, platform_known
        self._fetched_bytes = 0
        self._unbounded: RepositoryReader | None = None
        self._opening = threading.Lock()
        self._helped: HelpedRepository | None = None
        self._alone: tuple[Descriptor, Manifest] | None = None  # an image that no index named
        self._offline = False
        self._is_newest = True  # what is opened, of all that the registry has
        self._published = True  # until the registry says otherwise
        self.look = FirstLook(ref, look_s, self._give_up, begun_s=look_begun_s)
        self.repository: RepositoryReader = BoundedRepository(self._own_repository, self.look)
        """Where the image is; opened at its first use."""
        if helper is not None:
            from bootseer.imageprefetch.resolve.helped_repository import HelpedRepository

            self._unbounded = self._helped = HelpedRepository(helper, self._open_repository)

    @classmethod
    def begin(
        cls,
        ref: str,
        cache: ImageCache,
        *,
        workload: str = "",
        options: StoreOptions = DEFAULTS,
        plain_http: bool | None = None,
        look_s: float = LOOK_S,
        look_begun_s: float = 0.0,
        spare_meta: str,
        note: Note,
        helper: socket | None = None,
        platform_known: bool = False,
    ) -> Resolver:
        """Begin to resolve a name; the registry gets less time where the cache has everything."""
        reference = parse_reference(ref)
        pinned = cache.read_pin(reference.name) or reference.digest
        patient = options
        if pinned and cache.image(pinned) is not None:
            options = dataclasses.replace(
                options,
                connect_s=min(options.connect_s, HURRIED_S),
                stall_s=min(options.stall_s, HURRIED_S),
                retry_s=min(options.retry_s, HURRIED_S),
            )
            look_s = min(look_s, HURRIED_S)
        return cls(
            ref,
            reference,
            cache,
            pinned=pinned,
            workload=workload,
            options=options,
            patient=patient,
            plain_http=plain_http,
            look_s=look_s,
            look_begun_s=look_begun_s,
            spare_meta=spare_meta,
            note=note,
            helper=helper,
            platform_known=platform_known,
        )

    def _open_repository(self) -> Repository:
        from bootseer.storage.oci.open import open_repository

        return open_repository(self._ref, self._options, plain_http=self._plain_http)[0]

    def _own_repository(self) -> RepositoryReader:
        with self._opening:
            if self._unbounded is None:
                self._unbounded = self._open_repository()
            return self._unbounded

    def _give_up(self) -> None:
        """End the helper, for which another thread may be waiting."""
        if self._helped is not None:
            self._helped.cut()

    def dismiss_helper(self) -> None:
        """Ask the helper, if there is one, for nothing more; a stream of it goes on."""
        if self._helped is not None:
            self._helped.dismiss()

    def digest(self) -> str:
        """The digest of the image for this machine. Raises as `Repository.image`.

        When the registry cannot be reached, the digest that the name had before.
        """
        try:
            image, manifest = self.repository.image(self._reference.version)
            if not self._platform_known:
                self._alone = image, manifest
            return image.digest
        except _AWAY as error:
            if not self._pinned or self._cache.image(self._pinned) is None:
                raise
            self._offline = True
            self._note(f"mounted from this node's cache: {error}")
            return self._pinned

    def open(self, digest: str, block_image: str = "") -> ResolvedImage:
        """Fetch what the cache lacks. Raises NotFoundError for an image without a block image.

        `block_image`: take this one, even if there is a newer one.
        """
        self._cache.mark_used(digest)  # before anything is read: it must not expire meanwhile
        self._is_newest = not block_image
        if not self._offline:
            try:
                return self._from_registry(digest, block_image)
            except _AWAY as error:
                if self._cached_image(digest, block_image) is None:
                    raise
                image = self.open_kept(digest, block_image)
                self._note(f"mounted from this node's cache: {error}")
                return image
        return self.open_kept(digest, block_image)

    def open_kept(self, digest: str, block_image: str) -> ResolvedImage:
        """`open` without the registry. Raises StoreUnavailableError where that is impossible."""
        kept = self._cached_image(digest, block_image)
        if kept is None:
            raise StoreUnavailableError(f"{self._ref} is not kept here, and its registry is gone")
        self._offline = True
        try:
            return self._from_cache(digest, kept)
        except BootseerError:  # the registry has what the cache lacks, once it is back
            self._offline = False
            raise

    def _cached_image(self, digest: str, block_image: str) -> KeptImage | None:
        kept = self._cache.image(digest)
        return kept if kept is not None and block_image in ("", kept.block_image) else None

    # --- with the registry -----------------------------------------------------------------

    def _from_registry(self, digest: str, wanted: str) -> ResolvedImage:
        config = self._request_config()
        referrers = self.repository.referrers(digest)
        newest = None if wanted else find_block_image(self.repository, referrers)
        block = wanted or (newest.digest if newest is not None else "")
        if not block:
            raise NotFoundError(
                f"{self._ref} has no block image yet; run `bootseer image build {self._ref}` "
                "first, or pull it the plain way"
            )
        if block != wanted and block == self._cache.find_condemned(digest):
            raise CorruptDataError(
                f"the block image of {self._ref} gave wrong bytes within the last hour, so it is "
                f"not mounted; pull the image the plain way, and have {block} deleted from the "
                "registry, whose storage is damaged, before it is built again"
            )
        fetch = BackgroundCall.start(lambda: fetch_manifest(self.repository, block))
        try:
            hot = self._choose_hot_set(referrers, digest, block)
        finally:
            manifest = fetch.result()
        self._check_platform(config)
        blobs = blobs_of(manifest, block)
        self._published = hot is not None and hot.workload == self._workload
        if hot is not None and not self._has_better(digest, block, hot):
            try:
                return self._with_pack(digest, blobs, hot)
            except BootseerError as error:
                self._do_without_hot_set(error, digest, block)
        return self._without_pack(digest, blobs)

    def _request_config(self) -> BackgroundCall[bytes] | None:
        """Fetch the image's config in the background, where the helper does not."""
        if self._alone is None or self._alone[0].platform is not None:
            return None
        if self._helped is not None and self._helped.answers:
            return None
        return BackgroundCall.start(self._fetch_config)

    def _fetch_config(self) -> bytes:
        assert self._alone is not None
        image, manifest = self._alone
        raw = self._cache.config(image.digest)
        if raw is not None:
            return raw
        # A look of its own: the mount's goes on when this one is given up.
        look = FirstLook(self._ref, CONFIG_LOOK_S, lambda: None)
        repository = BoundedRepository(self._own_repository, look)
        return self._cache.fetch_config(repository, image, manifest)

    def _await_config(self, config: BackgroundCall[bytes] | None) -> bytes | None:
        """The config, if it comes about as soon as everything else; a mount can do without it."""
        with contextlib.suppress(Exception):
            if config is None and self._helped is not None and self._alone is not None:
                raw = self._helped.config(self._alone[1].config.digest)
                if raw is not None or self._helped.answers:
                    return raw
                config = self._request_config()  # the helper has ended meanwhile
            if config is not None:
                return config.result(CONFIG_S)
        return None

    def _check_platform(self, config: BackgroundCall[bytes] | None) -> None:
        """Raise NotSupportedError for an image of another platform that no index named."""
        if self._alone is None:
            return
        platform = self._alone[0].platform
        if platform is not None:
            from bootseer.storage.oci.platforms import check_alone

            check_alone(platform, self._ref)
            return
        from bootseer.storage.oci.config import check_platform_of

        raw = self._await_config(config)
        if raw is not None:
            with contextlib.suppress(CorruptDataError):  # then its platform is unknown
                check_platform_of(raw, self._ref)

    def _choose_hot_set(
        self, referrers: Sequence[Descriptor], digest: str, block_image: str
    ) -> hotset_manifest.HotSet | None:
        workload = self._workload
        try:
            chosen = hotset_manifest.choose(self.repository, referrers, block_image, workload)
        except BootseerError as error:
            self._do_without_hot_set(error, digest, block_image)
            return None
        return chosen[1] if chosen is not None else None

    def _do_without_hot_set(self, error: BootseerError, digest: str, block_image: str) -> None:
        """Go on without the registry's hot set; raise `error` where the cache may have one."""
        is_kept = isinstance(error, _AWAY) and self._cached_image(digest, block_image) is not None
        if is_kept or self.look.given_up:
            raise error
        self._note(f"the hot set is not used: {error}")

    def _has_better(self, digest: str, block_image: str, hot: hotset_manifest.HotSet) -> bool:
        """Whether this node has a hot set that fits better than the published one."""
        kept = self._cache.image(digest)
        if kept is None or kept.block_image != block_image:
            return False
        from bootseer.imageprefetch.hotset import local_hotsets  # nothing is kept on a new node

        own = local_hotsets.find(self._cache, digest, self._workload, block_image)
        if own is None or own.pack.digest == hot.pack.digest:
            return False
        newer = hotset_manifest.age(own.created) > hotset_manifest.age(hot.created)
        return hot.workload != self._workload or (own.by_hand and newer)

    def _with_pack(
        self, digest: str, blobs: BlockImageBlobs, hot: hotset_manifest.HotSet
    ) -> ResolvedImage:
        pack = KeptPack(hot.pack.digest, hot.pack.size_bytes, hot.boot_length, hot.boot_digest)
        path = self._cache.path(digest, "pack", pack.digest)
        with contextlib.suppress(OSError, CorruptDataError):
            cached = CachedFrames.open(path, pack)
            try:
                boot = check_boot(cached.boot(pack), pack.boot_digest)
                return self._with_boot(digest, blobs, boot, pack, cached, hot.workload)
            except CorruptDataError:
                cached.close()
                os.unlink(path)
                raise
        with contextlib.ExitStack() as stack:  # left open once the caller has the frames
            stream = self.repository.stream(pack.digest, verify=False)
            stack.callback(stream.close)
            what = f"read the hot set {pack.digest}"
            stored = self.look.read(stream, pack.boot_length, what, whole=False)
            self._fetched_bytes += len(stored)
            boot = check_boot(stored, pack.boot_digest)
            frames = CachingFrames.begin(stream, path, bytes(stored), pack)
            stack.callback(frames.close)
            image = self._with_boot(digest, blobs, boot, pack, frames, hot.workload)
            stack.pop_all()
            return image

    def _with_boot(
        self,
        digest: str,
        blobs: BlockImageBlobs,
        boot: Boot,
        pack: KeptPack,
        frames: FrameStream,
        workload: str,
    ) -> ResolvedImage:
        table = bytes(boot.table)
        if digest_of(table) != blobs.table.digest:
            raise CorruptDataError("the hot set was made for another block image; build it again")
        meta = digest_of(boot.meta)
        kept = KeptImage(blobs.block_image, blobs.data, boot.data_bytes, meta, blobs.table.digest)
        path = self._write_meta(digest, meta, boot.meta)
        packs = {workload: pack}
        return self._make_resolved(
            digest, kept, path, table, boot=boot, pack=pack, frames=frames, packs=packs
        )

    def _without_pack(self, digest: str, blobs: BlockImageBlobs) -> ResolvedImage:
        kept = self._cache.image(digest)
        if kept is not None and kept.block_image == blobs.block_image:
            with contextlib.suppress(CorruptDataError):
                return self._from_cache(digest, dataclasses.replace(kept, packs={}))
        repository = self.repository
        fetch = BackgroundCall.start(
            lambda: repository.blob(blobs.table, limit_bytes=TABLE_LIMIT_BYTES)
        )
        try:
            packed = repository.blob(blobs.meta, limit_bytes=META_LIMIT_BYTES)
        finally:
            table = fetch.result()
        self._fetched_bytes += len(packed) + len(table)
        meta = unpack_metadata(packed)
        path = self._write_meta(digest, digest_of(meta), meta)
        size = parse(table).size_bytes
        kept = KeptImage(blobs.block_image, blobs.data, size, digest_of(meta), blobs.table.digest)
        return self._make_resolved(digest, kept, path, table)

    # --- from the cache --------------------------------------------------------------------

    def _from_cache(self, digest: str, kept: KeptImage) -> ResolvedImage:
        meta = self._cache.read(digest, "meta", kept.meta)
        table = self._cache.read(digest, "table", kept.table)
        if meta is None or table is None:
            raise CorruptDataError(f"what this node keeps of {self._ref} is damaged; fetch it")
        path = self._cache.path(digest, "meta", kept.meta)
        for pack_path, pack in self._cached_packs(digest, kept):
            with contextlib.suppress(OSError, CorruptDataError):
                frames = CachedFrames.open(pack_path, pack)
                boot = check_boot(frames.boot(pack), pack.boot_digest)
                return self._make_resolved(
                    digest, kept, path, table, boot=boot, pack=pack, frames=frames
                )
        return self._make_resolved(digest, kept, path, table)

    def _cached_packs(self, digest: str, kept: KeptImage) -> Iterator[tuple[str, KeptPack]]:
        """The packs that this node can replay, the best first: fetched ones, then its own."""
        from bootseer.imageprefetch.hotset import local_hotsets

        for workload in dict.fromkeys((self._workload, "")):
            pack = kept.packs.get(workload)
            own = local_hotsets.find(self._cache, digest, workload, kept.block_image)
            if pack is not None:
                yield self._cache.path(digest, "pack", pack.digest), pack
            if own is not None:
                yield own.path, own.pack

    # --- common ----------------------------------------------------------------------------

    def _write_meta(self, digest: str, meta: str, data: bytes | memoryview) -> str:
        path = self._cache.path(digest, "meta", meta)
        try:
            if os.stat(path).st_size == len(data) and self._cache.read(digest, "meta", meta):
                return path
        except OSError:
            pass
        try:
            return self._cache.keep(digest, "meta", meta, data)
        except (NoSpaceError, AccessDeniedError) as error:
            self._note(f"the metadata is kept beside the mount: {error}")
            return self._write_spare_meta(data)

    def _write_spare_meta(self, data: bytes | memoryview) -> str:
        path = self._spare_meta
        try:
            with open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            pass  # it belongs to this very mount, and must not change below it
        except OSError as error:
            raise from_os_error(error, f"keep {path}") from error
        return path

    def _make_resolved(
        self,
        digest: str,
        kept: KeptImage,
        meta_path: str,
        table: bytes,
        *,
        boot: Boot | None = None,
        pack: KeptPack | None = None,
        frames: FrameStream | None = None,
        packs: dict[str, KeptPack] | None = None,
    ) -> ResolvedImage:
        sources: list[BlockSource] = []
        lock = threading.Lock()

        def source() -> BlockSource:
            with lock:
                if not sources:
                    sources.append(self._open_source(kept.data, table))
                return sources[0]

        image = BlockImage(
            meta_path=meta_path,
            data_bytes=kept.data_bytes,
            source=source,
            index=boot.index if boot is not None else None,
            frames=frames,
            identity=lambda: identity_of_table(kept.table.partition(":")[2], table),
        )
        return ResolvedImage(
            digest,
            kept.block_image,
            image,
            lambda: source().key,
            pack.digest if pack is not None else "",
            pack.size_bytes - pack.boot_length if pack is not None else 0,
            self._fetched_bytes,
            self._offline,
            self._published,
            lambda: self._keep(digest, kept, table, packs or {}),
        )

    def _open_source(self, data: str, table: bytes) -> BlockSource:
        from bootseer.storage.oci.open import open_repository

        repository = self.repository
        if self._options is not self._patient:  # the hurry was for the mount alone
            repository = open_repository(self._ref, self._patient, plain_http=self._plain_http)[0]
        return TableSource(parse(table), repository.store, data, source_class="image")

    def _keep(
        self, digest: str, kept: KeptImage, table: bytes, fetched: dict[str, KeptPack]
    ) -> None:
        """Write to the cache what was fetched, for a mount without the registry."""
        cache = self._cache
        before = cache.image(digest)
        packs = dict(before.packs) if before and before.block_image == kept.block_image else {}
        kept = dataclasses.replace(kept, packs={**packs, **fetched})
        if not self._offline:
            if cache.read(digest, "table", kept.table) is None:
                cache.keep(digest, "table", kept.table, table)
            cache.keep_image(digest, kept)
            cache.pin(self._reference.name, digest)
            if self._is_newest:
                cache.mark_asked(digest, self._workload)
        cache.mark_used(digest)
        cache.clean(digest, kept)
