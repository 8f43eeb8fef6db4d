"""An image with its traces and hot sets, for the commands that pack, carry over or show them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from bootseer.blockimage import filemap
from bootseer.blockimage.filemap import FileMap
from bootseer.blockimage.serve.image_server import KEEP_FREE
from bootseer.blocks import table as tables
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.table import TableSource
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError
from bootseer.imageprefetch.block_image_repo import (
    META_LIMIT_BYTES,
    TABLE_LIMIT_BYTES,
    fetch_manifest,
    find_block_image,
    unpack_metadata,
)
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.carry_over import CarriedTrace, carry
from bootseer.imageprefetch.hotset.store import BuiltHotSet, HotSets, PackInput
from bootseer.imageprefetch.image_cache import BLOCKS, ImageCache
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import Descriptor, Manifest
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Progress, Repository
from bootseer.storage.options import DEFAULTS, StoreOptions

CACHE_LIMIT_BYTES = 64 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedImage:
    """A stock image with a block image, within `open_image`; `parts` is what packing needs.

    `digest` is the stock image's manifest for this machine's platform.
    """

    ref: str
    repository: Repository
    subject: Descriptor
    parts: PackInput
    cache: ImageCache

    @property
    def digest(self) -> str:
        return self.subject.digest

    @property
    def traces(self) -> TraceStore:
        """This node's traces of the image's starts."""
        return TraceStore(self.cache.trace_folder(self.digest))

    @property
    def hot_sets(self) -> HotSets:
        """The hot sets that were built for the image on this node by command."""
        return HotSets(self.cache.hot_set_folder(self.digest))

    def trace(self, workload: str = "") -> Trace | None:
        """A workload's trace: this node's and the published one, merged; None without any.

        Traces of other bytes, and damaged ones, are left out.
        """
        own, published = self.own_trace(workload), self._published_trace(workload)
        return merge_published(own, published, self._if_usable(self.traces.read_pushed(workload)))

    def own_trace(self, workload: str = "") -> Trace | None:
        """This node's trace alone."""
        with contextlib.suppress(CorruptDataError):
            return self._if_usable(self.traces.load(workload))
        return None

    def find_unpublished_share(self, workload: str = "") -> float:
        """Of what this node's starts touched, the share (0 to 1) that no published trace has."""
        own, published = self.own_trace(workload), self._published_trace(workload)
        if own is None or not own.extents:
            return 0.0
        if published is None:
            return 1.0
        added_bytes = traces.merge([published, own]).touched_bytes() - published.touched_bytes()
        return added_bytes / own.touched_bytes()

    def _published_trace(self, workload: str) -> Trace | None:
        for _, hot in store.list_published(self.repository, self.digest, self.parts.block_image):
            if hot.workload == workload:
                with contextlib.suppress(CorruptDataError, NotFoundError):
                    return self._if_usable(store.fetch_trace(self.repository, hot))
                break
        return None

    def _if_usable(self, trace: Trace | None) -> Trace | None:
        return trace if trace is not None and trace.object == self.parts.source.key else None

    def publish(self, built: BuiltHotSet, *, progress: Progress | None = None) -> BuiltHotSet:
        """Push a hot set and note what of this node's trace it holds; returns it as published.

        Raises what the registry and the disk raise.
        """
        pushed = store.push(self.repository, built, progress=progress)
        if built.own_bytes:
            self.traces.keep_pushed(traces.parse(built.own_bytes, name="the trace of a hot set"))
        return pushed

    def keep_trace(self, trace: Trace) -> None:
        """Keep a trace that contains `trace()` as this node's."""
        published = self._published_trace(trace.workload)
        self.traces.replace(trace)
        if published is not None and traces.covers(trace, published):
            self.traces.keep_pushed(published)

    def workloads(self) -> list[str]:
        """Every workload with a trace here or a published hot set, sorted."""
        published = store.list_published(self.repository, self.digest, self.parts.block_image)
        return sorted({*self.traces.workloads(), *(hot.workload for _, hot in published)})


