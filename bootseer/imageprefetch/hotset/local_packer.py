"""The background process that packs what starts read on this node, for the node's next mount.

It runs where a workload has no published hot set, once a recording has ended. The hot set lies in
the image's folder of the cache and is removed with what was fetched of the image.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Trace
from bootseer.errors import BootseerError
from bootseer.imageprefetch.hotset import local_hotsets
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.reference import parse_reference
from bootseer.system import file_lock
from bootseer.system.child_processes import command_for

LEVEL = 3  # it never leaves the node: time counts more than bytes
GROWN = 1.05  # pack again when starts touch so many times what the pack holds
NICENESS = 5  # behind the job, but done before its next start


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """One hot set to be made, of the image that `ref` names by its digest."""

    ref: str
    digest: str
    block_image: str
    workload: str
    cache: str
    cache_limit_bytes: int
    plain_http: bool | None

    @property
    def image_cache(self) -> ImageCache:
        """The cache that has the traces and gets the hot set."""
        return ImageCache(self.cache)

    @property
    def folder(self) -> str:
        """Where the image's hot sets of this node lie."""
        return self.image_cache.own_hot_set_folder(self.digest)


def is_due(job: PackJob, trace: Trace) -> bool:
    """Whether starts have read enough that is in no pack of this node yet."""
    if not trace.starts:
        return False
    kept = local_hotsets.find(job.image_cache, job.digest, job.workload, job.block_image)
    if kept is None:
        return True
    from bootseer.imageprefetch.hotset.store import SHARE, HotSets  # of the packer alone

    try:
        made = HotSets(job.folder).load(job.workload)
        if made is None:
            return False  # built by command, which has precedence
        packed = traces.parse(made.trace_bytes)
    except BootseerError:
        return True
    held_bytes = packed.select_hot(SHARE).touched_bytes()
    return trace.select_hot(SHARE).touched_bytes() > GROWN * held_bytes


def start_if_due(job: PackJob, trace: Trace) -> None:
    """Pack a workload's merged trace in the background, if that is due."""
    if is_due(job, trace):
        start(job)


def start_recorded(
    ref: str, digest: str, workload: str, cache: str, *, plain_http: bool | None = None
) -> None:
    """Pack what `image record` has just recorded, in the background."""
    from bootseer.imageprefetch.hotset.image_hotsets import CACHE_LIMIT_BYTES

    kept = ImageCache(cache).image(digest)
    if kept is not None:
        start(
            PackJob(
                ref=parse_reference(ref).with_digest(digest),
                digest=digest,
                block_image=kept.block_image,
                workload=workload,
                cache=cache,
                cache_limit_bytes=CACHE_LIMIT_BYTES,
                plain_http=plain_http,
            )
        )


def start(job: PackJob) -> None:
    """Start the process, which outlives this one; nothing raises."""
    words = command_for(__name__, json.dumps(dataclasses.asdict(job)))
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


def pack(job: PackJob) -> bool:
    """Pack what this node's starts of a workload touched; False when that is not due (any more).

    Raises what the registry and the cache raise.
    """
    from bootseer.imageprefetch.hotset import store
    from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher, open_image
    from bootseer.imageprefetch.record.trace_store import TraceStore

    with _lock_folder(job.folder) as is_alone:
        trace = TraceStore(job.image_cache.trace_folder(job.digest)).load(job.workload)
        if not is_alone or trace is None or not is_due(job, trace):
            return False
        with open_image(job.ref, job.cache, plain_http=job.plain_http) as image:
            if image.parts.block_image != job.block_image:
                return False  # there is a newer one, which the next mount takes
            sets = store.HotSets(job.folder)
            for leftover in sets.folder.glob("*/.*"):  # of a packer that was killed
                leftover.unlink(missing_ok=True)
            with open_fetcher(job.cache, job.cache_limit_bytes) as fetcher:
                store.pack(sets, image.parts, trace, fetcher, level=LEVEL)
    return True


@contextlib.contextmanager
def _lock_folder(folder: str) -> Iterator[bool]:
    """Whether no other packer works for this image; the image's folder must exist."""
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
    """The process that `start` starts: its argument is a `PackJob` as JSON."""
    os.nice(NICENESS)
    job = PackJob(**json.loads(sys.argv[1]))
    about = {"bootseer.image.ref": job.ref, "bootseer.image.workload": job.workload}
    with events.open_writer() as writer:
        try:
            if pack(job):
                writer.point("image.pack", "ok", about)
        except BootseerError as error:  # the next start tries again
            writer.point("image.pack", "fallback", {**about, "bootseer.reason": str(error)})
            return error.exit_code
    return 0
