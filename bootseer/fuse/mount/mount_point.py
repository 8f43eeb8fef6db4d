"""Finding what is mounted, and unmounting it. Only `_answers` asks a mount's server."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import (
    BootseerError,
    BusyError,
    NotFoundError,
    NotSupportedError,
    from_os_error,
)
from bootseer.fuse.mount import agent_mount
from bootseer.system import mount_calls
from bootseer.system.mountinfo import Mounted, all_mounts
from bootseer.system.processes import CAP_SYS_ADMIN, has_capability, users_of

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
_CONNECTIONS = "/sys/fs/fuse/connections"
_PROBE_S = 2.0
_MOST_LINKS = 40  # as the kernel


def find_mount(mountpoint: str) -> Mounted | None:
    """What is mounted exactly at `mountpoint`; links are followed, what is mounted not touched."""
    return _resolve(mountpoint)[1]


def _resolve(mountpoint: str) -> tuple[str, Mounted | None]:
    """The path that a name leads to, and what is mounted there.

    Unlike `os.path.realpath` it does not follow the last part of a name where something is
    mounted: a mount whose server hangs would never answer.
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
            break  # no link, or not to be read
    return path, mounts.get(path)


def can_mount() -> bool:
    """Whether this process is root with CAP_SYS_ADMIN (container roots often lack it)."""
    return os.geteuid() == 0 and has_capability(CAP_SYS_ADMIN)


def is_passed(mountpoint: str) -> bool:
    """Whether another process mounted, and so unmounts."""
    return mountpoint.startswith(("/dev/fd/", "unix:"))


def absolute(mountpoint: str) -> str:
    """The absolute path without symbolic links; passed descriptors stay as they are."""
    return mountpoint if is_passed(mountpoint) else _resolve(mountpoint)[0]


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

    `lazily` removes the name now and the rest when its last file is closed; `force` also ends
    the connection, so that pending requests fail with ECONNABORTED. NotFoundError: nothing is
    mounted there.
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
    if agent_mount.is_there():
        users = [] if lazily or force else users_of(mountpoint)
        if users:  # the agent unmounts lazily
            raise make_busy_error(mountpoint, users)
        try:
            agent_mount.unmount_by_agent(mountpoint)
        except BootseerError:  # it may be fusermount3's
            pass
        else:
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


def make_busy_error(mountpoint: str, users: Sequence[str]) -> BusyError:
    """The error of an unmount that a command was asked for, with the users that can be seen."""
    by = f" by {', '.join(users)}" if users else ""
    return BusyError(
        f"{mountpoint} is in use{by}; end that, or give --lazy to unmount it all the same"
    )


def clear_stale(mountpoint: str) -> None:
    """Unmount what a crashed server of ours left at `mountpoint`, and nothing else.

    Raises BusyError when a mount of ours is served there.
    """
    mounted = find_mount(mountpoint)
    if mounted is None or mounted.kind != KIND:
        return
    if _answers(mountpoint):
        raise BusyError(f"{mountpoint} is mounted already; unmount it first")
    unmount(mountpoint, lazily=True)


def _answers(mountpoint: str) -> bool:
    """Whether the mount has a server; one that is silent for 2 s counts as one.

    By statvfs, whose answer the kernel never caches; in a thread of its own, as the call cannot
    be interrupted and that server may be stopped.
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
    """Whether the mount of a `/dev/fuse` descriptor has ended (fuse_dev_poll in fs/fuse/dev.c).

    A mount that lost its name while files are open has not ended.
    """
    import select  # callers that only look at mounts do without

    watched = select.poll()
    watched.register(descriptor, 0)
    return bool(watched.poll(0))


class MountPoint:
    """One mount of ours, known by its device number and source, whatever is mounted there later.

    While the mount lives no other has its number. Once `ended` says that it is over, the kernel
    may have given the number to the next mount, which may be another server's: from then on only
    a mount whose server does not answer is taken for ours. A passed descriptor is unmounted by
    the process that mounted it: for one, every method does nothing.
    """

    def __init__(
        self, target: str, device: str, source: str, ended: Callable[[], bool] | None
    ) -> None:
        self.target = target
        self._device, self._source = device, source
        self._ended = ended

    @classmethod
    def find(cls, target: str, ended: Callable[[], bool] | None = None) -> MountPoint:
        """The mount of ours that is at `target` now; see `present` for whether there is one."""
        mounted = None if is_passed(target) else find_mount(target)
        if mounted is None or mounted.kind != KIND:
            return cls(target, "", "", ended)
        return cls(target, mounted.device, mounted.source, ended)

    @property
    def present(self) -> bool:
        """Whether it is (still) what is mounted there."""
        if not self._device:
            return False
        # Asked before looking: while it is not over, what is mounted there is ours.
        over = self._ended is not None and self._ended()
        mounted = find_mount(self.target)
        ours = (self._device, KIND, self._source)
        if mounted is None or (mounted.device, mounted.kind, mounted.source) != ours:
            return False
        return not (over and _answers(self.target))

    def unmount(self, *, lazily: bool = False, force: bool = False) -> None:
        """See `unmount`. Raises BusyError and the like, but not where it is unmounted already."""
        if self.present:
            with contextlib.suppress(NotFoundError):
                unmount(self.target, lazily=lazily, force=force)

    def abandon(self) -> None:
        """End the connection of a mount without a server, so that readers fail and do not wait.

        Those of other mount namespaces too: a namespace that was made while it was mounted has a
        copy, which is not unmounted with it where mounts are not shared.
        """
        with contextlib.suppress(BootseerError):
            self.unmount(lazily=True, force=True)
        if self._device and self._ended is not None and not self._ended():
            with contextlib.suppress(OSError):
                self._abort(self._ended)

    def _abort(self, ended: Callable[[], bool]) -> None:
        """End the connection by its number (fs/fuse/control.c), which needs no mount point."""
        number = self._device.partition(":")[2]
        try:
            connections = mount_calls.make_mount("fusectl")
        except OSError:  # without the privilege, in a user namespace, or on a kernel before 5.2
            connections = os.open(_CONNECTIONS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            control = os.open(f"{number}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
        finally:
            os.close(connections)
        try:
            # Looked at again: the number may have been another mount's when this was opened. If
            # ours ends only now, the write does nothing.
            if not ended():
                os.write(control, b"1")
        finally:
            os.close(control)

    def set_read_ahead(self, kib: int) -> None:
        """Raise the kernel's read-ahead after INIT, which caps it at 128 KiB.

        Without the privilege, or for a passed descriptor, it stays as it is, and cold reads are
        slower.
        """
        with contextlib.suppress(OSError):
            if self.present:
                path = f"/sys/class/bdi/{self._device}/read_ahead_kb"
                with open(path, "w", encoding="ascii") as file:
                    file.write(str(kib))
