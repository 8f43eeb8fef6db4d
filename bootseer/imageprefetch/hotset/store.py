"""Making hot sets of traces, keeping them on this node, and publishing them.

A hot set is packed from one trace and one block image; packing the same again with more starts in
the trace gives a newer one, and the block image is never touched.
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
from bootseer.imageprefetch.image_cache import DEFAULT_NAME
from bootseer.imageprefetch.workloads import check_workload
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
MANIFEST_NAME, TRACE_NAME, OWN_NAME = "manifest.json", "trace", "own"
_PACK_PREFIX = "pack-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """A block image as packing needs it.

    `block_image` is the digest of its manifest, `subject` the stock image that it refers to.
    """

    meta: bytes
    table: bytes
    files: FileMap
    source: BlockSource
    block_image: str
    subject: Descriptor


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A hot set on this node's disk. `own_bytes`: this node's own trace by then, if it had one."""

    hot: HotSet
    manifest: bytes
    pack_path: str
    trace_bytes: bytes
    own_bytes: bytes = b""

    @property
    def digest(self) -> str:
        """The digest of its manifest."""
        return digest_of(self.manifest)


class HotSets:
    """The hot sets of one image that were made on this node, in one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _place(self, workload: str) -> Path:
        return self.folder / (check_workload(workload) or DEFAULT_NAME)

    def workloads(self) -> list[str]:
        """The workloads that a hot set was made for here, sorted."""
        found = self.folder.glob(f"*/{MANIFEST_NAME}")
        names = (path.parent.name for path in found)
        return sorted("" if name == DEFAULT_NAME else name for name in names)

    def load(self, workload: str = "") -> Made | None:
        """What was made last; None when nothing was. Raises CorruptDataError for damage."""
        place = self._place(workload)
        try:
            raw = (place / MANIFEST_NAME).read_bytes()
            hot = _parsed(raw, str(place))
            pack = place / _pack_name(hot.pack.digest)
            if pack.stat().st_size != hot.pack.size_bytes:
                raise CorruptDataError(f"the pack {pack} has another size; build it again")
            own = (place / OWN_NAME).read_bytes() if (place / OWN_NAME).exists() else b""
            return Made(hot, raw, str(pack), (place / TRACE_NAME).read_bytes(), own)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"read the hot set in {place}") from error

    def make(
        self,
        image: ImageParts,
        trace: Trace,
        read_raw: Callable[[int, memoryview], None],
        *,
        share: float = SHARE,
        whole_share: float = WHOLE_SHARE,
        level: int = LEVEL,
        own: Trace | None = None,
    ) -> tuple[Made, PackInfo]:
        """Pack a trace, and keep the result in place of what there was for its workload.

        Only what at least `share` of its starts touched is packed; the trace is kept whole. `own`
        is the part of it that was this node's.
        """
        place = self._place(trace.workload)
        # As merging puts it, so that starts which are added later leave the pack as it is.
        packed = traces.merge([trace], share)
        files = owners(image.files, [(e.offset, e.length) for e in packed.extents])
        try:
            place.mkdir(parents=True, exist_ok=True)
            draft = Draft(str(place / _PACK_PREFIX), mode=0o644, exact_mode=True)
            with draft, open(draft.fd, "wb", closefd=False) as out:
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
                    spool_dir=str(place),
                )
                out.flush()
                made = _described(image, trace, info, str(place / _pack_name(info.digest)))
                made = dataclasses.replace(made, own_bytes=traces.serialise(own) if own else b"")
                draft.path = made.pack_path  # named by what is in it
                draft.publish_new()
            replace_file(str(place / TRACE_NAME), made.trace_bytes)
            replace_file(str(place / OWN_NAME), made.own_bytes)
            replace_file(str(place / MANIFEST_NAME), made.manifest)
            for old in place.glob(f"{_PACK_PREFIX}*"):
                if str(old) != made.pack_path:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, f"write the hot set in {place}") from error
        return made, info


def _pack_name(digest: str) -> str:
    return f"{_PACK_PREFIX}{digest.rpartition(':')[2]}"


def _described(image: ImageParts, trace: Trace, info: PackInfo, pack_path: str) -> Made:
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
    return Made(_parsed(raw, pack_path), raw, pack_path, trace_bytes)


def _parsed(raw: bytes, where: str) -> HotSet:
    manifest = parse_manifest(raw, OCI_MANIFEST, f"the hot set in {where}")
    if not isinstance(manifest, Manifest):
        raise CorruptDataError(f"the hot set in {where} is none; build it again")
    return hotset_manifest.parse_manifest(manifest)


def pack(
    sets: HotSets,
    image: ImageParts,
    trace: Trace,
    fetcher: Fetcher,
    *,
    share: float = SHARE,
    level: int = LEVEL,
    own: Trace | None = None,
) -> tuple[Made, PackInfo]:
    """`HotSets.make` with the bytes read through a fetcher, many blocks at a time.

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

    # The blocks are on their way together while they are packed one after the other.
    most = fetcher.settings.memory_bytes // 2
    with Replay(trace.hot(share), fetcher, image.source, most_bytes=most):
        return sets.make(image, trace, read_raw, share=share, level=level, own=own)


