"""`image mount`: an image's tree at once, served in the background.

Three processes, as for every mount of ours: the caller, which returns once the tree is there; the
supervisor, which holds the FUSE mount and starts a new worker when one dies; the worker, which
asks the registry and serves. One server stands for an image on a node: who mounts it again gets
a bind mount. The server ends when the kernel lets go of the last mount, in whatever namespace.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from bootseer import light_dataclasses as dataclasses
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
from bootseer.light_dataclasses import dataclass
from bootseer.storage.options import DEFAULTS, StoreOptions
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
LEFT_LIMIT_S = 0.5  # how long a server is waited for that has kept all it had to keep
TRIES = 5  # of a bind mount whose source goes away meanwhile
WINDOW_S = 120.0
_LOOK_S = 1.0
_POLL_S = 0.005
_DROP_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """One mount of the image `ref` at `directory`, which is there.

    "" for `cache` and `runtime` are this node's usual places. Blocks there have at most
    `cache_limit_bytes`, all else that is kept of images `kept_limit_bytes`. With `fill`, what the
    start did not read follows once it is over, or nobody has read for a while, at
    `fill_rate_bytes_s` at most (0 = any). With `record`, what programs read until the first step
    (told in `events_dir`) or for `record_window_s` is merged into the workload's trace, in the
    folder `traces` ("": the image's own in the cache). A read that gets no bytes for `deadline_s`
    fails. All that the registry is asked before the mount takes `look_s` at most, and longer only
    while answers keep coming; it is counted from `look_begun_s` of the monotonic clock, or (0) from
    its first request. `loop` mounts over loop devices (None: where the kernel needs
    them); `hot` replays the hot set.
    Where the file `not_begun` is there when the image is unmounted, nothing began: then what was
    read is recorded no more.
    With `nosuid` neither setuid programs nor devices of the image work at `directory`. An image
    of another platform than this machine's is refused, unless that was seen to (`platform_known`).
    """

    ref: str
    directory: str
    workload: str = ""
    cache: str = ""
    cache_limit_bytes: int = 64 << 30
    kept_limit_bytes: int = 16 << 30
    runtime: str = ""
    fill: bool = True
    fill_rate_bytes_s: int = 64 << 20
    record: bool = True
    record_window_s: float = WINDOW_S
    traces: str = ""
    events_dir: str = ""
    options: StoreOptions = DEFAULTS
    plain_http: bool | None = None
    deadline_s: float = 60.0
    look_s: float = 120.0
    look_begun_s: float = 0.0
    memory_bytes: int = 128 << 20
    loop: bool | None = None
    hot: bool = True
    nosuid: bool = False
    share: bool = True
    log_file: str = ""
    not_begun: str = ""
    platform_known: bool = False


def encoded(settings: MountSettings) -> str:
    """Settings as text, for a process that mounts in this one's place."""
    import json

    return json.dumps(dataclasses.asdict(settings))


def decoded(text: str | bytes) -> MountSettings:
    """What `encoded` was given."""
    import json

    found = json.loads(text)
    options = found.pop("options")
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    return MountSettings(**found, options=StoreOptions(**{**options, **lists}))


@dataclass(frozen=True, slots=True)
class Mounted:
    """A tree that is there. `shared`: another mount of this node already served the image.

    `hot_set` is the digest of the pack being replayed, "" for none; `complete`: all of the image
    is on this node's disk, and the kernel reads it there. `notes` tell what was not as usual.
    `state` is the folder of the server that has it, this mount's or another's.
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
) -> Mounted:
    """Mount, and leave the server running in the background; returns once the tree is there.

    Raises NotFoundError for an image without a block image, UsageError for a name that is none,
    NotSupportedError where this machine or user cannot mount, or runs no such image, and what the
    registry raises; then nothing is left behind. Call it in a process that has one thread.

    `helper` is the link of a registry helper for this mount; it is closed here. `meanwhile` is
    called while the server comes up: it may import, but must not start a thread or raise.
    """
    try:
        settings = absolute(settings)
        _check_names(settings)
        check_machine(settings.directory)
        _check_place(settings)
        return _mount(settings, helper, meanwhile)
    finally:
        if helper is not None:
            helper.close()


def _mount(
    settings: MountSettings, helper: socket | None, meanwhile: Callable[[], None] | None
) -> Mounted:
    for _ in range(TRIES):
        state = server_registry.State(settings.runtime)
        lock = state.lock.descriptor
        try:
            answer = daemon.start(
                lambda tell, state=state, helper=helper: serve(settings, state, tell, helper),  # type: ignore[misc]
                what=settings.directory,
                limit_s=START_LIMIT_S,
                waits_for=f"the registry to answer for {settings.ref}",
                tries=1,
                log_file=settings.log_file,
                keep=(lock,) if helper is None else (lock, helper.fileno()),
                meanwhile=meanwhile,
            )
        except BaseException:  # a signal too: nothing half-mounted stays
            state.release()
            server_registry.sweep(state.folder, also_mounts=True)
            raise
        state.release()
        found = _mounted(settings, answer)
        if found is not None:
            return found
        if helper is not None:  # its answers went to the server that is gone
            helper.close()
        helper = meanwhile = None
    raise StoreUnavailableError(
        f"{settings.ref} was unmounted elsewhere each time it was to be shown at "
        f"{settings.directory}; try again"
    )


def _mounted(settings: MountSettings, answer: dict[str, Any]) -> Mounted | None:
    """What came of a server's answer; None when its mount is gone again."""
    about = dict(answer["mounted"])
    if about["shared"] and not _shown(settings, server_registry.Server(**answer["server"])):
        return None
    about["notes"] = tuple(about["notes"])
    return Mounted(directory=settings.directory, **about)


def _shown(settings: MountSettings, server: server_registry.Server) -> bool:
    """Show a server's tree at one more place; False when it is to be had no more."""
    from bootseer.blockimage.erofs_mount import attach, clone

    directory = settings.directory
    try:
        tree = server_registry.open_whole(server, clone)
        if tree is None:
            return False
        try:
            attach(tree, directory, nosuid=settings.nosuid)
        finally:
            os.close(tree)
    except OSError as error:
        raise from_os_error(error, f"mount at {directory}") from error
    if server_registry.serves(server):
        return True
    server_registry.unmount_all(server)  # it ended meanwhile, and may not have seen this one
    return False


def serve(
    settings: MountSettings,
    state: server_registry.State,
    tell: daemon.Tell,
    helper: socket | None = None,
) -> None:
    """Serve in this process, which must have one thread, until the image is unmounted."""
    from bootseer.fuse.mount.mount_options import MountOptions
    from bootseer.fuse.serve.handover import supervise
    from bootseer.imageprefetch.mount.mount_events import FaultLog
    from bootseer.imageprefetch.mount.mount_worker import Worker

    log = daemon.Log(settings.log_file)
    faults = FaultLog(os.path.join(state.folder, server_registry.FAULTS))

    def died(worker: int) -> None:
        nonlocal helper
        if helper is not None:  # the next worker could not tell which answers were read
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
            lambda: Worker(settings, state, tell, log.say, faults, helper).front,
            state.front,
            options,
            on_death=died,
        )
    finally:
        state.remove()


