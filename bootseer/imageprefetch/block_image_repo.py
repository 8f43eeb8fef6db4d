"""A block image as whoever packs, carries over or shows hot sets needs it: file map and all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bootseer.blockimage import artifact, filemap
from bootseer.blockimage.filemap import FileMap
from bootseer.blocks import table as tables
from bootseer.blocks.table import TableSource
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError
from bootseer.imageprefetch import block_image_parts
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.carry_over import Carried, carry
from bootseer.imageprefetch.hotset.store import HotSets, ImageParts, Made
from bootseer.imageprefetch.image_cache import LocalStore
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.storage.oci.manifest import Descriptor, Manifest
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Progress, Repository
from bootseer.storage.options import DEFAULTS, StoreOptions

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher

BLOCKS = "blocks"  # the node cache, below the cache directory
CACHE_LIMIT_BYTES = 64 << 30
HOT_SETS = "hotsets"  # folder of an image, beside `traces`


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A stock image with a block image, within `open_image`.

    `digest` is the stock image's manifest for this machine's platform.
    """

    ref: str
    repository: Repository
    subject: Descriptor
    parts: ImageParts
    local: LocalStore

    @property
    def digest(self) -> str:
        return self.subject.digest

    @property
    def traces(self) -> TraceStore:
        """This node's traces of its starts."""
        return TraceStore(self.local.trace_folder(self.digest))

    @property
    def hot_sets(self) -> HotSets:
        """The hot sets that were made for it on this node."""
        return HotSets(f"{self.local.folder_of(self.digest)}/{HOT_SETS}")

    def trace(self, workload: str = "") -> Trace | None:
        """This node's trace of a workload merged with the published one, if there are any.

        Traces of other bytes, and damaged ones, are left out.
        """
        own, published = self.own_trace(workload), self._published_trace(workload)
        return together(own, published, self._usable(self.traces.pushed(workload)))

    def own_trace(self, workload: str = "") -> Trace | None:
        """This node's trace alone."""
        with contextlib.suppress(CorruptDataError):
            return self._usable(self.traces.load(workload))
        return None

    def _published_trace(self, workload: str) -> Trace | None:
        published = store.published(self.repository, self.digest, self.parts.block_image)
        for _, hot in published:
            if hot.workload == workload:
                with contextlib.suppress(CorruptDataError, NotFoundError):
                    return self._usable(store.trace_of(self.repository, hot))
                break
        return None

    def _usable(self, trace: Trace | None) -> Trace | None:
        return trace if trace is not None and trace.object == self.parts.source.key else None

    def publish(self, made: Made, *, progress: Progress | None = None) -> Made:
        """Push a hot set, and note what of this node's trace is in it; returns it as published.

        Raises what the registry and the disk raise.
        """
        done = store.push(self.repository, made, progress=progress)
        if made.own_bytes:
            self.traces.keep_pushed(traces.parse(made.own_bytes, name="the trace of a hot set"))
        return done

    def keep_trace(self, trace: Trace) -> None:
        """Have a trace that `trace()` is in as this node's."""
        published = self._published_trace(trace.workload)
        self.traces.replace(trace)
        if published is not None and traces.covers(trace, published):
            self.traces.keep_pushed(published)

    def workloads(self) -> list[str]:
        """Every workload with a trace here or a published hot set, sorted."""
        names = set(self.traces.workloads())
        found = store.published(self.repository, self.digest, self.parts.block_image)
        return sorted(names | {hot.workload for _, hot in found})


def together(
    own: Trace | None, published: Trace | None, pushed: Trace | None = None
) -> Trace | None:
    """This node's trace and the published one as one.

    What was published of this node's own starts is not counted twice: `pushed` is what its trace
    was then, and where the published one does not hold that (any more), or nothing is known, one
    that says nothing more than the other is left out.
    """
    if own is None or published is None:
        return own or published
    if traces.covers(own, published):
        return own
    if pushed and traces.covers(own, pushed) and traces.covers(published, pushed):
        own = traces.without(own, pushed)
        return store.merged([published, own]) if own.extents or own.starts else published
    return published if traces.covers(published, own) else store.merged([own, published])


