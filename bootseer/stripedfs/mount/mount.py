"""`stripe mount`: a tree of checkpoints as a directory, served in the background.

Three processes: the caller, which returns once the mount answers; the supervisor, which holds the
mount and starts a new worker when one dies; the worker, which reads the store. Only the worker
has threads and connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import threading
from collections.abc import Callable, Iterator

from bootseer.errors import (
    BootseerError,
    BusyError,
    NotFoundError,
    UsageError,
    from_os_error,
)
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import (
    KIND,
    absolute,
    can_mount,
    find_mount,
    is_passed,
    unmount,
)
from bootseer.fuse.mount.passthrough import is_supported
from bootseer.fuse.operations import Operations
from bootseer.fuse.serve import daemon
from bootseer.fuse.serve.daemon import Log, in_a_child, users_of
from bootseer.storage.open import open_object
from bootseer.storage.store import Store
from bootseer.storage.urls import redact
from bootseer.stripedfs.format.pointer import SUFFIX
from bootseer.stripedfs.mount.settings import MountSettings
from bootseer.stripedfs.read.locate import locate
from bootseer.system.paths import is_within
from bootseer.system.readiness import readable

START_LIMIT_S = 180.0


def mount(settings: MountSettings) -> None:
    """Mount, and leave the server running in the background; returns once the mount answers.

    Raises what `serve` would have raised. Call it in a process that has one thread.
    """
    settings = _absolute(settings)
    daemon.start(
        lambda tell: serve(settings, on_ready=lambda: tell({})),
        what=settings.mountpoint,
        limit_s=START_LIMIT_S,
        waits_for=f"the store to answer for {redact(settings.url)}",
        log_file=settings.log_file,
        unlogged="give --log-file FILE, or --foreground, to see why",
    )
    try:
        os.statvfs(settings.mountpoint)
    except OSError as error:
        raise from_os_error(error, f"look at the new mount {settings.mountpoint}") from error


def serve(settings: MountSettings, *, on_ready: Callable[[], None] | None = None) -> None:
    """Mount and serve in the foreground until somebody unmounts or a signal asks for the end.

    Raises NotFoundError and its relatives for what is to be mounted, UsageError, BusyError,
    AccessDeniedError and NotSupportedError for the place and the machine (see `open_mount`).
    """
    if settings.writable and settings.backend != "own":
        raise UsageError("--fuse-backend fusepy is read-only; leave --rw out, or take own")
    _check_place(settings)
    # Before anything that may hang: who gave up is sent there.
    log = Log(settings.log_file, settings.mountpoint)
    _load_store(settings.url)
    looking = f"cannot look at {redact(settings.url)}"
    in_a_child(lambda: _check(settings), settings.look_s, looking, meanwhile=_load_tree)
    process = _process(settings.for_pid)
    options = MountOptions(
        read_only=not settings.writable,
        allow_other=settings.allow_other,
        fsname=_shown(settings.url).replace(",", ";"),
        on_fault=log.say,
        # What was being saved may fail, and the old file is there again: the kernel must ask.
        timeout_s=0.0 if settings.writable else MountOptions().timeout_s,
        passthrough=_passes(settings),
    )

    def build() -> Operations:
        if process >= 0:
            _end_with(process, settings.mountpoint)
        return build_tree(settings, log)

    if settings.backend == "fusepy":
        from bootseer.fuse import fusepy_server

        fusepy_server.serve(
            build(), settings.mountpoint, options=options, ready=on_ready or _nothing
        )
        return
    from bootseer.fuse.serve.handover import supervise

    def died(worker: int) -> None:
        log.say(f"worker {worker} of {settings.mountpoint} ended; another one takes over")

    supervise(build, settings.mountpoint, options, on_ready=on_ready, on_death=died)


def build_tree(settings: MountSettings, log: Log) -> Operations:
    """What is served: opens the store and starts threads, so for the worker alone."""
    from bootseer.blocks.cache.node_cache import NodeCache
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.blocks.settings import DEFAULTS as FETCH
    from bootseer.stripedfs.mount.read_tree import StripedTree
    from bootseer.stripedfs.mount.write_tree import WritableTree
    from bootseer.system.descriptors import raise_limit

    raise_limit()  # an open file takes up to four descriptors
    store, name = _store(_hurried(settings))
    cache = None
    if settings.cache:
        cache = NodeCache(settings.cache, settings.cache_limit_bytes, told=log.say)
    fetch = dataclasses.replace(
        FETCH,
        memory_bytes=settings.memory_bytes,
        demand_deadline_s=settings.deadline_s,
        stall_s=min(FETCH.stall_s, settings.deadline_s),
        connections=settings.connections or FETCH.connections,
    )
    fetcher = Fetcher(fetch, cache=cache)
    if settings.writable:
        return WritableTree(
            store,
            name,
            fetcher,
            writing=settings.writing,
            deadline_s=settings.deadline_s,
            say=log.say,
        )
    return StripedTree(
        store,
        name,
        fetcher,
        direct_bytes=settings.direct_bytes,
        deadline_s=settings.deadline_s,
        say=log.say,
        inode_a_path=settings.backend == "fusepy",
        passing_from=settings.cache if _passes(settings) else "",
    )


def _passes(settings: MountSettings) -> bool:
    """Whether the kernel is to read what the node cache holds whole, where it can."""
    if not settings.cache or settings.writable or settings.backend != "own":
        return False
    return can_mount() and is_supported()


def umount(mountpoint: str, *, lazily: bool = False) -> None:
    """End a mount of ours.

    Raises BusyError while files are open in it, unless `lazily`: then its name goes at once and
    the rest with its last user. NotFoundError: nothing is mounted there; UsageError: not ours.
    """
    found = find_mount(mountpoint)
    if found is None:
        raise NotFoundError(f"nothing is mounted at {mountpoint}; check the path")
    if found.kind != KIND:
        raise UsageError(f"{mountpoint} is no mount of bootseer but {found.kind}; use umount")
    try:
        unmount(mountpoint, lazily=lazily)
    except BusyError as error:
        users = users_of(found.target)
        by = f" by {', '.join(users)}" if users else ""
        raise BusyError(
            f"{mountpoint} is in use{by}; end that, or give --lazy to unmount it all the same"
        ) from error


def _hurried(settings: MountSettings) -> MountSettings:
    """Let no call to the store take longer than a read may."""
    given, most_s = settings.options, settings.deadline_s
    options = dataclasses.replace(
        given,
        connect_s=min(given.connect_s, most_s),
        stall_s=min(given.stall_s, most_s),
        retry_s=min(given.retry_s, most_s),
    )
    return dataclasses.replace(settings, options=options)


def _store(settings: MountSettings) -> tuple[Store, str]:
    """The store and the name in it that is to be mounted; "" for the root of a store."""
    try:
        store, found = locate(settings.url, settings.options)
    except NotFoundError:
        if not settings.writable:
            raise
        return open_object(settings.url, settings.options)
    return store, found.name


def _check_place(settings: MountSettings) -> None:
    """Refuse a place where the mount would lie over what its own server reads.

    The server would wait for itself, for ever.
    """
    if is_passed(settings.mountpoint):
        return
    place = absolute(settings.mountpoint)
    folder = _local_folder(settings.url)
    stripes = folder and folder.rstrip("/") + SUFFIX
    for what, path in (("store", folder), ("store", stripes), ("cache", settings.cache)):
        if path and any(is_within(each, place) for each in _places_on(path)):
            raise UsageError(
                f"a mount at {settings.mountpoint} would hide the {what} {path} from its own "
                "server; mount it elsewhere"
            )


def _local_folder(url: str) -> str:
    """Where what is to be mounted lies on this machine; "" for a store elsewhere."""
    from bootseer.storage.urls import parse_url

    parsed = parse_url(url)
    return parsed.path if parsed.scheme == "file" else ""


def _places_on(path: str) -> Iterator[str]:
    """Where a path leads, and the links on its way."""
    yield os.path.realpath(path)
    path = os.path.abspath(path)
    while path.strip("/"):
        above, name = os.path.split(path)
        yield os.path.join(os.path.realpath(above), name)
        path = above


def _load_store(url: str) -> None:
    """Import what the store needs once, for the child that looks and for every worker.

    Not what may start threads with its import, as hdfs-native might.
    """
    scheme = url.partition("://")[0]
    kind = "webhdfs" if "webhdfs" in scheme else scheme.removesuffix("s")
    if kind in ("webhdfs", "http"):
        with contextlib.suppress(BootseerError, ImportError):  # the child says it better
            importlib.import_module(f"bootseer.storage.{kind}.store")


def _load_tree() -> None:
    """Import what every worker needs."""
    for name in (
        "bootseer.blocks.cache.node_cache",
        "bootseer.blocks.fetch.fetcher",
        "bootseer.fuse.serve.handover",
        "bootseer.stripedfs.mount.read_tree",
    ):
        importlib.import_module(name)


def _check(settings: MountSettings) -> None:
    """Raise what would keep the tree from being served."""
    from bootseer.stripedfs.read import namespace

    store, name = _store(settings)
    try:
        found = namespace.look(store, name)
    except NotFoundError:
        if not settings.writable:
            raise
        store.mkdir(name)
        return
    if found.is_folder:
        found = namespace.rooted(store, found) if found.version is not None else found
        namespace.children(store, found)
    elif settings.writable:
        raise UsageError(f"{name} in {store.url} is a file; --rw needs a folder to save into")
    else:
        namespace.source_of(store, found)
    if settings.writable and found.version is not None:
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint, which never changes; mount it "
            "read-only, or the folder above it with --rw"
        )


def _absolute(settings: MountSettings) -> MountSettings:
    """The same places whatever the working directory becomes."""
    return dataclasses.replace(
        settings,
        mountpoint=absolute(settings.mountpoint),
        log_file=os.path.abspath(settings.log_file) if settings.log_file else "",
        cache=os.path.abspath(settings.cache) if settings.cache else "",
        url=settings.url if "://" in settings.url else os.path.abspath(settings.url),
    )


def _shown(url: str) -> str:
    from bootseer.storage.urls import safe_url

    return safe_url(url)


# --- processes --------------------------------------------------------------------------------


def _process(pid: int) -> int:
    """A descriptor that is readable once the process has ended; -1 for none."""
    if not pid:
        return -1
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--for-pid {pid}: there is no such process") from error


def _end_with(process: int, mountpoint: str) -> None:
    """Unmount, lazily, once a process has ended."""

    def wait() -> None:
        readable(process)
        with contextlib.suppress(BootseerError):
            unmount(mountpoint, lazily=True)

    threading.Thread(target=wait, name="stripe-for-pid", daemon=True).start()


def _nothing() -> None: ...
