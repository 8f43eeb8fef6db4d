"""What this node's image servers say of themselves, for whoever mounts or unmounts beside them.

`<runtime>/images/<random>/` belongs to one server: `lock` (held by its processes as long as one of
them lives), `front/` (its FUSE mount), `meta` (a link to the metadata, which thereby names the
server in the list of mounts), `server.json` (once the image is mounted), `left` (once it is mounted
nowhere in the server's namespace: others may still use it), `ending` (once nobody will be served
any more), `metadata` (where the cache has no room for it), `touches` (what was recorded so far),
`ahead` (what others read ahead), `faults` (what readers meet: see `telling.FaultLog`), `asked`
(the tree of the container that was last asked to end). All of it goes with the server; what a
killed one left is removed by whoever comes next. Where somebody mounted over an image of ours, the
image cannot be unmounted, and its folder stays until it can.
`<runtime>/images/<digest>.lock` is held while an image is brought up, so that mounts of it that
begin at once end up with one server.
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
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock
from bootseer.system.mountinfo import MOUNTINFO, Mounted, all_mounts, shown_at

FRONT, LOCK, META, SERVER = "front", "lock", "meta", "server.json"
LEFT, ENDING = "left", "ending"
SPARE_META, TOUCHES, AHEAD = "metadata", "touches", "ahead"
FAULTS, ASKED = "faults", "asked"
_BORN_WITHIN_S = 3600.0
_ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has mounted its image. `device` and `source` as in /proc/self/mountinfo.

    `block_image` is the digest of the block image's manifest: no other may ever be served here.
    `handle` is what EROFS holds open in the front. One that is not `shared` has one mount alone.
    What is mounted from `sealed` data needs no server: it stays when its processes are gone.
    `bdis` is whose read-ahead can be set.
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


class State:
    """One server's folder, being made. The lock goes with the last process that inherited it."""

    def __init__(self, runtime: str) -> None:
        self.folder = os.path.join(runtime, "images", os.urandom(16).hex())
        self.front = os.path.join(self.folder, FRONT)
        self.meta = os.path.join(self.folder, META)
        try:
            os.makedirs(self.front, mode=0o700)
            # Locked before it has its name, or who looks at that moment takes us for dead.
            self.lock = file_lock.acquire(f"{self.folder}.lock")
            os.rename(f"{self.folder}.lock", os.path.join(self.folder, LOCK))
        except OSError as error:
            raise from_os_error(error, f"make {self.folder}") from error

    def tell(self, server: Server) -> None:
        """Say that the image is mounted."""
        path = os.path.join(self.folder, SERVER)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(server), file)
        os.rename(f"{path}.new", path)

    def leave(self) -> None:
        """Say that the image is mounted nowhere any more that we can see."""
        _mark(self.folder, LEFT)

    @property
    def server(self) -> Server | None:
        """What was told."""
        return _read(self.folder)

    def release(self) -> None:
        """This process has no part in the server; for the caller that started it."""
        self.lock.close()

    def remove(self) -> None:
        """Take away the image's mounts, the front and the folder; nothing raises."""
        _clear(self.folder)


def ask_to_end(folder: str, tree: str) -> None:
    """Say that the container on `tree`, a mount of a server's image, is asked to end now; nothing
    raises."""
    with contextlib.suppress(OSError), open(os.path.join(folder, ASKED), "wb") as file:
        file.write(os.fsencode(os.path.realpath(tree)))