def absolute(settings: MountSettings) -> MountSettings:
    """The same places whatever the working directory becomes; the mount where links lead to."""
    return dataclasses.replace(
        settings,
        directory=os.path.realpath(settings.directory),
        cache=os.path.abspath(settings.cache or default_cache()),
        runtime=os.path.abspath(settings.runtime or default_runtime()),
        events_dir=os.path.abspath(settings.events_dir) if settings.events_dir else "",
        log_file=os.path.abspath(settings.log_file) if settings.log_file else "",
    )


def _check_names(settings: MountSettings) -> None:
    """Raise UsageError for names that are none, before they get into any event."""
    from bootseer.storage.oci.reference import parse_reference

    parse_reference(settings.ref)
    if settings.workload:
        from bootseer.imageprefetch.workloads import check_workload

        check_workload(settings.workload)


def _check_place(settings: MountSettings) -> None:
    """Raise UsageError for a place where the mount would hide what it is served from."""
    from bootseer.storage.oci.reference import parse_reference

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
    owned = ((settings.cache, "blocks"), (settings.cache, "images"), (settings.runtime, "images"))
    for path in (os.path.join(*words) for words in owned):
        if _is_below(settings.directory, path):
            raise UsageError(
                f"{settings.directory} lies in {path}, where bootseer keeps files of its own; "
                "choose another directory"
            )


