"""`stripe mount`: a tree of checkpoints as a directory, served in the background.

Three processes: the caller, which returns once the mount answers; the supervisor, which holds the
mount and starts a new worker when one dies; the worker, which reads the store. Only the worker
has threads and connections.

Most modules that only the worker needs are imported while the store is being asked, because `start`
waits for both. A job's own mount has the worker alone ask, and they are imported before. The worker
itself imports `write_tree`, which only a writable mount needs, and `system.descriptors`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    describe,
    from_os_error,
)
from bootseer.events.redaction import redact_message, safe_url
from bootseer.fuse.mount import agent_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import (
    KIND,
    absolute,
    can_mount,
    find_mount,
    is_passed,
    make_busy_error,
    unmount,
)
from bootseer.fuse.mount.passthrough import is_supported
from bootseer.fuse.operations import Operations
from bootseer.fuse.serve import daemon
from bootseer.fuse.serve.daemon import Log, run_in_child
from bootseer.storage.open import open_object
from bootseer.storage.store import Store
from bootseer.storage.urls import parse_url
from bootseer.stripedfs.format.pointer import SUFFIX
from bootseer.stripedfs.mount.settings import MountSettings
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.read.namespace import PathInfo
from bootseer.stripedfs.read.open import locate, open_file
from bootseer.system.paths import is_within
from bootseer.system.processes import users_of
from bootseer.system.readiness import readable

if TYPE_CHECKING:
    from bootseer.fuse.mount.mount_point import MountPoint
    from bootseer.stripedfs.read.sources import FileSource
    from bootseer.system.mountinfo import Mounted

START_LIMIT_S = 180.0
SERVE_S = 5.0
"""How long a mount takes beyond its looks at the store."""
AGAIN_S = 1.0
"""What the second look has in any case: the first one may have been quick, and imports slow."""
LAST_S, LAST_POLL_S = 1.0, 0.02
"""How long the mount of a job that has ended takes to vanish at most."""
LAST_ANSWER_S = 2.0
COVERED_POLL_S = 1.0


def mount(settings: MountSettings) -> None:
    """Mount, and leave the server running in the background; returns once the mount answers.

    Raises what `serve` would have raised. Call it in a process that has one thread.
    """
    settings = _absolute(settings)
    daemon.start(
        lambda send: serve(settings, on_ready=lambda: send({})),
        mountpoint=settings.mountpoint,
        limit_s=min(START_LIMIT_S, settings.look_s + SERVE_S),
        waits_for=f"the store to answer for {redact_message(settings.url)}",
        log_file=settings.log_file,
        unlogged="give --log-file FILE, or --foreground, to see why",
    )
    try:
        os.statvfs(settings.mountpoint)
    except OSError as error:
        raise from_os_error(error, f"look at the new mount {settings.mountpoint}") from error


def serve(settings: MountSettings, *, on_ready: Callable[[], None] | None = None) -> None:
    """Mount and serve in the foreground until it is unmounted or a signal asks for the end.

    Raises NotFoundError and other errors of the store for what is to be mounted, UsageError,
    BusyError, AccessDeniedError and NotSupportedError for the mount point and the machine (see
    `open_mount`).
    """
    if settings.writable and settings.backend != "own":
        raise UsageError("--fuse-backend fusepy is read-only; leave --rw out, or take own")
    _check_place(settings)
    # Before anything that may hang: a caller that gives up refers to the log.
    log = Log.open(settings.log_file, settings.mountpoint)
    _load_store(settings.url)
    looking = f"cannot look at {redact_message(settings.url)}"
    look_end_s = time.monotonic() + settings.look_s
    # A job's own directory nobody looks into before the job: there the first worker's look will do.
    looks_first = not settings.for_pid or settings.over or settings.writable
    is_checked = looks_first or settings.backend != "own"
    if is_checked:
        run_in_child(lambda: _check(settings), settings.look_s, looking, meanwhile=_load_tree)
    else:
        _load_tree()
    process = _open_process(settings.for_pid)
    options = MountOptions(
        read_only=not settings.writable,
        allow_other=settings.allow_other,
        fsname=_source_of(settings.url),
        on_fault=log.say,
        # A save may fail, and the previous file is there again: the kernel must ask every time.
        timeout_s=0.0 if settings.writable else MountOptions().timeout_s,
        passthrough=_passes(settings),
        over=settings.over,
    )

    def build() -> Operations:
        # A worker that takes over has readers, who wait for as long as for any other bytes.
        left_s = math.inf if is_served else max(AGAIN_S, round(look_end_s - time.monotonic(), 1))
        return build_tree(settings, log, look_s=left_s, is_checked=is_checked or is_served)

    is_served = False

    def note_ready() -> None:
        nonlocal is_served
        is_served = True
        if on_ready is not None:
            on_ready()

    if settings.backend == "fusepy":
        from bootseer.fuse import fusepy_server

        _unmount_after(process, lambda: unmount(settings.mountpoint, lazily=True))
        fusepy_server.serve(
            build(), settings.mountpoint, options=options, ready=on_ready or _do_nothing
        )
        return
    from bootseer.fuse.serve.handover import supervise

    def report_death(worker: int) -> None:
        log.say(f"worker {worker} of {settings.mountpoint} ended; another one takes over")

    supervise(
        build,
        settings.mountpoint,
        options,
        on_ready=note_ready,
        on_death=report_death,
        on_serve=lambda point: _unmount_after(process, lambda: _unmount_own(point)),
    )


def make_way(settings: MountSettings) -> bool:
    """Deal with a mount of ours that is at the mount point; returns whether to mount over it.

    That of a job which has ended vanishes in a moment, and one without a server is removed. One of
    the same URL that stays is that of a job which still runs, or takes its time to end. It is
    mounted over, and is there again afterwards. Where it is silent, or that takes a privilege which
    is missing, it loses its name; what it has opened it keeps. Raises BusyError for one that shows
    something else, which is left alone.
    """
    settings = _absolute(settings)
    mountpoint, end_s = settings.mountpoint, time.monotonic() + LAST_S
    mounted = find_mount(mountpoint)
    if mounted is None or mounted.kind != KIND:
        return False
    try:
        run_in_child(lambda: _use(mountpoint), LAST_ANSWER_S)
        answers = True
    except NotFoundError:  # it has just vanished
        return False
    except BootseerError as error:
        answers = False
        if not isinstance(error, DeadlineError):
            return False  # dead: what mounts there removes it
    while answers and time.monotonic() < end_s:
        time.sleep(LAST_POLL_S)
        if find_mount(mountpoint) is None:
            return False
    if not _shows(mounted, settings.url):
        raise BusyError(f"{mountpoint} is mounted already, from {mounted.source}")
    if answers and can_mount():
        return True
    with contextlib.suppress(BootseerError):
        unmount(mountpoint, lazily=True)
    return False


def remove_last(settings: MountSettings) -> None:
    """Unmount, lazily, what shows this URL at the mount point, and nothing else."""
    settings = _absolute(settings)
    mounted = find_mount(settings.mountpoint)
    if mounted is not None and _shows(mounted, settings.url):
        with contextlib.suppress(BootseerError):
            unmount(settings.mountpoint, lazily=True)


def _use(mountpoint: str) -> None:
    """Raise what keeps a mount from being used; may hang with its server."""
    os.statvfs(mountpoint)


def _shows(mounted: Mounted, url: str) -> bool:
    """Whether a mount is of a URL; the agent puts a word before it, and cuts it."""
    source = mounted.source
    if source.startswith(agent_mount.SOURCE):
        source = source.removeprefix(agent_mount.SOURCE).partition(":")[2]
        return mounted.kind == KIND and _source_of(url).startswith(source)
    return mounted.kind == KIND and source == _source_of(url)


def _source_of(url: str) -> str:
    """What the table of mounts says of a URL; without passwords, but no two URLs alike."""
    parts = urlsplit(url)
    untold = f"{parts.username or ''}?{parts.query}"
    number = f"#{zlib.crc32(untold.encode()):08x}" if untold != "?" else ""
    return safe_url(url).replace(",", ";") + number


def build_tree(
    settings: MountSettings, log: Log, look_s: float = math.inf, *, is_checked: bool = True
) -> Operations:
    """Make what is served. Opens the store and starts threads, so only the worker may call it.

    Raises DeadlineError where the store has said nothing of the tree within `look_s`, and what
    prevents that the tree is served, unless it `is_checked` already.
    """
    from bootseer.blocks.cache.descriptors import raise_limit
    from bootseer.blocks.cache.node_cache import NodeCache
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.blocks.link_turns import LinkTurns
    from bootseer.blocks.settings import DEFAULTS as FETCH
    from bootseer.config.paths import default_runtime
    from bootseer.stripedfs.mount.prefetch import Prefetch
    from bootseer.stripedfs.mount.read_tree import StripedTree

    raise_limit()  # an open file takes up to four descriptors
    store, name, root, source = _look_again(settings, look_s, is_checked=is_checked)
    cache = None
    if settings.cache:
        cache = NodeCache.at(settings.cache, settings.cache_limit_bytes, on_stop=log.say)
    fetch = dataclasses.replace(
        FETCH,
        memory_bytes=settings.memory_bytes,
        demand_deadline_s=settings.deadline_s,
        stall_s=min(FETCH.stall_s, settings.deadline_s),
        connections=settings.connections or FETCH.connections,
    )
    fetcher = Fetcher(fetch, cache=cache)
    if settings.writable:
        from bootseer.stripedfs.mount.write_tree import WritableTree

        return WritableTree(
            store,
            name,
            root,
            fetcher,
            writing=settings.writing,
            deadline_s=settings.deadline_s,
            say=log.say,
        )
    tree = StripedTree(
        store,
        name,
        root,
        fetcher,
        direct_bytes=settings.direct_bytes,
        deadline_s=settings.deadline_s,
        say=log.say,
        root_source=source,
        inode_a_path=settings.backend == "fusepy",
        passing_from=settings.cache if _passes(settings) else "",
    )
    if settings.prefetch is not None:
        # Without a cache, what exceeds memory would evict what arrived before it was read.
        most_bytes = None if cache is not None else settings.memory_bytes // 2
        turns = LinkTurns.of(default_runtime())
        prefetch = Prefetch(
            tree, settings.prefetch, most_bytes=most_bytes, turns=turns, is_starting=True
        )
        tree.set_companion(prefetch)
        prefetch.start()
    return tree


def _look_again(
    settings: MountSettings, limit_s: float, *, is_checked: bool
) -> tuple[Store, str, PathInfo, FileSource | None]:
    """Open the store, and look up what is to be served of it.

    Unless it `is_checked` already, it is opened as well: that source is the last one returned.
    """

    def look() -> tuple[Store, str, PathInfo, FileSource | None]:
        store, name, info = _open_store(_limit_store(settings))
        if info is None:  # it was made meanwhile
            info = namespace.look_up(store, name)
        if is_checked:
            return store, name, info, None
        try:
            return store, name, info, _open_root(store, info)
        except (BootseerError, OSError):
            raise
        except Exception as error:  # a border: other workers would fare no better
            raise StoreUnavailableError(f"cannot look at it: {describe(error)}") from error

    if limit_s == math.inf:
        return look()
    from bootseer.storage.bounded_calls import call_with_limit

    again = "again " if is_checked else ""
    return call_with_limit(look, limit_s, f"look {again}at {redact_message(settings.url)}")


def _passes(settings: MountSettings) -> bool:
    """Whether the kernel is to read files by itself that the node cache holds whole."""
    if not settings.cache or settings.writable or settings.backend != "own":
        return False
    return can_mount() and is_supported()


def umount(mountpoint: str, *, lazily: bool = False) -> None:
    """End a mount of ours.

    Raises BusyError while files are open in it, unless `lazily`: then its name is removed at once,
    and the rest with its last user. NotFoundError: nothing is mounted there; UsageError: not ours.
    """
    mounted = find_mount(mountpoint)
    if mounted is None:
        raise NotFoundError(f"nothing is mounted at {mountpoint}; check the path")
    if mounted.kind != KIND:
        raise UsageError(f"{mountpoint} is no mount of bootseer but {mounted.kind}; use umount")
    try:
        unmount(mountpoint, lazily=lazily)
    except BusyError as error:
        raise make_busy_error(mountpoint, users_of(mounted.target)) from error


def _limit_store(settings: MountSettings) -> MountSettings:
    """Let no call to the store take longer than a read may."""
    given, most_s = settings.options, settings.deadline_s
    options = dataclasses.replace(
        given,
        connect_s=min(given.connect_s, most_s),
        stall_s=min(given.stall_s, most_s),
        retry_s=min(given.retry_s, most_s),
    )
    return dataclasses.replace(settings, options=options)


def _open_store(settings: MountSettings) -> tuple[Store, str, PathInfo | None]:
    """The store, the name in it that is to be mounted ("": its root), and what that stands for.

    A writable mount may be of nothing yet (None).
    """
    try:
        store, info = locate(settings.url, settings.options)
    except NotFoundError:
        if not settings.writable:
            raise
        return *open_object(settings.url, settings.options), None
    return store, info.name, info


def _check_place(settings: MountSettings) -> None:
    """Refuse a mount point above what its own server reads: it would wait for itself for ever."""
    if is_passed(settings.mountpoint):
        return
    place = absolute(settings.mountpoint)
    folder = _local_folder(settings.url)
    stripes = folder and folder.rstrip("/") + SUFFIX
    for what, path in (("store", folder), ("store", stripes), ("cache", settings.cache)):
        if path and any(is_within(each, place) for each in _resolve_links(path)):
            raise UsageError(
                f"a mount at {settings.mountpoint} would hide the {what} {path} from its own "
                "server; mount it elsewhere"
            )


def _local_folder(url: str) -> str:
    """Where what is to be mounted lies on this machine; "" for a store elsewhere."""
    parsed = parse_url(url)
    return parsed.path if parsed.scheme == "file" else ""


def _resolve_links(path: str) -> Iterator[str]:
    """Where a path leads, and where each symbolic link on its way lies."""
    yield os.path.realpath(path)
    path = os.path.abspath(path)
    while path.strip("/"):
        above, name = os.path.split(path)
        yield os.path.join(os.path.realpath(above), name)
        path = above


def _load_store(url: str) -> None:
    """Import what the store needs once, for the child that looks and for every worker.

    Modules whose import may start threads, such as hdfs-native, are left out.
    """
    scheme = url.partition("://")[0]
    kind = "webhdfs" if "webhdfs" in scheme else scheme.removesuffix("s")
    if kind in ("webhdfs", "http"):
        with contextlib.suppress(
            BootseerError, ImportError
        ):  # the child reports it with more detail
            importlib.import_module(f"bootseer.storage.{kind}.store")


def _load_tree() -> None:
    """Import once what every worker needs."""
    for name in (
        "bootseer.blocks.cache.node_cache",
        "bootseer.blocks.fetch.fetcher",
        "bootseer.fuse.serve.handover",
        "bootseer.stripedfs.mount.read_tree",
    ):
        importlib.import_module(name)


def _check(settings: MountSettings) -> None:
    """Raise the error that would keep the tree from being served, if there is one."""
    store, name, info = _open_store(settings)
    if info is None:
        store.mkdir(name)
        return
    if settings.writable and not info.is_folder:
        raise UsageError(f"{name} in {store.url} is a file; --rw needs a folder to save into")
    _open_root(store, info)
    if settings.writable and info.version is not None:
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint, which never changes; mount it "
            "read-only, or the folder above it with --rw"
        )


def _open_root(store: Store, info: PathInfo) -> FileSource | None:
    """List what is to be served, or open it where it is one file; raises what prevents that."""
    if not info.is_folder:
        return open_file(store, info)
    info = namespace.load_tree(store, info) if info.version is not None else info
    namespace.list_folder(store, info)
    return None


def _absolute(settings: MountSettings) -> MountSettings:
    """Make paths absolute, as the server changes its working directory."""
    return dataclasses.replace(
        settings,
        mountpoint=absolute(settings.mountpoint),
        log_file=os.path.abspath(settings.log_file) if settings.log_file else "",
        cache=os.path.abspath(settings.cache) if settings.cache else "",
        url=settings.url if "://" in settings.url else os.path.abspath(settings.url),
    )


# --- processes --------------------------------------------------------------------------------


def _open_process(pid: int) -> int:
    """A descriptor that is readable once the process has ended; -1 for none."""
    if not pid:
        return -1
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--for-pid {pid}: there is no such process") from error


def _unmount_after(process: int, unmount_it: Callable[[], None]) -> None:
    """Unmount once a process has ended; -1 is none."""
    if process < 0:
        return

    def wait() -> None:
        readable(process)
        with contextlib.suppress(BootseerError):
            unmount_it()

    threading.Thread(target=wait, name="stripe-for-pid", daemon=True).start()


def _unmount_own(point: MountPoint) -> NoReturn:
    """Unmount it, and nothing that was mounted there since, once nothing covers it.

    Returns never: the process ends with its mount.
    """
    while True:
        with contextlib.suppress(BootseerError):
            point.unmount(lazily=True)
        time.sleep(COVERED_POLL_S)


def _do_nothing() -> None: ...
