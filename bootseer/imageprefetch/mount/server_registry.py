"""The image servers of this node: how they register, and how their mounts are found and removed.

`<runtime>/images/<random>/` belongs to one server:

- `lock`: held by its processes as long as one of them lives
- `front/`: its FUSE mount
- `meta`: a link to the metadata, by which the list of mounts names the server
- `server.json`: its record, once the image is mounted
- `left`: the image is not mounted in the server's namespace any more; others may still use it
- `ending`: the server answers no new readers
- `metadata`: the metadata, where the cache has no room for it
- `touches`: what was recorded so far
- `ahead`: what other processes read ahead
- `faults`: the faults of reads (`mount_events.FaultLog`)
- `asked`: the tree of the container that was last asked to end

A server removes all of it at its end; what a killed one left is removed by the next mount. Where
something else is mounted over an image of ours, the image cannot be unmounted, and its folder
stays until it can.
`<runtime>/images/<digest>.lock` is held while an image is brought up, so that concurrent mounts of
it share one server.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import time
from collections.abc import Callable, Iterator

from bootseer import light_dataclasses as dataclasses
from bootseer.blockimage.erofs_mount import KIND as EROFS
from bootseer.errors import BootseerError, from_os_error
from bootseer.fuse.mount.mount_point import KIND as FUSE
from bootseer.fuse.mount.mount_point import unmount
from bootseer.light_dataclasses import dataclass
from bootseer.system import atomic, file_lock
from bootseer.system.file_lock import FileLock
from bootseer.system.mountinfo import MOUNTINFO, Mounted, all_mounts, shown_at

FRONT, LOCK, META, SERVER = "front", "lock", "meta", "server.json"
LEFT, ENDING = "left", "ending"
SPARE_META, TOUCHES, AHEAD = "metadata", "touches", "ahead"
FAULTS, ASKED = "faults", "asked"
_BORN_WITHIN_S = 3600.0
_ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The record of a server that has mounted its image.

    `device` and `source` are as in /proc/self/mountinfo. `block_image` is the digest of the block
    image's manifest: the server must never serve another. `handle` is what EROFS holds open in the
    FUSE mount. A server that is not `shared` has only one mount. An image mounted from `sealed`
    data needs no server: it stays when the processes have ended. `bdis` are the devices whose
    read-ahead can be set.
    """

    digest: str
    block_image: str
    workload: str
    device: str
    source: str
    handle: int
    data_bytes: int
    loop: bool
    shared: bool
    state: str
    supervisor: int
    sealed: bool = False
    bdis: tuple[str, ...] = ()


class ServerFolder:
    """One server's folder. `lock` is freed with the last process that inherited the descriptor."""

    def __init__(self, folder: str, lock: FileLock) -> None:
        self.folder, self.lock = folder, lock
        self.front = os.path.join(folder, FRONT)
        self.meta = os.path.join(folder, META)

    @classmethod
    def create(cls, runtime: str) -> ServerFolder:
        """Make the folder of a new server, and lock it."""
        folder = os.path.join(runtime, "images", os.urandom(16).hex())
        try:
            os.makedirs(os.path.join(folder, FRONT), mode=0o700)
            # Locked before it has its name, or another process would take the server for dead.
            lock = file_lock.acquire(f"{folder}.lock")
            os.rename(f"{folder}.lock", os.path.join(folder, LOCK))
        except OSError as error:
            raise from_os_error(error, f"make {folder}") from error
        return cls(folder, lock)

    def register(self, server: ServerRecord) -> None:
        """Write the server's record: the image is mounted."""
        data = json.dumps(dataclasses.asdict(server)).encode()
        # Not synced: no server outlives a power cut.
        atomic.replace_file(os.path.join(self.folder, SERVER), data, sync=False)

    def mark_left(self) -> None:
        """Note that the image is not mounted in this namespace any more."""
        _mark(self.folder, LEFT)

    @property
    def server(self) -> ServerRecord | None:
        """The server's record, once it has registered."""
        return _read(self.folder)

    def release(self) -> None:
        """Close the lock in the process that started the server, which is no part of it."""
        self.lock.close()

    def remove(self) -> None:
        """Remove the image's mounts, the FUSE mount and the folder; nothing raises."""
        _clear(self.folder)