def _is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it, whatever links lead there."""
    return is_within(os.path.realpath(path), os.path.realpath(folder))


def check_machine(directory: str) -> None:
    """Raise what keeps this user or machine from mounting an image at `directory`."""
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
    """End a mount of ours; returns when what was recorded is kept, if it was the last one.

    Its server has ended then too, unless another mount namespace still has the image.

    Raises BusyError while files are open in it, unless `lazily`: then its name goes at once and
    the rest with its last user. NotFoundError: nothing is mounted there; UsageError: not ours.
    """
    directory = mount_point.absolute(directory)
    runtime_dir = runtime_dir or default_runtime()
    found = shown_at(all_mounts(), directory)
    if found is None:
        raise NotFoundError(f"nothing is mounted at {directory}; check the path")
    server = next(
        (s for s in server_registry.known(runtime_dir) if server_registry.is_of(s, found)), None
    )
    state = server.state if server is not None else server_registry.folder_of(found, runtime_dir)
    if not state:
        raise UsageError(
            f"{directory} is no mounted image of bootseer but {found.kind}; use umount"
        )
    with contextlib.nullcontext() if server is None else _dropping_reads(server):
        _unmount_unused(directory, found.target, lazily)
    if not lazily and (server is None or not server_registry.mounts_of(server)):
        _await_end(state)


def _unmount_unused(directory: str, target: str, lazily: bool) -> None:
    """Unmount what nobody uses; who only looks into it, for a moment, is waited for.

    A look holds the mount while it lasts: a statfs, or a server of ours that clones the mount to
    read a hot set ahead. Raises BusyError with the names of the users that can be seen.
    """
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            return unmount(directory, lazily=lazily)
        except BusyError as error:
            users = daemon.users_of(target)
            if users or time.monotonic() > until_s:
                by = f" by {', '.join(users)}" if users else ""
                raise BusyError(
                    f"{directory} is in use{by}; end that, or give --lazy to unmount it all the "
                    "same"
                ) from error
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _dropping_reads(server: server_registry.Server) -> Iterator[None]:
    """Let no unmount here wait for bytes that nobody will read any more.

    Before the kernel ends a file system it waits for all that it reads ahead, for as long as the
    registry has it wait. That it is ending, so that no one else has it, is in this thread's stack.
    """
    import threading

    stack, over = f"/proc/self/task/{threading.get_native_id()}/stack", threading.Event()

    def watch() -> None:
        ending_s = 0.0
        while not over.wait(_DROP_POLL_S):
            try:
                with open(stack, "rb") as file:
                    ends = b"generic_shutdown_super" in file.read()
            except OSError:  # a kernel that does not tell
                return
            now_s = time.monotonic()
            if ends and not ending_s:
                ending_s = now_s
            kept = os.path.exists(os.path.join(server.state, server_registry.LEFT))
            if ends and (kept or now_s - ending_s > END_LIMIT_S):
                server_registry.end_connection(server.state)
                return

    watcher = threading.Thread(target=watch, name="image-unmount", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _await_end(state: str) -> None:
    """Wait for a server that serves nobody here any more."""
    # A container, or whatever copied our mounts into a namespace of its own, may keep the server.
    end_s = time.monotonic() + END_LIMIT_S
    left = os.path.join(state, server_registry.LEFT)
    stays_s = end_s
    while os.path.exists(state) and time.monotonic() < stays_s:
        if stays_s == end_s and os.path.exists(left):
            stays_s = min(end_s, time.monotonic() + LEFT_LIMIT_S)
        with contextlib.suppress(OSError):
            server_registry.sweep(state)
        time.sleep(_POLL_S)
