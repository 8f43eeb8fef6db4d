"""`image mount` and `image umount`: an image's tree at once, served in the background.

Three processes take part, as in every mount of ours: the caller, which returns once the tree is
there; the supervisor, which holds the FUSE mount and starts a new worker when one dies; the
worker, which asks the registry and serves. A node has one server for an image: a further mount of
it is a bind mount. The server ends with the last mount, in whatever mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage import erofs_mount
from bootseer.config.paths import default_cache, default_runtime
from bootseer.errors import (
    BusyError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.fuse.mount import mount_point
from bootseer.fuse.mount.mount_point import can_mount, unmount
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.light_dataclasses import dataclass
from bootseer.storage.oci.reference import parse_reference
from bootseer.system import processes
from bootseer.system.mountinfo import all_mounts, shown_at
from bootseer.system.paths import is_within

if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Iterator

OTHER_WAYS = (
    "use the file mode, which needs no privilege (`bootseer image files`), or pull the image the "
    "plain way"
)
START_LIMIT_S = 180.0
END_LIMIT_S = 10.0
LEFT_LIMIT_S = 0.5  # the same for a server that has written all that it had to write
TRIES = 5  # of a bind mount whose source is unmounted meanwhile
_LOOK_S = 1.0
_POLL_S = 0.005
_DROP_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class MountedImage:
    """A mounted image. `shared`: another mount of this node already served it.

    `hot_set` is the digest of the pack being replayed, "" for none. `complete`: all of the image is
    on this node's disk, where the kernel reads it. `offline`: its registry was away. `notes` say
    what was not as usual. `state` is the folder of its server, this mount's or another's.
    """

    directory: str
    digest: str
    workload: str
    shared: bool
    loop: bool
    hot_set: str
    hot_bytes: int
    offline: bool
    complete: bool = False
    notes: tuple[str, ...] = ()
    state: str = ""


def mount(
    settings: MountSettings,
    helper: socket | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> MountedImage:
    """Mount, and leave the server running in the background; returns once the tree is there.

    Raises NotFoundError for an image without a block image, UsageError for an invalid name,
    NotSupportedError where this machine or user cannot mount, or the image is for another
    platform, and what the registry raises; then nothing is left behind. Call it in a process that
    has one thread.

    `helper` is the link of a registry helper for this mount; it is closed here. `meanwhile` is
    called while the server comes up: it may import, but must not start a thread or raise.
    """
    try:
        return _mount(check_settings(settings), helper, meanwhile)
    finally:
        if helper is not None:
            helper.close()


def _mount(
    settings: MountSettings, helper: socket | None, meanwhile: Callable[[], None] | None
) -> MountedImage:
    for _ in range(TRIES):
        state = server_registry.ServerFolder.create(settings.runtime)
        lock = state.lock.descriptor
        try:
            answer = daemon.start(
                lambda send, state=state, helper=helper: serve(settings, state, send, helper),  # type: ignore[misc]
                mountpoint=settings.directory,
                limit_s=START_LIMIT_S,
                waits_for=f"the registry to answer for {settings.ref}",
                tries=1,
                log_file=settings.log_file,
                keep=(lock,) if helper is None else (lock, helper.fileno()),
                meanwhile=meanwhile,
            )
        except BaseException:  # a signal as well: nothing half-mounted stays
            state.release()
            server_registry.sweep(state.folder, also_mounts=True)
            raise
        state.release()
        mounted = _take_answer(settings, answer)
        if mounted is not None:
            return mounted
        if helper is not None:  # its answers went to the server that has ended
            helper.close()
        helper = meanwhile = None
    raise StoreUnavailableError(
        f"{settings.ref} was unmounted elsewhere each time it was to be shown at "
        f"{settings.directory}; try again"
    )


def _take_answer(settings: MountSettings, answer: dict[str, Any]) -> MountedImage | None:
    """The mount that a server reports; None when the server that it shares has ended."""
    fields = dict(answer["mounted"])
    if fields["shared"] and not _share(settings, server_registry.ServerRecord(**answer["server"])):
        return None
    fields["notes"] = tuple(fields["notes"])
    return MountedImage(directory=settings.directory, **fields)


def _share(settings: MountSettings, server: server_registry.ServerRecord) -> bool:
    """Mount a server's tree at one more directory; False when it is not mounted any more."""
    directory = settings.directory
    try:
        tree = server_registry.open_whole_tree(server, erofs_mount.clone)
        if tree is None:
            return False
        try:
            erofs_mount.attach(tree, directory, nosuid=settings.nosuid)
        finally:
            os.close(tree)
    except OSError as error:
        raise from_os_error(error, f"mount at {directory}") from error
    if server_registry.is_serving(server):
        return True
    server_registry.unmount_all(server)  # it ended meanwhile, perhaps before it saw this mount
    return False