def merge_published(
    own: Trace | None, published: Trace | None, pushed: Trace | None = None
) -> Trace | None:
    """This node's trace and the published one as one.

    Starts of this node that are in the published trace are not counted twice: `pushed` is this
    node's trace when it was published. Where the published trace does not contain that (any more),
    or nothing is known, a trace that adds nothing to the other is left out.
    """
    if own is None or published is None:
        return own or published
    if traces.covers(own, published):
        return own
    if pushed and traces.covers(own, pushed) and traces.covers(published, pushed):
        own = traces.without(own, pushed)
        return traces.merge([published, own]) if own.extents or own.starts else published
    return published if traces.covers(published, own) else traces.merge([own, published])


def add_carried(own: Trace | None, carried: Trace) -> Trace:
    """An image's trace with the one carried over from an older image, unless it has that."""
    if own is None:
        return carried
    return own if traces.covers(own, carried) else traces.merge([own, carried])


@contextlib.contextmanager
def open_image(
    ref: str,
    cache: str,
    *,
    options: StoreOptions = DEFAULTS,
    plain_http: bool | None = None,
    push: bool = False,
) -> Iterator[RecordedImage]:
    """Open a stock image's block image, file map included.

    Raises NotFoundError when it has none, and what the registry raises.
    """
    repository, reference = open_repository(ref, options, plain_http=plain_http, push=push)
    with repository:
        subject, _ = repository.image(reference.version)
        block = find_block_image(repository, repository.referrers(subject.digest))
        if block is None:
            raise NotFoundError(
                f"{ref} has no block image yet; run `bootseer image build {ref}` first"
            )
        image_cache = ImageCache(cache)
        parts = _read_parts(repository, image_cache, subject, block)
        yield RecordedImage(ref, repository, subject, parts, image_cache)


def _read_parts(
    repository: Repository, cache: ImageCache, subject: Descriptor, block: Descriptor
) -> PackInput:
    manifest = fetch_manifest(repository, block.digest)
    meta = _layer(manifest, media_types.META)
    table = _layer(manifest, media_types.TABLE)
    files = _layer(manifest, media_types.FILES)

    def read_blob(kind: str, blob: Descriptor, limit_bytes: int) -> bytes:
        kept = cache.read(subject.digest, kind, blob.digest)
        if kept is not None:
            return kept
        data = repository.blob(blob, limit_bytes=limit_bytes)
        with contextlib.suppress(BootseerError):  # the cache may be full
            cache.keep(subject.digest, kind, blob.digest, data)
        return data

    table_bytes = read_blob("table", table, TABLE_LIMIT_BYTES)
    source = TableSource(
        tables.parse(table_bytes),
        repository.store,
        _layer(manifest, media_types.DATA).digest,
        source_class="image",
    )
    return PackInput(
        meta=unpack_metadata(repository.blob(meta, limit_bytes=META_LIMIT_BYTES)),
        table=table_bytes,
        files=_parse_files(
            read_blob("files", files, filemap.LIMITS.packed_bytes), source.size_bytes
        ),
        source=source,
        block_image=block.digest,
        subject=subject,
    )


def _layer(manifest: Manifest, kind: str) -> Descriptor:
    layer = manifest.layer(kind)
    if layer is None:
        raise CorruptDataError(f"the block image lacks {kind}; build it again")
    return layer


def _parse_files(packed: bytes, data_bytes: int) -> FileMap:
    files = filemap.parse(packed)
    if files.data_bytes != data_bytes:
        raise CorruptDataError("the file map is of other data than the block table; build it again")
    return files


def carry_from(image: RecordedImage, old: RecordedImage, workload: str = "") -> CarriedTrace:
    """The trace of an older image, for this one. Raises UsageError when it has none."""
    trace = old.trace(workload)
    if trace is None:
        raise UsageError(
            f"{old.ref} has neither a trace nor a hot set of workload {workload!r}; record it first"
        )
    return carry(trace, old.parts.files, image.parts.files, image.parts.source.key)


@contextlib.contextmanager
def open_fetcher(cache: str, limit_bytes: int = CACHE_LIMIT_BYTES) -> Iterator[Fetcher]:
    """A fetcher that keeps blocks in this node's cache."""
    with (
        NodeCache.at(os.path.join(cache, BLOCKS), limit_bytes, keep_free=KEEP_FREE) as node_cache,
        Fetcher(cache=node_cache) as fetcher,
    ):
        yield fetcher
