"""The hot set of a workload as an artifact that refers to the stock image.

Its manifest's layers are the pack and the merged trace (docs/images.md). It names the block image
that it was made for by digest, so that no other image's hot set is ever replayed, and the moment
it was made: of several for one workload the newest counts. A moment that lies a day or more in
the future comes from a wrong clock, and counts as the oldest.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage.pack_format import BOOT_DIGEST, BOOT_LENGTH, LIMITS
from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.storage.oci.manifest import (
    EMPTY_BYTES,
    Descriptor,
    Manifest,
    digest_of,
    manifest_bytes,
)
from bootseer.storage.oci.media_types import (
    BLOCK_IMAGE_NOTE,
    CREATED_NOTE,
    HOT_SET,
    OCI_EMPTY,
    PACK,
    STARTS_NOTE,
    TRACE,
    WORKLOAD_NOTE,
)

if TYPE_CHECKING:
    from bootseer.storage.oci.repository import RepositoryReader

_AHEAD_US = 24 * 3600 * 10**6  # clocks may differ by less
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_TRIED = 8  # damaged ones of a workload; a mount waits for each
_MOST_MANIFESTS = 50  # that are looked into where a registry's list has no annotations


@dataclasses.dataclass(frozen=True, slots=True)
class HotSet:
    """What a hot set's manifest says. Digests are `sha256:…`.

    `boot_length` and `boot_digest` are of the pack's first bytes, its boot.
    """

    workload: str
    block_image: str
    created: str
    starts: int
    pack: Descriptor
    boot_length: int
    boot_digest: str
    trace: Descriptor | None


def manifest_of(hot: HotSet, subject: Descriptor) -> bytes:
    """The manifest's bytes; its config is the empty blob. `subject` is the stock image."""
    boot = {BOOT_LENGTH: str(hot.boot_length), BOOT_DIGEST: hot.boot_digest}
    layers = [dataclasses.replace(hot.pack, media_type=PACK, annotations=boot)]
    if hot.trace is not None:
        layers.append(dataclasses.replace(hot.trace, media_type=TRACE))
    return manifest_bytes(
        config=Descriptor(OCI_EMPTY, digest_of(EMPTY_BYTES), len(EMPTY_BYTES)),
        layers=layers,
        subject=subject,
        artifact_type=HOT_SET,
        annotations={
            WORKLOAD_NOTE: hot.workload,
            BLOCK_IMAGE_NOTE: hot.block_image,
            STARTS_NOTE: str(hot.starts),
            CREATED_NOTE: hot.created,
        },
    )


def parse_manifest(manifest: Manifest) -> HotSet:
    """Read a hot set's manifest. Raises CorruptDataError when it is none."""
    annotations = manifest.annotations
    pack = manifest.layer(PACK)
    if manifest.artifact_type != HOT_SET or pack is None:
        raise CorruptDataError("the manifest is not one of a hot set; build the hot set again")
    length, digest = pack.annotations.get(BOOT_LENGTH, ""), pack.annotations.get(BOOT_DIGEST, "")
    plausible = re.fullmatch(r"[1-9][0-9]{0,11}", length) and _DIGEST.fullmatch(digest)
    if not plausible or int(length) > min(pack.size_bytes, LIMITS.boot_bytes):
        raise CorruptDataError("the hot set does not say where its pack begins; build it again")
    starts = annotations.get(STARTS_NOTE, "")
    return HotSet(
        annotations.get(WORKLOAD_NOTE, ""),
        annotations.get(BLOCK_IMAGE_NOTE, ""),
        annotations.get(CREATED_NOTE, ""),
        int(starts) if re.fullmatch(r"[0-9]{1,9}", starts) else 0,
        pack,
        int(length),
        digest,
        manifest.layer(TRACE),
    )


def now() -> str:
    """The moment, as manifests spell it, to the microsecond so that the newest can be found."""
    return _spelt(_now_us())


def _now_us() -> int:
    return time.time_ns() // 1000


def _spelt(moment_us: int) -> str:
    """By `time` alone: `datetime` takes a millisecond to import, which mounts wait for."""
    whole_s, rest_us = divmod(moment_us, 10**6)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{rest_us:06}Z"


def moment_after(others: Iterable[str]) -> str:
    """The present moment, or one just after all others, so that the newest is published last.

    Moments that are not valid times, or lie too far ahead to be true, are left out.
    """
    import datetime

    epoch, microsecond = (
        datetime.datetime.fromtimestamp(0, datetime.UTC),
        datetime.timedelta(0, 0, 1),
    )
    moments_us = [_now_us()]
    for one in others:
        with contextlib.suppress(ValueError, OverflowError):
            moment = datetime.datetime.fromisoformat(one)
            if age(one)[0] and moment.tzinfo is not None:
                moments_us.append((moment - epoch) // microsecond + 1)
    return _spelt(max(moments_us))


def age(created: str) -> tuple[bool, str]:
    """What sorts hot sets by when they were made, the newest last."""
    return created <= _spelt(_now_us() + _AHEAD_US), created


def newest(
    listed: Iterable[Descriptor], block_image: str, workload: str | None = None
) -> list[Descriptor]:
    """The hot sets for a block image among an image's referrers, the newest first.

    `workload` None: of all workloads. Hot sets that were packed for another block image are left
    out.
    """
    fitting = [
        one
        for one in listed
        if one.artifact_type in ("", HOT_SET)
        and one.annotations.get(BLOCK_IMAGE_NOTE) == block_image
        and workload in (None, one.annotations.get(WORKLOAD_NOTE))
    ]
    return sorted(fitting, key=lambda one: age(one.annotations.get(CREATED_NOTE, "")), reverse=True)


def choose(
    repository: RepositoryReader,
    listed: Sequence[Descriptor],
    block_image: str,
    workload: str = "",
) -> tuple[Descriptor, HotSet] | None:
    """The newest hot set of a workload, else of the default one; None when there is none.

    `listed` are the stock image's referrers; those that a registry lists without annotations are
    looked into. A damaged one is passed over. Raises what the repository raises when it cannot be
    reached.
    """
    annotated = with_annotations(repository, listed)
    for name in dict.fromkeys((workload, "")):
        for one in newest(annotated, block_image, name)[:_MOST_TRIED]:
            with contextlib.suppress(CorruptDataError, NotFoundError):
                manifest = repository.manifest(one)
                if not isinstance(manifest, Manifest):
                    continue
                hot = parse_manifest(manifest)
                if hot.block_image == block_image and hot.workload == name:
                    return one, hot
    return None


def with_annotations(
    repository: RepositoryReader, listed: Sequence[Descriptor]
) -> list[Descriptor]:
    """Referrers as listed, with the annotations of their manifests where the list has none."""
    out = []
    looked = 0
    for one in listed:
        if not one.annotations and one.artifact_type in ("", HOT_SET) and looked < _MOST_MANIFESTS:
            looked += 1
            with contextlib.suppress(CorruptDataError, NotFoundError):
                manifest = repository.manifest(one)
                out.append(
                    dataclasses.replace(
                        one, annotations=manifest.annotations, artifact_type=manifest.artifact_type
                    )
                )
                continue
        out.append(one)
    return out