def serve(
    settings: MountSettings,
    state: server_registry.ServerFolder,
    send: daemon.Send,
    helper: socket | None = None,
) -> None:
    """Serve in this process, which must have one thread, until the image is unmounted."""
    from bootseer.fuse.mount.mount_options import MountOptions
    from bootseer.fuse.serve.handover import supervise
    from bootseer.imageprefetch.mount.mount_events import FaultLog
    from bootseer.imageprefetch.mount.mount_worker import Worker

    log = daemon.Log.open(settings.log_file)
    faults = FaultLog.open(os.path.join(state.folder, server_registry.FAULTS))

    def on_death(worker: int) -> None:
        nonlocal helper
        if helper is not None:  # the next worker could not know which answers were read
            helper.close()
            helper = None
        log.say(f"worker {worker} of {settings.ref} ended; another one takes over")

    options = MountOptions(
        fsname=f"bootseer-image:{state.folder}",
        read_ahead_kib=128,
        timeout_s=3600.0,
        unmount_grace_s=1.0,
        on_fault=log.say,
    )
    try:
        supervise(
            lambda: Worker(settings, state, send, log.say, faults, helper).start(),
            state.front,
            options,
            on_death=on_death,
        )
    finally:
        state.remove()


def with_absolute_paths(settings: MountSettings) -> MountSettings:
    """The settings for any working directory, with the mount where links lead to."""
    return dataclasses.replace(
        settings,
        directory=os.path.realpath(settings.directory),
        cache=os.path.abspath(settings.cache or default_cache()),
        runtime=os.path.abspath(settings.runtime or default_runtime()),
        events_dir=os.path.abspath(settings.events_dir) if settings.events_dir else "",
        log_file=os.path.abspath(settings.log_file) if settings.log_file else "",
    )


def check_settings(settings: MountSettings) -> MountSettings:
    """The settings with absolute paths; raises why they cannot be used on this machine."""
    settings = with_absolute_paths(settings)
    _check_names(settings)
    check_machine(settings.directory)
    _check_directory(settings)
    return settings


def _check_names(settings: MountSettings) -> None:
    """Raise UsageError for invalid names, before they get into any event."""
    parse_reference(settings.ref)
    if settings.workload:
        from bootseer.imageprefetch.workloads import check_workload

        check_workload(settings.workload)


def _check_directory(settings: MountSettings) -> None:
    """Raise UsageError for a directory where the mount would hide what it is served from."""
    from bootseer.imageprefetch.image_cache import BLOCKS, IMAGES  # hashlib: not for an unmount

    needed = {"cache": settings.cache, "runtime directory": settings.runtime}
    reference = parse_reference(settings.ref)
    if not reference.host:
        needed["image layout"] = reference.repository
    for what, path in needed.items():
        if _is_below(path, settings.directory):
            raise UsageError(
                f"mounting at {settings.directory} would hide the {what} {path}, which the "
                "mount needs; choose another directory"
            )
    owned = ((settings.cache, BLOCKS), (settings.cache, IMAGES), (settings.runtime, "images"))
    for path in (os.path.join(*words) for words in owned):
        if _is_below(settings.directory, path):
            raise UsageError(
                f"{settings.directory} lies in {path}, where bootseer keeps files of its own; "
                "choose another directory"
            )


