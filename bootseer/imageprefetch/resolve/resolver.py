"""From an image's name to its block image and hot set, in few round trips.

The registry is asked first: the name's digest, its referrers, then the manifests of block image
and hot set, then the pack's one stream, which brings all that mounting needs. What this node
keeps already is not fetched again. With the registry gone, what is kept is mounted as it is.
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
from bootseer.imageprefetch.block_image_parts import (
    META_LIMIT_BYTES,
    TABLE_LIMIT_BYTES,
    Asked,
    Parts,
    block_image_of,
    boot_of,
    cached_as,
    digest_of,
    manifest_of,
    table_size,
    unpacked,
)
from bootseer.imageprefetch.image_cache import (
    KeepingFrames,
    KeptFrames,
    KeptImage,
    KeptPack,
    LocalStore,
)
from bootseer.imageprefetch.mount.server_registry import SPARE_META
from bootseer.imageprefetch.resolve.deadline import BoundedRepository, FirstLook
from bootseer.light_dataclasses import dataclass
from bootseer.storage.options import DEFAULTS, StoreOptions

if TYPE_CHECKING:
    from _socket import socket

    from bootseer.blocks.source import BlockSource
    from bootseer.imageprefetch.resolve.helped_repository import HelpedRepository
    from bootseer.storage.oci.manifest import Descriptor, Manifest
    from bootseer.storage.oci.repository import Repository, RepositoryReader

HURRIED_S = 3.0  # how long a registry is waited for when all is here already
LOOK_S = 120.0  # how long it may take to give all that a mount needs
CONFIG_LOOK_S = 5.0  # for the config, which may tell that the image is for other machines
CONFIG_S = 0.25  # of that, once all else has been answered
_GONE = (StoreUnavailableError, DeadlineError, AccessDeniedError)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Opened:
    """An image ready to be mounted. `block_image` is the digest of the block image's manifest.

    `key` names its data as a trace does; asking for it parses the block table. `hot_set` is the
    digest of the pack that is replayed, "" for none; `fetched_bytes` are what the registry sent
    for the mount alone; `offline` says that it was not there. `published`: this very workload has
    a hot set in the registry, as far as it could be asked.
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
    """One image's name, on its way to a mount. `note` hears of every choice that is not usual.

    `scratch` is a directory for metadata that the cache cannot take. `helper` is the link of a
    registry helper, which has asked for all that is needed first. `look_s` bounds all that is
    asked before the mount, from `look_begun_s` on; see `first_look`. Unless its platform is known
    to be right, an image is opened for this machine's alone.
    """

    def __init__(
        self,
        ref: str,
        local: LocalStore,
        *,
        workload: str = "",
        options: StoreOptions = DEFAULTS,
        plain_http: bool | None = None,
        look_s: float = LOOK_S,
        look_begun_s: float = 0.0,
        scratch: str,
        note: Note,
        helper: socket | None = None,
        platform_known: bool = False,
    ) -> None:
        from bootseer.storage.oci.reference import parse_reference

        self._local, self._workload, self._note = local, workload, note
        self._scratch = scratch
        self.reference = parse_reference(ref)
        self._ref, self._options, self._plain_http = ref, options, plain_http
        self._patient = options
        self._fetched_bytes = 0
        self._unbounded: RepositoryReader | None = None
        self._opening = threading.Lock()
        self._helped: HelpedRepository | None = None
        self._platform_known = platform_known
        self._alone: tuple[Descriptor, Manifest] | None = None  # an image that no index named
        self._offline = False
        self._published = True  # until the registry says otherwise
        # a digest may be an index's, of which only this machine's image is kept
        self._pinned = local.pinned(self.reference.name) or self.reference.digest
        if self._pinned and local.image(self._pinned) is not None:
            self._options = dataclasses.replace(
                options,
                connect_s=min(options.connect_s, HURRIED_S),
                stall_s=min(options.stall_s, HURRIED_S),
                retry_s=min(options.retry_s, HURRIED_S),
            )
            look_s = min(look_s, HURRIED_S)
        self.look = FirstLook(ref, look_s, self._give_up, begun_s=look_begun_s)
        self.repository: RepositoryReader = BoundedRepository(self._own_repository, self.look)
        """Where the image is; opened at its first use."""
        if helper is not None:
            from bootseer.imageprefetch.resolve.helped_repository import HelpedRepository

            self._unbounded = self._helped = HelpedRepository(helper, self._open_repository)

    def _open_repository(self) -> Repository:
        from bootseer.storage.oci.open import open_repository

        return open_repository(self._ref, self._options, plain_http=self._plain_http)[0]

    def _own_repository(self) -> RepositoryReader:
        with self._opening:
            if self._unbounded is None:
                self._unbounded = self._open_repository()
            return self._unbounded

    def _give_up(self) -> None:
        """What was asked in vain shall not hold up who dismisses the helper."""
        if self._helped is not None:
            self._helped.cut()

    def dismiss_helper(self) -> None:
        """Nothing more is asked of the helper, if there is one; what it streams goes on."""
        if self._helped is not None:
            self._helped.dismiss()

    def digest(self) -> str:
        """What the name stands for, for this machine. Raises as `Repository.image`.

        A registry that cannot be reached is replaced by what this node knows from earlier.
        """
        try:
            found, manifest = self.repository.image(self.reference.version)
            if not self._platform_known:
                self._alone = found, manifest
            return found.digest
        except _GONE as error:
            if not self._pinned or self._local.image(self._pinned) is None:
                raise
            self._offline = True
            self._note(f"mounted from this node's cache: {error}")
            return self._pinned

    def open(self, digest: str, block_image: str = "") -> Opened:
        """Fetch what is missing. Raises NotFoundError for an image without a block image.

        `block_image`: no other than this one, though there be a newer.
        """
        self._local.used(digest)  # before anything of it is read: who expires must see it
        if not self._offline:
            try:
                return self._from_registry(digest, block_image)
            except _GONE as error:
                if self._kept(digest, block_image) is None:
                    raise
                opened = self.open_kept(digest, block_image)
                self._note(f"mounted from this node's cache: {error}")
                return opened
        return self.open_kept(digest, block_image)

    def open_kept(self, digest: str, block_image: str) -> Opened:
        """`open` without the registry. Raises StoreUnavailableError where that cannot be."""
        kept = self._kept(digest, block_image)
        if kept is None:
            raise StoreUnavailableError(f"{self._ref} is not kept here, and its registry is gone")
        self._offline = True
        try:
            return self._from_here(digest, kept)
        except BootseerError:  # the registry has what is missing here, once it is back
            self._offline = False
            raise

    def _kept(self, digest: str, block_image: str) -> KeptImage | None:
        kept = self._local.image(digest)
        return kept if kept is not None and block_image in ("", kept.block_image) else None

    # --- with the registry -----------------------------------------------------------------

    def _from_registry(self, digest: str, wanted: str) -> Opened:
        config = self._asked_config()
        listed = self.repository.referrers(digest)
        found = None if wanted else block_image_of(self.repository, listed)
        block = wanted or (found.digest if found is not None else "")
        if not block:
            raise NotFoundError(
                f"{self._ref} has no block image yet; run `bootseer image build {self._ref}` "
                "first, or pull it the plain way"
            )
        if block != wanted and block == self._local.condemned(digest):
            raise CorruptDataError(
                f"the block image of {self._ref} gave wrong bytes within the last hour, so it is "
                f"not mounted; pull the image the plain way, and have {block} deleted from the "
                "registry, whose storage is damaged, before it is built again"
            )
        asked = Asked(lambda: manifest_of(self.repository, block))
        try:
            chosen = self._chosen(listed, digest, block)
        finally:
            manifest = asked.result()
        self._check_platform(config)
        parts = Parts.of(manifest, block)
        self._published = chosen is not None and chosen[1].workload == self._workload
        if chosen is not None and not self._has_better(digest, block, chosen[1]):
            try:
                return self._with_pack(digest, parts, chosen[1])
            except BootseerError as error:
                self._do_without(error, digest, block)
        return self._without_pack(digest, parts)

    def _asked_config(self) -> Asked[bytes] | None:
        """The image's config, asked for meanwhile where nobody else does."""
        if self._alone is None or self._alone[0].platform is not None:
            return None
        if self._helped is not None and self._helped.answers:
            return None
        return Asked(self._config)

    def _config(self) -> bytes:
        from bootseer.imageprefetch.run import image_config

        assert self._alone is not None
        image, manifest = self._alone
        raw = image_config.kept(image.digest, self._local)
        if raw is not None:
            return raw
        # A look of its own: where this one is given up, the mount's goes on.
        look = FirstLook(self._ref, CONFIG_LOOK_S, lambda: None)
        repository = BoundedRepository(self._own_repository, look)
        return image_config.fetch_and_keep(repository, image, manifest, self._local)

    def _config_in_time(self, config: Asked[bytes] | None) -> bytes | None:
        """The config, where it comes about as soon as all else; no mount depends on it."""
        with contextlib.suppress(Exception):
            if config is None and self._helped is not None and self._alone is not None:
                told = self._helped.config(self._alone[1].config.digest)
                if told is not None or self._helped.answers:
                    return told
                config = self._asked_config()  # the helper has ended meanwhile
            if config is not None:
                return config.result(CONFIG_S)
        return None

    def _check_platform(self, config: Asked[bytes] | None) -> None:
        """Raise NotSupportedError for another platform's; an index was chosen from by platform."""
        if self._alone is None:
            return
        platform = self._alone[0].platform
        if platform is not None:
            from bootseer.storage.oci.platforms import check_alone

            check_alone(platform, self._ref)
            return
        from bootseer.imageprefetch.run import image_config

        raw = self._config_in_time(config)
        if raw is not None:
            with contextlib.suppress(CorruptDataError):  # it says nothing, then
                image_config.check_machine(raw, self._ref)

    def _chosen(
        self, listed: Sequence[Descriptor], digest: str, block_image: str
    ) -> tuple[Descriptor, hotset_manifest.HotSet] | None:
        try:
            return hotset_manifest.choose(self.repository, listed, block_image, self._workload)
        except BootseerError as error:
            self._do_without(error, digest, block_image)
            return None

    def _do_without(self, error: BootseerError, digest: str, block_image: str) -> None:
        """A hot set that cannot be had costs itself alone, unless this node has kept one."""
        is_kept = isinstance(error, _GONE) and self._kept(digest, block_image) is not None
        if is_kept or self.look.given_up:
            raise error
        self._note(f"the hot set is not used: {error}")

    def _has_better(self, digest: str, block_image: str, hot: hotset_manifest.HotSet) -> bool:
        """Whether this node has made a hot set that fits better than the published one."""
        kept = self._local.image(digest)
        if kept is None or kept.block_image != block_image:
            return False
        from bootseer.imageprefetch.hotset import local_hotsets  # nothing is kept on a new node

        own = local_hotsets.find(self._local, digest, self._workload, block_image)
        if own is None or own.pack.digest == hot.pack.digest:
            return False
        newer = hotset_manifest.age(own.created) > hotset_manifest.age(hot.created)
        return hot.workload != self._workload or (own.by_hand and newer)

    def _with_pack(self, digest: str, parts: Parts, hot: hotset_manifest.HotSet) -> Opened:
        pack = KeptPack(hot.pack.digest, hot.pack.size_bytes, hot.boot_length, hot.boot_digest)
        path = self._local.path(digest, "pack", pack.digest)
        with contextlib.suppress(OSError, CorruptDataError):
            kept = KeptFrames(path, pack)
            try:
                boot = boot_of(kept.boot(pack), pack)
                return self._booted(digest, parts, boot, pack, kept, hot.workload)
            except CorruptDataError:
                kept.close()
                os.unlink(path)
                raise
        with contextlib.ExitStack() as stack:  # left open when who asked has it
            stream = self.repository.stream(pack.digest, verify=False)
            stack.callback(stream.close)
            what = f"read the hot set {pack.digest}"
            stored = self.look.read(stream, pack.boot_length, what, whole=False)
            self._fetched_bytes += len(stored)
            boot = boot_of(stored, pack)
            frames = KeepingFrames(stream, path, bytes(stored), pack)
            stack.callback(frames.close)
            opened = self._booted(digest, parts, boot, pack, frames, hot.workload)
            stack.pop_all()
            return opened

    def _booted(
        self,
        digest: str,
        parts: Parts,
        boot: Boot,
        pack: KeptPack,
        frames: FrameStream,
        workload: str,
    ) -> Opened:
        table = bytes(boot.table)
        if digest_of(table) != parts.table.digest:
            raise CorruptDataError("the hot set was made for another block image; build it again")
        meta = digest_of(boot.meta)
        kept = KeptImage(parts.block_image, parts.data, boot.data_bytes, meta, parts.table.digest)
        path = self._meta_file(digest, meta, boot.meta)
        packs = {workload: pack}
        return self._opened(
            digest, kept, path, table, boot=boot, pack=pack, frames=frames, packs=packs
        )

    def _without_pack(self, digest: str, parts: Parts) -> Opened:
        kept = self._local.image(digest)
        if kept is not None and kept.block_image == parts.block_image:
            with contextlib.suppress(CorruptDataError):
                return self._from_here(digest, dataclasses.replace(kept, packs={}))
        store = self.repository
        asked = Asked(lambda: store.blob(parts.table, limit_bytes=TABLE_LIMIT_BYTES))
        try:
            packed = store.blob(parts.meta, limit_bytes=META_LIMIT_BYTES)
        finally:
            table = asked.result()
        self._fetched_bytes += len(packed) + len(table)
        meta = unpacked(packed)
        path = self._meta_file(digest, digest_of(meta), meta)
        size = table_size(table)
        kept = KeptImage(parts.block_image, parts.data, size, digest_of(meta), parts.table.digest)
        return self._opened(digest, kept, path, table)

    # --- from this node --------------------------------------------------------------------

    def _from_here(self, digest: str, kept: KeptImage) -> Opened:
        meta = self._local.has(digest, "meta", kept.meta)
        table = self._local.has(digest, "table", kept.table)
        if meta is None or table is None:
            raise CorruptDataError(f"what this node keeps of {self._ref} is damaged; fetch it")
        path = self._local.path(digest, "meta", kept.meta)
        for place, pack in self._packs_here(digest, kept):
            with contextlib.suppress(OSError, CorruptDataError):
                frames = KeptFrames(place, pack)
                boot = boot_of(frames.boot(pack), pack)
                return self._opened(digest, kept, path, table, boot=boot, pack=pack, frames=frames)
        return self._opened(digest, kept, path, table)

    def _packs_here(self, digest: str, kept: KeptImage) -> Iterator[tuple[str, KeptPack]]:
        """What this node can replay, the best first: published and fetched, or made here."""
        from bootseer.imageprefetch.hotset import local_hotsets

        for workload in dict.fromkeys((self._workload, "")):
            pack = kept.packs.get(workload)
            own = local_hotsets.find(self._local, digest, workload, kept.block_image)
            if pack is not None:
                yield self._local.path(digest, "pack", pack.digest), pack
            if own is not None:
                yield own.path, own.pack

    # --- common ----------------------------------------------------------------------------

    def _meta_file(self, digest: str, meta: str, data: bytes | memoryview) -> str:
        path = self._local.path(digest, "meta", meta)
        try:
            if os.stat(path).st_size == len(data) and self._local.has(digest, "meta", meta):
                return path
        except OSError:
            pass
        try:
            return self._local.keep(digest, "meta", meta, data)
        except (NoSpaceError, AccessDeniedError) as error:
            self._note(f"the metadata is kept beside the mount: {error}")
            return self._spare_meta_file(data)

    def _spare_meta_file(self, data: bytes | memoryview) -> str:
        # One that is there belongs to this very mount, and must not change below it.
        path = os.path.join(self._scratch, SPARE_META)
        try:
            with open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            pass
        except OSError as error:
            raise from_os_error(error, f"keep {path}") from error
        return path

    def _opened(
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
    ) -> Opened:
        made: list[BlockSource] = []
        lock = threading.Lock()

        def source() -> BlockSource:
            with lock:
                if not made:
                    made.append(self._source(kept.data, table))
                return made[0]

        image = BlockImage(
            meta_path=meta_path,
            data_bytes=kept.data_bytes,
            source=source,
            index=boot.index if boot is not None else None,
            frames=frames,
            identity=lambda: cached_as(kept.table, table),
        )
        return Opened(
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

    def _source(self, data: str, table: bytes) -> BlockSource:
        from bootseer.blocks.table import TableSource, parse
        from bootseer.storage.oci.open import open_repository

        repository = self.repository
        if self._options is not self._patient:  # the hurry was for the mount alone
            repository = open_repository(self._ref, self._patient, plain_http=self._plain_http)[0]
        return TableSource(parse(table), repository.store, data, source_class="image")

    def _keep(
        self, digest: str, kept: KeptImage, table: bytes, fetched: dict[str, KeptPack]
    ) -> None:
        """Write down what was fetched, for a mount without the registry."""
        local = self._local
        before = local.image(digest)
        packs = dict(before.packs) if before and before.block_image == kept.block_image else {}
        kept = dataclasses.replace(kept, packs={**packs, **fetched})
        if not self._offline:
            if local.has(digest, "table", kept.table) is None:
                local.keep(digest, "table", kept.table, table)
            local.keep_image(digest, kept)
            local.pin(self.reference.name, digest)
        local.used(digest)
        local.clean(digest, kept)