def note_end_request(folder: str, tree: str) -> None:
    """Note that the container on `tree`, a mount of a server's image, is asked to end now.

    Nothing raises.
    """
    with contextlib.suppress(OSError), open(os.path.join(folder, ASKED), "wb") as file:
        file.write(os.fsencode(os.path.realpath(tree)))


def is_asked_to_end(server: ServerRecord) -> bool:
    """Whether the only container of a server was asked to end within the last minute.

    A container that runs for longer does not mean to end.
    """
    try:
        with open(os.path.join(server.state, ASKED), "rb") as file:
            since_s = time.time() - os.fstat(file.fileno()).st_mtime
            tree = os.fsdecode(file.read())
    except OSError:
        return False
    return since_s < _ASKED_S and [m.target for m in mounts_of(server)] == [tree]


def _mark(folder: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY, 0o600))


def _lock_path(runtime: str, digest: str) -> str:
    return os.path.join(runtime, "images", f"{digest.replace(':', '-')}.lock")


def lock_image(runtime: str, digest: str, *, limit_s: float | None = None) -> FileLock:
    """Take the lock under which a node brings an image up; waits for it, for `limit_s` at most."""
    path = _lock_path(runtime, digest)
    try:
        return file_lock.acquire(path, limit_s=limit_s)
    except OSError as error:
        raise from_os_error(error, f"lock {path}") from error


@contextlib.contextmanager
def lock_if_unused(runtime: str, digest: str) -> Iterator[bool]:
    """Whether no server of this node has an image; within the block none can bring it up."""
    try:
        lock = file_lock.acquire(_lock_path(runtime, digest), limit_s=0)
    except OSError:
        yield False
        return
    with lock:
        yield all(server.digest != digest for server in list_records(runtime))


def list_servers(runtime: str) -> list[ServerRecord]:
    """The servers that accept mounts; what dead servers left is removed."""
    base = os.path.join(runtime, "images")
    try:
        names = [name for name in os.listdir(base) if not name.endswith(".lock")]
    except OSError:
        return []
    out = []
    for name in names:
        folder = os.path.join(base, name)
        is_held, server = _is_held(folder), _read(folder)
        if not is_held and not (server is not None and _needs_no_process(server)):
            _clear(folder)
        elif server is not None and is_serving(server):
            out.append(server)
    return out


def is_serving(server: ServerRecord) -> bool:
    """Whether a server is not ending, or its image needs no server."""
    return server.sealed or (
        os.path.exists(os.path.join(server.state, SERVER))
        and not os.path.exists(os.path.join(server.state, ENDING))
    )


def is_alive(server: ServerRecord) -> bool:
    """Whether a process of a server lives and is not ending."""
    return is_serving(server) and _is_held(server.state)


def _needs_no_process(server: ServerRecord) -> bool:
    """Whether an image is mounted and needs no server."""
    return server.sealed and bool(mounts_of(server))


def list_records(runtime: str) -> list[ServerRecord]:
    """The records of all servers whose folder exists, dead ones included."""
    base = os.path.join(runtime, "images")
    try:
        names = os.listdir(base)
    except OSError:
        return []
    records = [_read(os.path.join(base, name)) for name in names]
    return [server for server in records if server is not None]


def sweep(folder: str, *, also_mounts: bool = False) -> None:
    """Remove the folder of a server of which no process lives.

    A mount that needs no server stays, unless `also_mounts`.
    """
    if not _is_held(folder):
        _clear(folder, also_mounts=also_mounts)


def _is_held(folder: str) -> bool:
    """Whether a process of the server lives; a server without a lock file is just starting."""
    try:
        file_lock.acquire(os.path.join(folder, LOCK), create=False, limit_s=0).close()
    except FileNotFoundError:
        return not os.path.exists(os.path.join(folder, SERVER)) and _is_new(folder)
    except OSError:
        return True
    return False


def _is_new(folder: str) -> bool:
    try:
        return time.time() - os.stat(folder).st_mtime < _BORN_WITHIN_S
    except OSError:
        return True  # removed meanwhile


