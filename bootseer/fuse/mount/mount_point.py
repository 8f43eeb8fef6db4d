"""Finding and unmounting mounts; nothing here looks into one, but for one probe."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.errors import (
    BootseerError,
    BusyError,
    NotFoundError,
    NotSupportedError,
    from_os_error,
)
from bootseer.system import mount_calls
from bootseer.system.mountinfo import Mounted, all_mounts
from bootseer.system.proc_files import CAP_SYS_ADMIN, has_capability

if TYPE_CHECKING:
    import subprocess

KIND = "fuse.bootseer"
"""File system type of our mounts; no other is ever unmounted by us."""
OTHER_WAYS = (
    "read it without a mount: `bootseer stripe get`, the fsspec file system `striped::URL`, "
    "or `bootseer.stripedfs.open`"
)
HELPER = "fusermount3"
FUSERMOUNT_S = 20.0
_PROBE_S = 2.0
_MOST_LINKS = 40  # as the kernel


def find_mount(mountpoint: str) -> Mounted | None:
    """What is mounted exactly at `mountpoint`; links are followed, what is mounted not touched."""
    return _look(mountpoint)[1]


def _look(mountpoint: str) -> tuple[str, Mounted | None]:
    """The place that a name stands for, and what is mounted there.

    The last part of a name is looked at only when nothing is mounted there, which makes this
    differ from `os.path.realpath`: a mount whose server stands still would never answer.
    """
    mounts = {mounted.target: mounted for mounted in all_mounts()}  # the last one is on top
    path = mountpoint
    for _ in range(_MOST_LINKS):
        parent, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            path = os.path.realpath(path)
            break
        parent = os.path.realpath(parent)
        path = os.path.join(parent, name)
        if path in mounts:
            break
        try:
            path = os.path.join(parent, os.readlink(path))
        except OSError:
            break  # no link, or nothing that can be looked at
    return path, mounts.get(path)


def can_mount() -> bool:
    """Whether this process is root with CAP_SYS_ADMIN (container roots often lack it)."""
    return os.geteuid() == 0 and has_capability(CAP_SYS_ADMIN)


def is_passed(mountpoint: str) -> bool:
    """Whether somebody else mounted, and so unmounts."""
    return mountpoint.startswith(("/dev/fd/", "unix:"))


def absolute(mountpoint: str) -> str:
    """The place itself, whatever links lead there and wherever the process goes.

    Passed descriptors stay as they are.
    """
    return mountpoint if is_passed(mountpoint) else _look(mountpoint)[0]


def run_helper(
    words: list[str],
    *,
    pass_fds: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the setuid `fusermount3`. Raises NotSupportedError when there is none."""
    import subprocess  # most mounts do without

    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    try:
        return subprocess.run(
            [HELPER, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
            env={**base, **(environment or {})},
            timeout=FUSERMOUNT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise NotSupportedError(
            "mounting without CAP_SYS_ADMIN needs fusermount3: install the package fuse3, or "
            + OTHER_WAYS
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotSupportedError(f"fusermount3 does not work here: {error}") from error


def unmount(mountpoint: str, *, lazily: bool = False, force: bool = False) -> None:
    """Unmount, as root or through fusermount3. Raises BusyError while files are open there.

    `lazily` takes the name away now and the rest when its last file is closed; `force` also
    ends the connection, so that who waits gets ECONNABORTED. NotFoundError: nothing is there.
    """
    mountpoint = absolute(mountpoint)
    if can_mount():
        try:
            mount_calls.unmount(mountpoint, lazily=lazily, force=force)
        except OSError as error:
            if error.errno == errno.EBUSY:
                busy = f"{mountpoint} is in use; close its files, or unmount it lazily"
                raise BusyError(busy) from error
            if error.errno in (errno.EINVAL, errno.ENOENT):
                none = f"nothing is mounted at {mountpoint}; check the path"
                raise NotFoundError(none) from error
            raise from_os_error(error, f"unmount {mountpoint}") from error
        return
    words = ["-u", "-q", *(["-z"] if lazily or force else []), "--", mountpoint]
    done = run_helper(words)
    if done.returncode:
        if find_mount(mountpoint) is None:
            raise NotFoundError(f"nothing is mounted at {mountpoint}; check the path")
        raise BusyError(
            f"{mountpoint} cannot be unmounted ({done.stderr.strip() or 'in use'}); close its "
            "files, or unmount it lazily"
        )


def clear_stale(mountpoint: str) -> None:
    """Unmount what a crashed server of ours left at `mountpoint`; anything else is left alone.

    Raises BusyError when a living mount of ours is there.
    """
    found = find_mount(mountpoint)
    if found is None or found.kind != KIND:
        return
    if _answers(mountpoint):
        raise BusyError(f"{mountpoint} is mounted already; unmount it first")
    unmount(mountpoint, lazily=True)


def _answers(mountpoint: str) -> bool:
    """Whether a server stands behind the mount; one that says nothing for 2 s counts too.

    By statvfs, the one question whose answer the kernel does not keep; in a thread of its own,
    as the call cannot be given up and that server may be stopped.
    """
    dead: list[bool] = []

    def probe() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as error:
            dead.append(error.errno in (errno.ENOTCONN, errno.ECONNABORTED))

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return not any(dead)


def has_ended(descriptor: int) -> bool:
    """Whether the mount of a `/dev/fuse` descriptor is over (Linux: fs/fuse/dev.c, fuse_dev_poll).

    One that lost its name while files are open is not.
    """
    import select  # in the standard library of every server, and of nobody who only looks

    watched = select.poll()
    watched.register(descriptor, 0)
    return bool(watched.poll(0))


class MountPoint:
    """One mount of ours, known by its device number and source: whatever is put there later stays.

    While the mount lives its number is nobody else's. Once `ended` says that it is over, the
    kernel may have given the number to the next one, which may be a server's like ours: then only
    what nobody answers is taken for ours. A passed descriptor is somebody else's to unmount: every
    method does nothing for it.
    """

    def __init__(self, target: str, ended: Callable[[], bool] = lambda: False) -> None:
        self.target = target
        self._ended = ended
        found = None if is_passed(target) else find_mount(target)
        self._device, self._source = "", ""
        if found is not None and found.kind == KIND:
            self._device, self._source = found.device, found.source

    @property
    def present(self) -> bool:
        """Whether it is (still) what is mounted there."""
        if not self._device:
            return False
        over = self._ended()  # asked first: what is found while it is not over is ours
        found = find_mount(self.target)
        ours = (self._device, KIND, self._source)
        if found is None or (found.device, found.kind, found.source) != ours:
            return False
        return not (over and _answers(self.target))

    def unmount(self, *, lazily: bool = False, force: bool = False) -> None:
        """See `unmount`. Raises BusyError and the like; a mount that is gone is fine."""
        if self.present:
            with contextlib.suppress(NotFoundError):
                unmount(self.target, lazily=lazily, force=force)

    def abandon(self) -> None:
        """Nobody serves any more: end the connection, so that readers fail instead of waiting."""
        with contextlib.suppress(BootseerError):
            self.unmount(lazily=True, force=True)

    def set_read_ahead(self, kib: int) -> None:
        """Raise the kernel's read-ahead, once INIT is answered (which caps it at 128 KiB).

        Without the privilege, or for a passed descriptor, it stays as it is: cold reads are
        slower then, nothing else.
        """
        with contextlib.suppress(OSError):
            if self.present:
                path = f"/sys/class/bdi/{self._device}/read_ahead_kb"
                with open(path, "w", encoding="ascii") as file:
                    file.write(str(kib))
