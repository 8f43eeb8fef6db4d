"""An image that this node has whole, mounted by the process that runs its container.

The kernel reads such an image without a server, and a server's processes would take longer to come
up than the mount itself. The registry is asked for what the image's name stands for, by the helper
that asks already, and for nothing else: what it said of the image holds for an hour. What a
server would do besides is left to one process for all images of a container, the *keeper*, which
is begun with the container and need not live: it warms the hot sets, sweeps the folders of killed
commands, and keeps the images' data from being evicted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from typing import TYPE_CHECKING

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import erofs_mount
from bootseer.errors import BootseerError
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.mount import (
    container_folders,
    mount,
    node_sweep,
    server_registry,
    serverless_choice,
)
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.mount_events import MOUNT, FaultLog, MountEvents
from bootseer.imageprefetch.mount.server_registry import ServerFolder, ServerRecord
from bootseer.imageprefetch.resolve.helped_repository import peek_digest
from bootseer.imageprefetch.resolve.resolver import ResolvedImage, Resolver
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.reference import parse_reference
from bootseer.system.child_processes import (
    fork,
    has_threads,
    name_thread,
    silence_descriptors,
    silence_streams,
)

if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Sequence

    from bootseer.blockimage.serve.serverless_mount import CompleteImage
    from bootseer.imageprefetch.mount.settings import MountSettings

HELPER_S = 1.5
"""How long the helper's answer is waited for; then the image is mounted as every other, within
the same look."""
LOCK_S = 1.0
NICENESS = 10
"""What makes the container goes before what reads ahead for it: on two cores it is there 40 ms
sooner, and its imports take no longer."""
KEEPER = b"bootseer-keeper"
"""The keeper's name, as `ps` shows it."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class KeptMount:
    """What the keeper needs of one mount."""

    settings: MountSettings
    record: ServerRecord
    complete: CompleteImage


def mount_complete(
    settings: MountSettings, helper: socket | None, *, names_content: bool
) -> tuple[MountedImage, KeptMount] | None:
    """Mount an image, if all of it is here and checked; None where it is to be mounted as others.

    The `helper` asks what the name stands for; its answer is left to whoever reads it next. With
    `names_content` what the name stood for still holds, and nothing is asked. Nothing is left
    behind where this returns None. Raises UsageError and NotSupportedError as `mount.mount`. Call
    it in a process that has one thread.
    """
    settings = mount.check_settings(settings)
    cache, reference = ImageCache(settings.cache), parse_reference(settings.ref)
    began_ns = time.time_ns(), time.monotonic_ns()
    digest = cache.read_pin(reference.name)
    if not digest or not cache.is_fresh(digest, settings.workload) or cache.config(digest) is None:
        return None

    def is_still() -> bool:
        if names_content or reference.digest == digest:
            return True
        return helper is not None and digest == peek_digest(helper, reference.version, HELPER_S)

    try:
        state = ServerFolder.create(settings.runtime)
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
            undo.callback(server_registry.sweep, state.folder, also_mounts=True)
            stack.callback(state.release)
            undo.callback(state.release)
            stack.enter_context(
                server_registry.lock_image(settings.runtime, digest, limit_s=LOCK_S)
            )
            made = _mount(settings, digest, cache, state, undo, is_still, began_ns)
            if made is not None:
                undo.pop_all()
            return made
    except (BootseerError, OSError):  # whatever it is, a server's start tells, or does better
        return None