def _read(folder: str) -> ServerRecord | None:
    try:
        with open(os.path.join(folder, SERVER), encoding="utf-8") as file:
            fields = json.load(file)
            return ServerRecord(**{**fields, "bdis": tuple(fields.get("bdis", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _clear(folder: str, *, also_mounts: bool = False) -> None:
    server = _read(folder)
    if server is not None and not also_mounts and _needs_no_process(server):
        return
    is_unmounted = unmount_all(server) if server is not None else _unmount_unregistered(folder)
    abort_connection(folder)
    if is_unmounted:
        _remove(folder)


def abort_connection(folder: str) -> None:
    """Abort a server's FUSE mount: reads of what could not be unmounted fail from now on."""
    front = os.path.join(os.path.realpath(folder), FRONT)
    _unmount_where(lambda m: m.target == front and m.kind == FUSE, force=True)


def _unmount_unregistered(folder: str) -> bool:
    """As `unmount_all`, for a server that was killed after the mount and before it registered."""
    source = os.path.join(folder, META)
    return _unmount_where(lambda m: m.kind == EROFS and m.source == source)


def _unmount_where(ours: Callable[[Mounted], bool], *, force: bool = False) -> bool:
    """Unmount our mounts, in use or not; False where a foreign mount covers one of them.

    A mount is unmounted by its path, which leads to what was mounted there last.
    """
    failed: set[int] = set()
    while True:
        mounts = all_mounts()
        mine = [m for m in mounts if ours(m)]
        shown = (m for m in mine if m.number not in failed and shown_at(mounts, m.target) == m)
        mounted = next(shown, None)
        if mounted is None:
            return not mine
        try:
            unmount(mounted.target, lazily=True, force=force)
        except BootseerError:
            failed.add(mounted.number)


def unregistered_folder(mounted: Mounted, runtime: str) -> str:
    """The folder of a server that was killed before it registered its mount, "" for any other."""
    folder, name = os.path.split(mounted.source)
    base = os.path.realpath(os.path.join(runtime, "images"))
    ours = mounted.kind == EROFS and name == META and os.path.dirname(os.path.realpath(folder))
    return folder if ours == base and not os.path.exists(os.path.join(folder, SERVER)) else ""


def _remove(folder: str) -> None:
    draft = f"{SERVER}.new"  # of an earlier version
    of_server = (SERVER, draft, FAULTS, ASKED, LEFT, ENDING, LOCK)
    names = [META, SPARE_META, TOUCHES, AHEAD, *of_server]
    with contextlib.suppress(OSError):
        names += [name for name in os.listdir(folder) if name.startswith(atomic.PREFIX)]
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    for path in (os.path.join(folder, FRONT), folder):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def mounts_of(server: ServerRecord) -> list[Mounted]:
    """The mounts of a server's image in this namespace, whole or in part.

    Device numbers are used again, so the mount's source must be the server's too.
    """
    return [mounted for mounted in all_mounts() if is_mount_of(server, mounted)]


def is_mount_of(server: ServerRecord, mounted: Mounted) -> bool:
    """Whether a mount is of a server's image."""
    return (mounted.kind, mounted.device, mounted.source) == (EROFS, server.device, server.source)


def whole_paths(server: ServerRecord) -> list[str]:
    """The paths at which all of a server's image is visible: nothing else is mounted over it."""
    mounts = all_mounts()
    whole = (m for m in mounts if m.root == "/" and is_mount_of(server, m))
    return [m.target for m in whole if shown_at(mounts, m.target) == m]


def open_whole_tree(server: ServerRecord, clone: Callable[[str], int]) -> int | None:
    """A descriptor of all of a server's image; None where it is not visible any more.

    `clone` gives one of the tree at a path, or raises OSError.
    """
    for path in whole_paths(server):
        try:
            tree = clone(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):  # unmounted meanwhile
                raise
            continue
        try:  # a descriptor stays with its tree, whatever is mounted at the path from now on
            status = os.fstat(tree)
        except OSError:
            os.close(tree)
            continue
        if server.device == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}":
            return tree
        os.close(tree)
    return None


def await_unmount(server: ServerRecord, ended: Callable[[], bool]) -> bool:
    """Wait until a server's image is mounted nowhere in this namespace; False when `ended`."""
    with open(MOUNTINFO, "rb") as file:
        watched = select.poll()
        watched.register(file, select.POLLERR | select.POLLPRI)  # the kernel's sign of changes
        while not ended():
            if not mounts_of(server):
                return True
            watched.poll(1000)
    return False


def unmount_all(server: ServerRecord) -> bool:
    """Unmount an image everywhere, in use or not: it is not served any more.

    False where one is left below a foreign mount.
    """
    # First, so that a mount that shares it at this moment either sees this or is unmounted below.
    _mark(server.state, ENDING)
    return _unmount_where(lambda mounted: is_mount_of(server, mounted))
