"""Building hot sets from traces, keeping them on this node, and publishing them.

A hot set is packed from one trace and one block image. Packing it again with more starts in the
trace gives a newer one; the block image is never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.blockimage import hotset_manifest
from bootseer.blockimage.filemap import FileMap
from bootseer.blockimage.hotset_manifest import HotSet
from bootseer.blockimage.pack_writer import WHOLE_SHARE, PackInfo, build_pack, owners
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.source import BlockSource
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.replay import Replay
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import CorruptDataError, UsageError, from_os_error
from bootseer.imageprefetch.hotset.local_hotsets import MANIFEST_NAME, PACK_PREFIX, pack_name
from bootseer.imageprefetch.workloads import file_name, workload_of
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import (
    EMPTY_BYTES,
    Descriptor,
    Manifest,
    digest_of,
    parse_manifest,
)
from bootseer.storage.oci.media_types import OCI_MANIFEST
from bootseer.storage.oci.repository import Progress, Repository
from bootseer.system.atomic import Draft, replace_file

LEVEL = 19  # packed once, sent at every start: a tenth fewer bytes than level 9
SHARE = 0.5  # of the starts must have touched what is packed
TRACE_NAME, OWN_NAME = "trace", "own"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackInput:
    """The parts of a block image from which a hot set is packed.

    `block_image` is the digest of its manifest, `subject` the stock image that it refers to.
    """

    meta: bytes
    table: bytes
    files: FileMap
    source: BlockSource
    block_image: str
    subject: Descriptor


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltHotSet:
    """A hot set on this node's disk.

    `own_bytes` is this node's part of its trace, b"" where it had none.
    """

    hot: HotSet
    manifest: bytes
    pack_path: str
    trace_bytes: bytes
    own_bytes: bytes = b""

    @property
    def digest(self) -> str:
        """The digest of its manifest."""
        return digest_of(self.manifest)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "digest": self.digest,
            "workload": self.hot.workload,
            "block_image": self.hot.block_image,
            "starts": self.hot.starts,
            "created": self.hot.created,
            "pack": {"digest": self.hot.pack.digest, "size_bytes": self.hot.pack.size_bytes},
            "manifest": json.loads(self.manifest),
        }


class HotSets:
    """The hot sets of one image in one folder of this node."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _folder_of(self, workload: str) -> Path:
        return self.folder / file_name(workload)

    def workloads(self) -> list[str]:
        """The workloads that have a hot set here, sorted."""
        paths = self.folder.glob(f"*/{MANIFEST_NAME}")
        return sorted(workload_of(path.parent.name) for path in paths)

    def load(self, workload: str = "") -> BuiltHotSet | None:
        """A workload's hot set; None when there is none. Raises CorruptDataError for damage."""
        folder = self._folder_of(workload)
        try:
            raw = (folder / MANIFEST_NAME).read_bytes()
            hot = _parse(raw, str(folder))
            pack = folder / pack_name(hot.pack.digest)
            if pack.stat().st_size != hot.pack.size_bytes:
                raise CorruptDataError(f"the pack {pack} has another size; build it again")
            own = (folder / OWN_NAME).read_bytes() if (folder / OWN_NAME).exists() else b""
            return BuiltHotSet(hot, raw, str(pack), (folder / TRACE_NAME).read_bytes(), own)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"read the hot set in {folder}") from error

    def make(
        self,
        image: PackInput,
        trace: Trace,
        read_raw: Callable[[int, memoryview], None],
        *,
        share: float = SHARE,
        whole_share: float = WHOLE_SHARE,
        level: int = LEVEL,
        own: Trace | None = None,
    ) -> tuple[BuiltHotSet, PackInfo]:
        """Pack a trace, and keep the result in place of its workload's earlier hot set.

        Only what at least `share` of its starts touched is packed; the trace is kept whole. `own`
        is this node's part of it.
        """
        folder = self._folder_of(trace.workload)
        # Normalised as merging does, so that further starts leave the pack unchanged.
        packed = traces.merge([trace], share)
        files = owners(image.files, [(e.offset, e.length) for e in packed.extents])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = Draft(str(folder / PACK_PREFIX), mode=0o644, exact_mode=True)
            with draft.open(), open(draft.fd, "wb", closefd=False) as out:
                info = build_pack(
                    packed,
                    meta=image.meta,
                    table=image.table,
                    key=image.source.key,
                    block_bytes=image.source.block_bytes,
                    files=files,
                    read_raw=read_raw,
                    out=out,
                    whole_share=whole_share,
                    level=level,
                    spool_dir=str(folder),
                )
                out.flush()
                built = _describe(image, trace, info, str(folder / pack_name(info.digest)))
                built = dataclasses.replace(built, own_bytes=traces.serialise(own) if own else b"")
                draft.path = built.pack_path  # named after its contents
                draft.publish_new()
            replace_file(str(folder / TRACE_NAME), built.trace_bytes)
            replace_file(str(folder / OWN_NAME), built.own_bytes)
            replace_file(str(folder / MANIFEST_NAME), built.manifest)
            for old in folder.glob(f"{PACK_PREFIX}*"):
                if str(old) != built.pack_path:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, f"write the hot set in {folder}") from error
        return built, info