def push(repository: Repository, made: Made, *, progress: Progress | None = None) -> Made:
    """Publish a hot set beside its image, as the newest; returns it as it was published.

    Raises what the repository raises. Nothing refers to it until all of it is there.
    """
    made = _dated(repository, made)
    hot = made.hot
    repository.push_blob(EMPTY_BYTES, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))
    repository.push_blob(made.pack_path, hot.pack.digest, hot.pack.size_bytes, progress=progress)
    if hot.trace is not None:
        repository.push_blob(made.trace_bytes, hot.trace.digest, hot.trace.size_bytes)
    repository.push_manifest(made.manifest, OCI_MANIFEST)
    return made


def _dated(repository: Repository, made: Made) -> Made:
    """The hot set as one that is newer than all there are, whatever their makers' clocks were."""
    hot = made.hot
    manifest = parse_manifest(made.manifest, OCI_MANIFEST, "the hot set")
    subject = manifest.subject
    if subject is None:
        return made
    there = [
        other
        for _, other in published(repository, subject.digest, hot.block_image)
        if other.workload == hot.workload
    ]
    if there and (there[0].pack.digest, there[0].trace) == (hot.pack.digest, hot.trace):
        created = there[0].created  # it is what was published last
    elif all(
        hotset_manifest.age(hot.created) > hotset_manifest.age(other.created) for other in there
    ):
        return made
    else:
        created = hotset_manifest.moment_after(other.created for other in there)
    hot = dataclasses.replace(hot, created=created)
    return dataclasses.replace(made, hot=hot, manifest=hotset_manifest.manifest_of(hot, subject))


def published(
    repository: Repository, image_digest: str, block_image: str | None = None
) -> list[tuple[Descriptor, HotSet]]:
    """All hot sets of a stock image, the newest first; those of one block image, or of all."""
    listed = repository.referrers(image_digest, media_types.HOT_SET)
    out = []
    for one in listed:
        with contextlib.suppress(CorruptDataError):
            manifest = repository.manifest(one)
            if isinstance(manifest, Manifest):
                hot = hotset_manifest.parse_manifest(manifest)
                if block_image in (None, hot.block_image):
                    out.append((one, hot))
    return sorted(out, key=lambda pair: hotset_manifest.age(pair[1].created), reverse=True)


def outdated(
    found: Sequence[tuple[Descriptor, HotSet]], keep: int
) -> list[tuple[Descriptor, HotSet]]:
    """What `published` lists beyond the `keep` newest of each workload and block image."""
    seen: dict[tuple[str, str], int] = {}
    old = []
    for descriptor, hot in found:
        key = (hot.workload, hot.block_image)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > keep:
            old.append((descriptor, hot))
    return old


def trace_of(repository: Repository, hot: HotSet) -> Trace | None:
    """The merged trace of a published hot set; None when it has none."""
    if hot.trace is None:
        return None
    data = repository.blob(hot.trace, limit_bytes=traces.LIMITS.packed_bytes)
    return traces.parse(data, name=f"the published trace of workload {hot.workload!r}")


def merged(parts: Sequence[Trace], share: float = 0.0) -> Trace:
    """One trace of all; those without starts of their own add to the others."""
    return traces.merge(parts, share)


def as_dict(made: Made) -> dict[str, object]:
    """A hot set for JSON."""
    return {
        "digest": made.digest,
        "workload": made.hot.workload,
        "block_image": made.hot.block_image,
        "starts": made.hot.starts,
        "created": made.hot.created,
        "pack": {"digest": made.hot.pack.digest, "size_bytes": made.hot.pack.size_bytes},
        "manifest": json.loads(made.manifest),
    }
