"""`stripe mount`: a tree of checkpoints as a directory, served in the background.

Three processes: the caller, which returns once the mount answers; the supervisor, which holds the
mount and starts a new worker when one dies; the worker, which reads the store. Only the worker
has threads and connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from bootseer.errors import (
    BootseerError,
    BusyError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.fuse.mounts import KIND, find_mount, unmount
from bootseer.fuse.operations import Operations
from bootseer.fuse.options import MountOptions
from bootseer.storage.base import Store, open_object
from bootseer.stripedfs.locating import locate
from bootseer.stripedfs.mountsettings import MountSettings

USERS_NAMED = 5
START_LIMIT_S = 180.0


def mount(settings: MountSettings) -> None:
    """Mount, and leave the server running in the background; returns once the mount answers.

    Raises what `serve` would have raised. Call it in a process that has one thread.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _background(settings, tell)
    os.close(tell)
    try:
        _await(told, settings)
        os.statvfs(settings.mountpoint)
    except OSError as error:
        raise from_os_error(error, f"look at the new mount {settings.mountpoint}") from error
    finally:
        os.close(told)


def serve(settings: MountSettings, *, on_ready: Callable[[], None] | None = None) -> None:
    """Mount and serve in the foreground until somebody unmounts or a signal asks for the end.

    Raises NotFoundError and its relatives for what is to be mounted, UsageError, BusyError,
    AccessDeniedError and NotSupportedError for the place and the machine (see `open_mount`).
    """
    if settings.writable and settings.backend != "own":
        raise UsageError("--fuse-backend fusepy is read-only; leave --rw out, or take own")
    _in_a_child(lambda: _check(settings))
    log = Log(settings.log_file)
    process = _process(settings.for_pid)
    options = MountOptions(
        read_only=not settings.writable,
        allow_other=settings.allow_other,
        fsname=_shown(settings.url).replace(",", ";"),
        on_fault=log.say,
        # What was being saved may fail, and the old file is there again: the kernel must ask.
        timeout_s=0.0 if settings.writable else MountOptions().timeout_s,
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
    from bootseer.fuse.handover import supervise

    def died(worker: int) -> None:
        log.say(f"worker {worker} of {settings.mountpoint} ended; another one takes over")

    supervise(build, settings.mountpoint, options, on_ready=on_ready, on_death=died)


def build_tree(settings: MountSettings, log: Log) -> Operations:
    """What is served: opens the store and starts threads, so for the worker alone."""
    from bootseer.blocks.cache import NodeCache
    from bootseer.blocks.fetch import Fetcher
    from bootseer.blocks.settings import DEFAULTS as FETCH
    from bootseer.stripedfs.rwtree import WritableTree
    from bootseer.stripedfs.tree import StripedTree

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
            direct_bytes=settings.direct_bytes,
            say=log.say,
        )
    return StripedTree(store, name, fetcher, direct_bytes=settings.direct_bytes, say=log.say)


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
        users = _users(found.target)
        by = f" by {', '.join(users)}" if users else ""
        raise BusyError(
            f"{mountpoint} is in use{by}; end that, or give --lazy to unmount it all the same"
        ) from error


class Log:
    """Lines with their time, appended to a file or written to standard error."""

    def __init__(self, path: str) -> None:
        self._fd = 2
        if path:
            try:
                self._fd = os.open(
                    path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
                )
            except OSError as error:
                raise from_os_error(error, f"write the log {path}") from error

    def say(self, text: str) -> None:
        """One line; a log that cannot be written is given up silently."""
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n"
        with contextlib.suppress(OSError):
            os.write(self._fd, line.encode(errors="backslashreplace"))


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


def _check(settings: MountSettings) -> None:
    """Raise what would keep the tree from being served."""
    from bootseer.stripedfs import names

    store, name = _store(settings)
    try:
        found = names.look(store, name)
    except NotFoundError:
        if not settings.writable:
            raise
        store.mkdir(name)
        return
    if found.is_folder:
        found = names.rooted(store, found) if found.version is not None else found
        names.children(store, found)
    elif settings.writable:
        raise UsageError(f"{name} in {store.url} is a file; --rw needs a folder to save into")
    else:
        names.source_of(store, found)
    if settings.writable and found.version is not None:
        raise UsageError(
            f"{name} in {store.url} is a directory checkpoint, which never changes; mount it "
            "read-only, or the folder above it with --rw"
        )