def with_carried(own: Trace | None, carried: Trace) -> Trace:
    """What is known of an image, with an older one's trace, if that is not in it already."""
    if own is None:
        return carried
    return own if traces.covers(own, carried) else store.merged([own, carried])


def rename(trace: Trace, workload: str) -> Trace:
    """The same trace, as that of another workload."""
    return dataclasses.replace(trace, workload=workload)


@contextlib.contextmanager
def open_image(
    ref: str,
    cache: str,
    *,
    options: StoreOptions = DEFAULTS,
    plain_http: bool | None = None,
    push: bool = False,
) -> Iterator[Image]:
    """Open a stock image's block image, file map included.

    Raises NotFoundError when it has none, and what the registry raises.
    """
    repository, reference = open_repository(ref, options, plain_http=plain_http, push=push)
    with repository:
        subject, _ = repository.image(reference.version)
        block = block_image_parts.block_image_of(repository, repository.referrers(subject.digest))
        if block is None:
            raise NotFoundError(
                f"{ref} has no block image yet; run `bootseer image build {ref}` first"
            )
        local = LocalStore(cache)
        parts = _parts(repository, local, subject, block)
        yield Image(ref, repository, subject, parts, local)


def _parts(
    repository: Repository, local: LocalStore, subject: Descriptor, block: Descriptor
) -> ImageParts:
    manifest = block_image_parts.manifest_of(repository, block.digest)
    found = [_layer(manifest, kind) for kind in (artifact.META, artifact.TABLE, artifact.FILES)]
    meta, table, files = found

    def blob(kind: str, one: Descriptor, limit_bytes: int) -> bytes:
        kept = local.has(subject.digest, kind, one.digest)
        if kept is not None:
            return kept
        data = repository.blob(one, limit_bytes=limit_bytes)
        with contextlib.suppress(BootseerError):  # a full cache keeps nobody from the file map
            local.keep(subject.digest, kind, one.digest, data)
        return data

    table_bytes = blob("table", table, block_image_parts.TABLE_LIMIT_BYTES)
    source = TableSource(
        tables.parse(table_bytes),
        repository.store,
        _layer(manifest, artifact.DATA).digest,
        source_class="image",
    )
    return ImageParts(
        meta=block_image_parts.unpacked(
            repository.blob(meta, limit_bytes=block_image_parts.META_LIMIT_BYTES)
        ),
        table=table_bytes,
        files=_files(blob("files", files, filemap.LIMITS.packed_bytes), source.size_bytes),
        source=source,
        block_image=block.digest,
        subject=subject,
    )


def _layer(manifest: Manifest, kind: str) -> Descriptor:
    found = manifest.layer(kind)
    if found is None:
        raise CorruptDataError(f"the block image lacks {kind}; build it again")
    return found


def _files(packed: bytes, data_bytes: int) -> FileMap:
    files = filemap.parse(packed)
    if files.data_bytes != data_bytes:
        raise CorruptDataError("the file map is of other data than the block table; build it again")
    return files


def carried_from(image: Image, old: Image, workload: str = "") -> Carried:
    """The trace of an older image's starts, for this one. Raises UsageError when it has none."""
    trace = old.trace(workload)
    if trace is None:
        raise UsageError(
            f"{old.ref} has neither a trace nor a hot set of workload {workload!r}; record it first"
        )
    return carry(trace, old.parts.files, image.parts.files, image.parts.source.key)


@contextlib.contextmanager
def fetching(cache: str, limit_bytes: int = CACHE_LIMIT_BYTES) -> Iterator[Fetcher]:
    """A fetcher that keeps blocks in this node's cache."""
    from bootseer.blockimage.serve.image_server import KEEP_FREE
    from bootseer.blocks.cache.node_cache import NodeCache
    from bootseer.blocks.fetch.fetcher import Fetcher

    with (
        NodeCache(os.path.join(cache, BLOCKS), limit_bytes, keep_free=KEEP_FREE) as kept,
        Fetcher(cache=kept) as fetcher,
    ):
        yield fetcher
