"""What this node's image servers say of themselves, for whoever mounts or unmounts beside them.

`<runtime>/images/<random>/` belongs to one server: `lock` (held by its processes as long as one
of them lives), `front/` (its FUSE mount), `meta` (a link to the metadata, which thereby names the
server in the list of mounts), `server.json` (once the image is mounted), `left` (once it is
mounted nowhere in the server's namespace: others may still use it), `metadata` (where the cache
has no room for it), `touches` (what was recorded so far), `ahead` (what others read ahead). All of
it goes with the server; what a killed one left is removed by whoever comes next.
`<runtime>/images/<digest>.lock` is held while an image is brought up, so that mounts of it that
begin at once end up with one server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bootseer.blockimage.erofsmount import KIND as EROFS
from bootseer.errors import BootseerError, from_os_error
from bootseer.fuse.mounts import Mounted, find_mount, parse_mountinfo, unmount

FRONT, LOCK, META, SERVER, LEFT = "front", "lock", "meta", "server.json", "left"
SPARE_META, TOUCHES, AHEAD = "metadata", "touches", "ahead"
_BORN_WITHIN_S = 3600.0


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
            self.lock = _locked(f"{self.folder}.lock")
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
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(self.folder, LEFT), os.O_CREAT | os.O_WRONLY, 0o600))

    @property
    def server(self) -> Server | None:
        """What was told."""
        return _read(self.folder)

    def release(self) -> None:
        """This process has no part in the server; for the caller that started it."""
        os.close(self.lock)

    def remove(self) -> None:
        """Take away the image's mounts, the front and the folder; nothing raises."""
        _clear(self.folder)


def _locked(path: str, *, wait: bool = True) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def bringing_up(runtime: str, digest: str) -> Iterator[None]:
    """Hold the one right of this node to bring an image up; waits for it."""
    path = os.path.join(runtime, "images", f"{digest.replace(':', '-')}.lock")
    try:
        fd = _locked(path)
    except OSError as error:
        raise from_os_error(error, f"lock {path}") from error
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def unused(runtime: str, digest: str) -> Iterator[bool]:
    """Whether no server here has an image; as long as the block lasts, none brings it up."""
    try:
        fd = _locked(
            os.path.join(runtime, "images", f"{digest.replace(':', '-')}.lock"), wait=False
        )
    except OSError:
        yield False
        return
    try:
        yield all(server.digest != digest for server in known(runtime))
    finally:
        os.close(fd)


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
        elif found is not None:
            out.append(found)
    return out


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
    path = os.path.join(folder, LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not os.path.exists(os.path.join(folder, SERVER)) and _is_new(folder)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
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
    if server is not None:
        unmount_all(server)
    else:
        _unmount_untold(folder)
    front = os.path.join(folder, FRONT)
    with contextlib.suppress(BootseerError):
        if find_mount(front) is not None:
            unmount(front, lazily=True, force=True)
    _remove(folder)


def _unmount_untold(folder: str) -> None:
    """Take away what a server mounted that was killed before it told of it."""
    with open("/proc/self/mountinfo", "rb") as file:
        found = parse_mountinfo(file.read())
    for mounted in reversed(found):
        if mounted.kind == EROFS and mounted.source == os.path.join(folder, META):
            with contextlib.suppress(BootseerError):
                unmount(mounted.target, lazily=True)


def _remove(folder: str) -> None:
    for name in (META, SPARE_META, TOUCHES, AHEAD, SERVER, f"{SERVER}.new", LEFT, LOCK):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    for path in (os.path.join(folder, FRONT), folder):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def mounts_of(server: Server) -> list[Mounted]:
    """Where a server's image is mounted in this namespace, whole or in part.

    Numbers of devices are used again, so the mount's source must be the server's too.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        found = [m for m in parse_mountinfo(file.read()) if m.device == server.device]
    return [m for m in found if m.kind == EROFS and m.source == server.source]


def until_unmounted(server: Server, ended: Callable[[], bool]) -> bool:
    """Wait until a server's image is mounted nowhere in this namespace; False when `ended`."""
    with open("/proc/self/mountinfo", "rb") as file:
        watched = select.poll()
        watched.register(file, select.POLLERR | select.POLLPRI)  # how the kernel tells changes
        while not ended():
            if not mounts_of(server):
                return True
            watched.poll(1000)
    return False


def unmount_all(server: Server) -> None:
    """Take an image's mounts away, in use or not: nobody serves it any more."""
    for mounted in reversed(mounts_of(server)):
        with contextlib.suppress(BootseerError):
            unmount(mounted.target, lazily=True)