def _shown(url: str) -> str:
    from bootseer.storage.urls import safe_url

    return safe_url(url)


# --- processes --------------------------------------------------------------------------------


def _background(settings: MountSettings, tell: int) -> NoReturn:
    """The child of `mount`: becomes the supervisor, and never returns."""
    code, waiting = 1, True
    try:
        os.setsid()
        settings = dataclasses.replace(
            settings,
            mountpoint=os.path.abspath(settings.mountpoint),
            log_file=os.path.abspath(settings.log_file) if settings.log_file else "",
            cache=os.path.abspath(settings.cache) if settings.cache else "",
            url=settings.url if "://" in settings.url else os.path.abspath(settings.url),
        )
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # or who reads the caller's output would wait for our end
            os.dup2(null, descriptor)

        def ready() -> None:
            nonlocal waiting
            waiting = False
            os.write(tell, b"{}\n")

        serve(settings, on_ready=ready)
        code = 0
    except BaseException as error:  # a border: this process must end here, and the caller hear why
        answer = _packed(error)
        if waiting:
            with contextlib.suppress(OSError):
                os.write(tell, json.dumps(answer).encode() + b"\n")
        else:
            with contextlib.suppress(BootseerError):
                Log(settings.log_file).say(answer["text"])
    finally:
        os._exit(code)


def _await(told: int, settings: MountSettings) -> None:
    data = b""
    # Not to the end of the pipe: the server's processes keep it open.
    while not data.endswith(b"\n"):
        if not select.select([told], [], [], START_LIMIT_S)[0]:
            raise StoreUnavailableError(
                f"mounting at {settings.mountpoint} took too long; see the log file, then "
                "`bootseer stripe umount` it"
            )
        more = os.read(told, 1 << 16)
        if not more:
            break
        data += more
    if not data:
        raise StoreUnavailableError(
            f"the server of {settings.mountpoint} ended before it served; try --foreground"
        )
    answer = json.loads(data)
    if answer:
        raise _unpacked(answer)


def _in_a_child(check: Callable[[], None]) -> None:
    """Do something that may start threads, in a process of its own; raises what it raised."""
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        answer: dict[str, Any] = {}
        try:
            os.close(told)
            check()
        except BaseException as error:  # a border: the parent raises it
            answer = _packed(error)
        finally:
            with contextlib.suppress(OSError):
                os.write(tell, json.dumps(answer).encode())
            os._exit(0)
    os.close(tell)
    data = b""
    try:
        while more := os.read(told, 1 << 16):
            data += more
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(told)
        os.waitpid(pid, 0)
    answer = json.loads(data or b'{"error": "StoreUnavailableError", "text": "looking failed"}')
    if answer:
        raise _unpacked(answer)


def _packed(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OSError) and not isinstance(error, BootseerError):
        error = from_os_error(error, "mount")
    if isinstance(error, BootseerError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "BootseerError", "text": f"mounting failed: {error!r}"}


def _unpacked(answer: dict[str, Any]) -> BootseerError:
    from bootseer import errors

    kind = getattr(errors, str(answer.get("error")), BootseerError)
    found: BootseerError = kind(answer.get("text"))
    return found


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
        select.select([process], [], [])
        with contextlib.suppress(BootseerError):
            unmount(mountpoint, lazily=True)

    threading.Thread(target=wait, name="stripe-for-pid", daemon=True).start()


def _users(target: str) -> list[str]:
    """Some processes that have a file or their directory there; only those we may look into."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if len(found) >= USERS_NAMED:
            break
        with contextlib.suppress(OSError):
            links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
            links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            if any(_below(link, target) for link in links):
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    found.append(f"{file.read().strip()} (process {pid})")
    return found


def _below(link: str, target: str) -> bool:
    try:
        path = os.readlink(link)
    except OSError:
        return False
    return path == target or path.startswith(f"{target}/")


def _nothing() -> None: ...