def _describe(image: PackInput, trace: Trace, info: PackInfo, pack_path: str) -> BuiltHotSet:
    trace_bytes = traces.serialise(trace)
    hot = HotSet(
        trace.workload,
        image.block_image,
        hotset_manifest.now(),
        trace.starts,
        Descriptor(media_types.PACK, info.digest, info.size_bytes),
        info.boot_length,
        info.boot_digest,
        Descriptor(media_types.TRACE, digest_of(trace_bytes), len(trace_bytes)),
    )
    raw = hotset_manifest.manifest_of(hot, image.subject)
    return BuiltHotSet(_parse(raw, pack_path), raw, pack_path, trace_bytes)


def _parse(raw: bytes, where: str) -> HotSet:
    manifest = parse_manifest(raw, OCI_MANIFEST, f"the hot set in {where}")
    if not isinstance(manifest, Manifest):
        raise CorruptDataError(f"the hot set in {where} is none; build it again")
    return hotset_manifest.parse_manifest(manifest)


def pack(
    sets: HotSets,
    image: PackInput,
    trace: Trace,
    fetcher: Fetcher,
    *,
    share: float = SHARE,
    level: int = LEVEL,
    own: Trace | None = None,
) -> tuple[BuiltHotSet, PackInfo]:
    """As `HotSets.make`, with the bytes read through a fetcher, many blocks at a time.

    Raises UsageError when the trace is not of this image, and what fetching raises.
    """
    if trace.object != image.source.key:
        raise UsageError(
            "the trace is of other bytes than this block image has; carry it over from the image "
            "that it was recorded on"
        )

    def read_raw(offset: int, buffer: memoryview) -> None:
        if fetcher.read_into(image.source, offset, buffer) != len(buffer):
            raise CorruptDataError("the trace reaches behind the image's end; record it again")

    # Many blocks are fetched at a time while they are packed one after the other.
    most = fetcher.settings.memory_bytes // 2
    with Replay(trace.select_hot(share), fetcher, image.source, most_bytes=most):
        return sets.make(image, trace, read_raw, share=share, level=level, own=own)


def push(
    repository: Repository, built: BuiltHotSet, *, progress: Progress | None = None
) -> BuiltHotSet:
    """Publish a hot set with its image, as the newest one; returns it as it was published.

    Raises what the repository raises. The manifest is pushed last, when all blobs are there.
    """
    built = _make_newest(repository, built)
    hot = built.hot
    repository.push_blob(EMPTY_BYTES, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))
    repository.push_blob(built.pack_path, hot.pack.digest, hot.pack.size_bytes, progress=progress)
    if hot.trace is not None:
        repository.push_blob(built.trace_bytes, hot.trace.digest, hot.trace.size_bytes)
    repository.push_manifest(built.manifest, OCI_MANIFEST)
    return built


def _make_newest(repository: Repository, built: BuiltHotSet) -> BuiltHotSet:
    """The hot set with a later date than all published ones, whatever their nodes' clocks were."""
    hot = built.hot
    manifest = parse_manifest(built.manifest, OCI_MANIFEST, "the hot set")
    subject = manifest.subject
    if subject is None:
        return built
    others = [
        other
        for _, other in list_published(repository, subject.digest, hot.block_image)
        if other.workload == hot.workload
    ]
    if others and (others[0].pack.digest, others[0].trace) == (hot.pack.digest, hot.trace):
        created = others[0].created  # it is the one that was published last
    elif all(
        hotset_manifest.age(hot.created) > hotset_manifest.age(other.created) for other in others
    ):
        return built
    else:
        created = hotset_manifest.moment_after(other.created for other in others)
    hot = dataclasses.replace(hot, created=created)
    return dataclasses.replace(built, hot=hot, manifest=hotset_manifest.manifest_of(hot, subject))


def list_published(
    repository: Repository, image_digest: str, block_image: str | None = None
) -> list[tuple[Descriptor, HotSet]]:
    """All hot sets of a stock image, the newest first; those of one block image, or of all."""
    published = []
    for descriptor in repository.referrers(image_digest, media_types.HOT_SET):
        with contextlib.suppress(CorruptDataError):
            manifest = repository.manifest(descriptor)
            if isinstance(manifest, Manifest):
                hot = hotset_manifest.parse_manifest(manifest)
                if block_image in (None, hot.block_image):
                    published.append((descriptor, hot))
    return sorted(published, key=lambda pair: hotset_manifest.age(pair[1].created), reverse=True)


def find_outdated(
    published: Sequence[tuple[Descriptor, HotSet]], keep: int
) -> list[tuple[Descriptor, HotSet]]:
    """What `list_published` gives beyond the `keep` newest of each workload and block image."""
    counts: dict[tuple[str, str], int] = {}
    outdated = []
    for descriptor, hot in published:
        key = (hot.workload, hot.block_image)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > keep:
            outdated.append((descriptor, hot))
    return outdated


def fetch_trace(repository: Repository, hot: HotSet) -> Trace | None:
    """The merged trace of a published hot set; None when it has none."""
    if hot.trace is None:
        return None
    data = repository.blob(hot.trace, limit_bytes=traces.LIMITS.packed_bytes)
    return traces.parse(data, name=f"the published trace of workload {hot.workload!r}")