def was_asked_to_end(server: Server) -> bool:
    """Whether the container was, within the last minute, that alone uses a server.

    One that goes on for longer does not mean to end.
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


def bringing_up(runtime: str, digest: str) -> FileLock:
    """Take the one right of this node to bring an image up; waits for it."""
    path = _lock_path(runtime, digest)
    try:
        return file_lock.acquire(path)
    except OSError as error:
        raise from_os_error(error, f"lock {path}") from error


@contextlib.contextmanager
def unused(runtime: str, digest: str) -> Iterator[bool]:
    """Whether no server here has an image; as long as the block lasts, none brings it up."""
    try:
        lock = file_lock.acquire(_lock_path(runtime, digest), limit_s=0)
    except OSError:
        yield False
        return
    with lock:
        yield all(server.digest != digest for server in known(runtime))


def servers(runtime: str) -> list[Server]:
    """All servers that live, or whose mount does; what dead ones left is removed."""
    base = os.path.join(runtime, "images")
    try:
        names = [name for name in os.listdir(base) if not name.endswith(".lock")]
    except OSError:
        return []
    out = []
    for name in names:
        folder = os.path.join(base, name)
        held, found = _is_held(folder), _read(folder)
        if not held and not (found is not None and _outlives(found)):
            _clear(folder)
        elif found is not None and serves(found):
            out.append(found)
    return out


def serves(server: Server) -> bool:
    """Whether a server has not said that it ends; what needs none is right in any case."""
    return server.sealed or (
        os.path.exists(os.path.join(server.state, SERVER))
        and not os.path.exists(os.path.join(server.state, ENDING))
    )


def lives(server: Server) -> bool:
    """Whether a process of a server is there still, and has not said that it ends."""
    return serves(server) and _is_held(server.state)


def _outlives(server: Server) -> bool:
    """Whether a mount is right without any process, and there."""
    return server.sealed and bool(mounts_of(server))


def known(runtime: str) -> list[Server]:
    """All servers that mounted an image and whose folder is there, dead ones too."""
    base = os.path.join(runtime, "images")
    try:
        names = os.listdir(base)
    except OSError:
        return []
    return [found for name in names if (found := _read(os.path.join(base, name))) is not None]


def sweep(folder: str, *, also_mounts: bool = False) -> None:
    """Remove what a server left, if none of its processes lives.

    A mount that needs no server stays, unless `also_mounts`.
    """
    if not _is_held(folder):
        _clear(folder, also_mounts=also_mounts)


def _is_held(folder: str) -> bool:
    """Whether a process of the server lives; one that has no lock yet is just being born."""
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
        return True  # gone meanwhile


def _read(folder: str) -> Server | None:
    try:
        with open(os.path.join(folder, SERVER), encoding="utf-8") as file:
            found = json.load(file)
            return Server(**{**found, "bdis": tuple(found.get("bdis", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _clear(folder: str, *, also_mounts: bool = False) -> None:
    server = _read(folder)
    if server is not None and not also_mounts and _outlives(server):
        return
    gone = unmount_all(server) if server is not None else _unmount_untold(folder)
    end_connection(folder)
    if gone:
        _remove(folder)


def end_connection(folder: str) -> None:
    """Take a server's front away: who still reads what could not be unmounted gets an error."""
    front = os.path.join(os.path.realpath(folder), FRONT)
    _take_away(lambda m: m.target == front and m.kind == FUSE, force=True)


def _unmount_untold(folder: str) -> bool:
    """Take away what a server mounted that was killed before it told of it; as `unmount_all`."""
    source = os.path.join(folder, META)
    return _take_away(lambda m: m.kind == EROFS and m.source == source)


def _take_away(ours: Callable[[Mounted], bool], *, force: bool = False) -> bool:
    """Unmount what is ours, in use or not; False where somebody else's mount lies over some.

    Unmounting goes by name, and a name leads to what was mounted there last.
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


def folder_of(mounted: Mounted, runtime: str) -> str:
    """The folder of a server that was killed before it told of a mount, "" for any other."""
    folder, name = os.path.split(mounted.source)
    base = os.path.realpath(os.path.join(runtime, "images"))
    ours = mounted.kind == EROFS and name == META and os.path.dirname(os.path.realpath(folder))
    return folder if ours == base and not os.path.exists(os.path.join(folder, SERVER)) else ""


def _remove(folder: str) -> None:
    of_server = (SERVER, f"{SERVER}.new", FAULTS, ASKED, LEFT, ENDING, LOCK)
    for name in (META, SPARE_META, TOUCHES, AHEAD, *of_server):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    for path in (os.path.join(folder, FRONT), folder):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def mounts_of(server: Server) -> list[Mounted]:
    """Where a server's image is mounted in this namespace, whole or in part.

    Numbers of devices are used again, so the mount's source must be the server's too.
    """
    return [mounted for mounted in all_mounts() if is_of(server, mounted)]


def is_of(server: Server, mounted: Mounted) -> bool:
    """Whether a mount is of a server's image."""
    of = (mounted.kind, mounted.device, mounted.source)
    return of == (EROFS, server.device, server.source)


def whole_at(server: Server) -> list[str]:
    """Paths that lead to all of a server's image: nothing of anybody's lies over it there."""
    mounts = all_mounts()
    whole = (m for m in mounts if m.root == "/" and is_of(server, m))
    return [m.target for m in whole if shown_at(mounts, m.target) == m]


def open_whole(server: Server, clone: Callable[[str], int]) -> int | None:
    """A descriptor of all of a server's image; None where no path leads to it any more.

    `clone` gives one of the tree at a path, or raises OSError.
    """
    for path in whole_at(server):
        try:
            tree = clone(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):  # unmounted meanwhile
                raise
            continue
        try:  # a descriptor stays with its tree, whatever is mounted there from now on
            about = os.fstat(tree)
        except OSError:
            os.close(tree)
            continue
        if server.device == f"{os.major(about.st_dev)}:{os.minor(about.st_dev)}":
            return tree
        os.close(tree)
    return None


def until_unmounted(server: Server, ended: Callable[[], bool]) -> bool:
    """Wait until a server's image is mounted nowhere in this namespace; False when `ended`."""
    with open(MOUNTINFO, "rb") as file:
        watched = select.poll()
        watched.register(file, select.POLLERR | select.POLLPRI)  # how the kernel tells changes
        while not ended():
            if not mounts_of(server):
                return True
            watched.poll(1000)
    return False


def unmount_all(server: Server) -> bool:
    """Take an image's mounts away, in use or not: nobody serves it any more.

    False where one is left, below a mount of somebody else's.
    """
    # First, so that who shares it at this moment sees this, or is seen below.
    _mark(server.state, ENDING)
    return _take_away(lambda mounted: is_of(server, mounted))
