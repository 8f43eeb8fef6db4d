"""Hot sets that a node makes for itself: the next start here is fast though nobody published one.

Where a workload has no published hot set, what its full starts on this node read is packed when
the recording ends, by a process of its own that has time. It lies in the image's folder and goes
with what was fetched of the image. What `hotset build` made here and nobody pushed counts too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BootseerError
from bootseer.imageprefetch.image_cache import DEFAULT_NAME, OWN, KeptPack, LocalStore
from bootseer.light_dataclasses import dataclass
from bootseer.system import file_lock
from bootseer.system.interpreter import command_for

if TYPE_CHECKING:
    from bootseer.blockimage.hotset_manifest import HotSet
    from bootseer.blocks.trace.trace_file import Trace
    from bootseer.imageprefetch.mount.mount import MountSettings
    from bootseer.imageprefetch.resolve.resolver import Opened

BUILT = "hotsets"  # what `hotset build` made, in the same form
LEVEL = 3  # it never leaves the node: time counts more than bytes
GROWN = 1.05  # a pack is made anew when starts touch so much more than it holds
NICENESS = 5  # behind the job, but done before its next start
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A hot set on this node's disk: where its pack is, when it was made, whether by command."""

    path: str
    pack: KeptPack
    created: str
    by_hand: bool


def find(local: LocalStore, digest: str, workload: str, block_image: str) -> Kept | None:
    """This node's hot set of one workload and block image; what was built by hand comes first."""
    for kind in (BUILT, OWN):
        place = os.path.join(local.folder_of(digest), kind, workload or DEFAULT_NAME)
        hot = _described(place)
        if hot is not None and hot.block_image == block_image and hot.workload == workload:
            path = os.path.join(place, f"pack-{hot.pack.digest.partition(':')[2]}")
            pack = KeptPack(hot.pack.digest, hot.pack.size_bytes, hot.boot_length, hot.boot_digest)
            if os.path.exists(path):
                return Kept(path, pack, hot.created, kind == BUILT)
    return None


def _described(place: str) -> HotSet | None:
    try:
        with open(os.path.join(place, "manifest.json"), "rb") as file:
            raw = file.read(_MOST_BYTES)
    except OSError:
        return None
    from bootseer.blockimage import hotset_manifest
    from bootseer.storage.oci.manifest import OCI_MANIFEST, Manifest, parse_manifest

    try:
        manifest = parse_manifest(raw, OCI_MANIFEST, f"the hot set in {place}")
        return hotset_manifest.parse_manifest(manifest) if isinstance(manifest, Manifest) else None
    except BootseerError:
        return None  # as good as none: it is made again


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """One hot set to be made. `ref` names the image by its `digest`."""

    ref: str
    digest: str
    block_image: str
    workload: str
    cache: str
    cache_limit_bytes: int
    plain_http: bool | None


def is_due(making: Making, trace: Trace) -> bool:
    """Whether starts have told enough that is in no pack of this node yet."""
    local = LocalStore(making.cache)
    if not trace.starts:
        return False
    if find(local, making.digest, making.workload, making.block_image) is None:
        return True
    from bootseer.blocks.trace import trace_file as traces
    from bootseer.imageprefetch.hotset.store import SHARE, HotSets

    try:
        made = HotSets(_folder(local, making.digest)).load(making.workload)
        if made is None:
            return False  # built by hand: who did that knows better
        before = traces.parse(made.trace_bytes)
    except BootseerError:
        return True
    held = before.hot(SHARE).touched_bytes()
    return trace.hot(SHARE).touched_bytes() > GROWN * held


def offer(settings: MountSettings, opened: Opened, trace: Trace) -> None:
    """A recording of a mount has ended, and its trace was merged: have it packed if that is due."""
    from bootseer.storage.oci.reference import parse_reference

    making = Making(
        ref=f"{parse_reference(settings.ref).place}@{opened.digest}",
        digest=opened.digest,
        block_image=opened.block_image,
        workload=settings.workload,
        cache=settings.cache,
        cache_limit_bytes=settings.cache_limit_bytes,
        plain_http=settings.plain_http,
    )
    if not settings.traces and is_due(making, trace):  # else it is recorded for somebody else
        begin(making)


def offer_recorded(
    ref: str, digest: str, workload: str, cache: str, *, plain_http: bool | None = None
) -> None:
    """`image record` has kept a start of an image: have it packed for the next mount here."""
    from bootseer.imageprefetch.block_image_repo import CACHE_LIMIT_BYTES
    from bootseer.storage.oci.reference import parse_reference

    kept = LocalStore(cache).image(digest)
    if kept is not None:
        begin(
            Making(
                ref=f"{parse_reference(ref).place}@{digest}",
                digest=digest,
                block_image=kept.block_image,
                workload=workload,
                cache=cache,
                cache_limit_bytes=CACHE_LIMIT_BYTES,
                plain_http=plain_http,
            )
        )


def begin(making: Making) -> None:
    """Have it made by another process, which outlives this one; nothing raises."""
    import subprocess

    words = command_for(__name__, json.dumps(dataclasses.asdict(making)))
    try:
        process = subprocess.Popen(
            words,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return  # the next start tries again
    threading.Thread(target=process.wait, name="image-own", daemon=True).start()


def make(making: Making) -> bool:
    """Pack what this node's starts of a workload touched; False when that is not due (any more).

    Raises what the registry and the cache raise.
    """
    from bootseer.imageprefetch.block_image_repo import fetching, open_image
    from bootseer.imageprefetch.hotset import store
    from bootseer.imageprefetch.record.trace_store import TraceStore

    local = LocalStore(making.cache)
    with _alone(_folder(local, making.digest)) as alone:
        trace = TraceStore(local.trace_folder(making.digest)).load(making.workload)
        if not alone or trace is None or not is_due(making, trace):
            return False
        with open_image(making.ref, making.cache, plain_http=making.plain_http) as image:
            if image.parts.block_image != making.block_image:
                return False  # there is a newer one, which the next mount takes
            sets = store.HotSets(_folder(local, making.digest))
            for left in sets.folder.glob("*/.*"):  # of one that was killed
                left.unlink(missing_ok=True)
            with fetching(making.cache, making.cache_limit_bytes) as fetcher:
                store.pack(sets, image.parts, trace, fetcher, level=LEVEL)
    return True


def _folder(local: LocalStore, digest: str) -> str:
    return os.path.join(local.folder_of(digest), OWN)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[bool]:
    """Whether nobody else makes one for this image; the image's folder must be there."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        lock = file_lock.acquire(f"{folder}/.lock", limit_s=0)
    except OSError:
        yield False
        return
    with lock:
        yield True


def main() -> int:
    """The process that `begin` starts: its argument is a `Making` as JSON."""
    from bootseer import events

    os.nice(NICENESS)
    making = Making(**json.loads(sys.argv[1]))
    about = {"bootseer.image.ref": making.ref, "bootseer.image.workload": making.workload}
    with events.open_writer() as writer:
        try:
            if make(making):
                writer.point("image.pack", "ok", about)
        except BootseerError as error:  # the next start tries again
            writer.point("image.pack", "fallback", {**about, "bootseer.reason": str(error)})
            return error.exit_code
    return 0