def _is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it, with links resolved."""
    return is_within(os.path.realpath(path), os.path.realpath(folder))


def check_machine(directory: str) -> None:
    """Raise the reason why this user or machine cannot mount an image at `directory`."""
    if not can_mount():
        raise NotSupportedError(
            "mounting an image needs root with CAP_SYS_ADMIN (EROFS has no way for users): "
            f"{OTHER_WAYS}"
        )
    if not os.path.exists("/dev/fuse"):
        raise NotSupportedError(
            f"this machine has no /dev/fuse: load the module (modprobe fuse), or {OTHER_WAYS}"
        )
    if not os.path.isdir(directory):
        raise NotFoundError(f"{directory} is no directory; make it first")


def umount(directory: str, *, lazily: bool = False, runtime_dir: str = "") -> None:
    """Unmount an image.

    If it was the last mount, returns when the recording is written, and the server has ended too,
    unless another mount namespace still has the image.

    Raises BusyError while files are open in it, unless `lazily`: then the mount point is free at
    once, and the rest is unmounted with its last user. NotFoundError: nothing is mounted there;
    UsageError: not an image of ours.
    """
    directory = mount_point.absolute(directory)
    runtime_dir = runtime_dir or default_runtime()
    mounted = shown_at(all_mounts(), directory)
    if mounted is None:
        raise NotFoundError(f"nothing is mounted at {directory}; check the path")
    records = server_registry.list_records(runtime_dir)
    server = next((one for one in records if server_registry.is_mount_of(one, mounted)), None)
    if server is not None:
        state = server.state
    else:
        state = server_registry.unregistered_folder(mounted, runtime_dir)
    if not state:
        raise UsageError(
            f"{directory} is no mounted image of bootseer but {mounted.kind}; use umount"
        )
    with contextlib.nullcontext() if server is None else _dropping_reads(server):
        _unmount_unused(directory, mounted.target, lazily)
    if not lazily and (server is None or not server_registry.mounts_of(server)):
        _await_end(state)


def _unmount_unused(directory: str, target: str, lazily: bool) -> None:
    """Unmount a tree that is not in use; a use of a moment is waited for.

    Such are a statfs, and a server of ours that clones the mount to read a hot set ahead. Raises
    BusyError with the names of the processes that can be seen to use it.
    """
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            return unmount(directory, lazily=lazily)
        except BusyError as error:
            users = processes.users_of(target)
            if users or time.monotonic() > until_s:
                raise mount_point.make_busy_error(directory, users) from error
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _dropping_reads(server: server_registry.ServerRecord) -> Iterator[None]:
    """Keep an unmount within the block from waiting for bytes that will never be read.

    Before the kernel ends a file system it waits for all of its read-ahead, as long as the
    registry takes. This thread's kernel stack shows that it is ending, and not in use any more.
    """
    import threading

    stack, over = f"/proc/self/task/{threading.get_native_id()}/stack", threading.Event()

    def watch() -> None:
        ending_s = 0.0
        while not over.wait(_DROP_POLL_S):
            try:
                with open(stack, "rb") as file:
                    ends = b"generic_shutdown_super" in file.read()
            except OSError:  # a kernel that does not show stacks
                return
            now_s = time.monotonic()
            if ends and not ending_s:
                ending_s = now_s
            is_written = os.path.exists(os.path.join(server.state, server_registry.LEFT))
            if ends and (is_written or now_s - ending_s > END_LIMIT_S):
                server_registry.abort_connection(server.state)
                return

    watcher = threading.Thread(target=watch, name="image-unmount", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _await_end(state: str) -> None:
    """Wait for a server whose image is not mounted here any more."""
    # A container, or another process with a mount namespace of its own, may keep the server.
    end_s = time.monotonic() + END_LIMIT_S
    left = os.path.join(state, server_registry.LEFT)
    until_s = end_s
    while os.path.exists(state) and time.monotonic() < until_s:
        if until_s == end_s and os.path.exists(left):
            until_s = min(end_s, time.monotonic() + LEFT_LIMIT_S)
        with contextlib.suppress(OSError):
            server_registry.sweep(state)
        time.sleep(_POLL_S)