def _mount(
    settings: MountSettings,
    digest: str,
    cache: ImageCache,
    state: ServerFolder,
    undo: contextlib.ExitStack,
    is_still: Callable[[], bool],
    began_ns: tuple[int, int],
) -> tuple[MountedImage, KeptMount] | None:
    """Mount what is here of an image, whose lock is held; `undo` is left where that fails.

    `is_still` says whether the name stands for it; asked last, as the answer is on its way.
    """
    cache.mark_used(digest)  # before anything is read: it must not expire meanwhile
    kept = cache.image(digest)
    if kept is None or kept.block_image == cache.find_condemned(digest):
        return None
    resolved = _open(settings, digest, kept.block_image, cache, state)

    def say(kind: str, text: str) -> None:  # in the keeper
        if os.path.ismount(settings.directory):  # else the container was there for a moment only
            _reports(settings, state.folder).fault(kind, text)

    complete = serverless_choice.choose_serverless(settings, digest, resolved, say)
    if complete is None:
        return None
    undo.callback(complete.close)
    if not is_still():
        return None
    mounted = complete.mount(settings.directory)
    if settings.nosuid:
        erofs_mount.restrict(settings.directory, nosuid=True)
    record = ServerRecord(
        digest=digest,
        block_image=resolved.block_image,
        workload=settings.workload,
        device=mounted.device,
        source=mounted.source,
        handle=0,
        data_bytes=resolved.image.data_bytes,
        loop=mounted.loop,
        shared=settings.share,
        state=state.folder,
        supervisor=os.getpid(),
        sealed=True,
        bdis=mounted.bdis,
    )
    state.register(record)
    reports = _reports(settings, state.folder)
    hot = bool(resolved.hot_set) and settings.hot
    reports.begin(MOUNT, began_ns)
    reports.report_mounted(resolved, hot=hot, loop=record.loop, complete=True)
    image = MountedImage(
        directory=settings.directory,
        digest=digest,
        workload=settings.workload,
        shared=False,
        loop=record.loop,
        hot_set=resolved.hot_set if hot else "",
        hot_bytes=resolved.hot_bytes if hot else 0,
        offline=False,
        complete=True,
        state=state.folder,
    )
    return image, KeptMount(settings, record, complete)


def _open(
    settings: MountSettings, digest: str, block_image: str, cache: ImageCache, state: ServerFolder
) -> ResolvedImage:
    """What this node keeps of an image. Raises BootseerError where that is not all of it."""
    resolver = Resolver.begin(
        settings.ref,
        cache,
        workload=settings.workload,
        options=settings.options,
        plain_http=settings.plain_http,
        spare_meta=os.path.join(state.folder, server_registry.SPARE_META),
        note=lambda _: None,
        platform_known=True,
    )
    resolved = resolver.open_kept(digest, block_image)
    if resolved.image.frames is not None:  # their file is here already
        resolved.image.frames.close()
    os.symlink(resolved.image.meta_path, state.meta)
    image = dataclasses.replace(resolved.image, meta_path=state.meta, frames=None)
    return dataclasses.replace(resolved, image=image, offline=False)


def _reports(settings: MountSettings, folder: str) -> MountEvents:
    """The events of a mount, and the file of its faults in its folder."""
    return MountEvents(
        settings.ref,
        settings.workload,
        lambda _: None,
        FaultLog.open(os.path.join(folder, server_registry.FAULTS)),
        events.open_writer(),
        again_s=settings.deadline_s,
    )


# --- the keeper -------------------------------------------------------------------------------


def start_keeper(mounts: Sequence[KeptMount]) -> None:
    """Begin the keeper of a container's mounts; nothing raises. Without one, nothing is warmed.

    Call it in a process that has one thread.
    """
    if not mounts:
        return
    if has_threads():  # a call to a registry that was given up
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a handler would end the command
    try:
        pid = fork()
        if pid == 0:
            try:
                _keep(mounts)
            finally:
                os._exit(0)
    except OSError:
        return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for one in mounts:
        one.complete.close()  # it is the keeper's


def _keep(mounts: Sequence[KeptMount]) -> None:
    gc.freeze()
    gc.enable()
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    name_thread(KEEPER)
    os.setsid()
    os.chdir("/")
    silence_streams()
    silence_descriptors({0, 1, 2, *(fd for one in mounts for fd in one.complete.descriptors)})
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    for one in mounts:
        one.complete.begin(one.settings.directory)
    settings = mounts[0].settings

    def sweep() -> bool:
        container_folders.sweep(settings.runtime)
        return False

    for one in mounts:
        server_registry.await_unmount(one.record, sweep)
        one.complete.close()
        server_registry.sweep(one.record.state)
    node_sweep.sweep(settings.runtime, settings.cache, settings.kept_limit_bytes)
