"""Getting a mounted `/dev/fuse` descriptor, by whichever way this machine and user allow.

Nothing here looks into a mount of ours: its server may be this very process.
"""

from __future__ import annotations

import array
import errno
import os
import re
import socket
import stat
import subprocess
import threading
from typing import NamedTuple

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    NotFoundError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.fuse.options import MountOptions

DEVICE = "/dev/fuse"
KIND = "fuse.bootseer"
"""File system type of our mounts; no other is ever unmounted by us."""
OTHER_WAYS = (
    "read it without a mount: `bootseer stripe get`, the fsspec file system `striped::URL`, "
    "or `bootseer.stripedfs.open`"
)
MS_RDONLY, MS_NOSUID, MS_NODEV = 0x1, 0x2, 0x4
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 0x1, 0x2, 0x8
_CAP_SYS_ADMIN = 21
_FUSERMOUNT_S = 20.0
_PROBE_S = 2.0


class Mounted(NamedTuple):
    """One line of /proc/self/mountinfo."""

    target: str
    device: str
    kind: str


def parse_mountinfo(text: bytes) -> list[Mounted]:
    """Mounts in the order of mounting, so that the last one at a target is the visible one."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        fields, kind = left.split(b" "), right.split(b" ")[0]
        if len(fields) > 4:
            target = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), fields[4])
            found.append(Mounted(os.fsdecode(target), fields[2].decode(), kind.decode()))
    return found


def find_mount(mountpoint: str) -> Mounted | None:
    """What is mounted exactly at `mountpoint`; its parents are resolved, itself not touched."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    target = os.path.join(os.path.realpath(parent), name)
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = parse_mountinfo(file.read())
    return next((m for m in reversed(mounts) if m.target == target), None)


def can_mount() -> bool:
    """Whether this process is root with CAP_SYS_ADMIN (container roots often lack it)."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def open_mount(mountpoint: str, options: MountOptions) -> int:
    """Mount there and return the descriptor to serve (the caller's to close).

    `mountpoint` is a directory; or `/dev/fd/N`, a descriptor that a privileged parent mounted
    and left open; or `unix:PATH`, a socket over which it sends one (SCM_RIGHTS). A stale mount
    of ours, left by a server that crashed, is replaced. Raises NotFoundError, UsageError,
    BusyError (something serves there already), AccessDeniedError and NotSupportedError.
    """
    if mountpoint.startswith("/dev/fd/"):
        return _inherited(mountpoint)
    if mountpoint.startswith("unix:"):
        return receive_descriptor(mountpoint.removeprefix("unix:"))
    clear_stale(mountpoint)
    try:
        mode = os.stat(mountpoint).st_mode
    except OSError as error:
        raise from_os_error(error, f"mount at {mountpoint}") from error
    if not stat.S_ISDIR(mode):
        raise UsageError(f"cannot mount at {mountpoint}: it is no directory; name one")
    mount = _mount_as_root if can_mount() else _mount_by_helper
    return mount(mountpoint, options)


def is_passed(mountpoint: str) -> bool:
    """Whether somebody else mounted, and so unmounts."""
    return mountpoint.startswith(("/dev/fd/", "unix:"))


def _inherited(mountpoint: str) -> int:
    number = mountpoint.removeprefix("/dev/fd/")
    if not number.isdigit():
        raise UsageError(f"{mountpoint} names no descriptor; write /dev/fd/N with a number")
    try:
        is_device = stat.S_ISCHR(os.fstat(int(number)).st_mode)
    except OSError as error:
        raise UsageError(
            f"descriptor {number} is not open; have the parent pass a mounted {DEVICE} there"
        ) from error
    if not is_device:
        raise UsageError(f"descriptor {number} is no {DEVICE}; have the parent mount and pass one")
    os.set_inheritable(int(number), False)
    return int(number)


def receive_descriptor(path: str, timeout_s: float = 30.0) -> int:
    """Connect to the Unix socket `path` and take one mounted descriptor from it."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s)
            link.connect(path)
            return _take_descriptor(link)
    except OSError as error:
        raise from_os_error(error, f"receive a mounted {DEVICE} from the socket {path}") from error


def send_descriptor(link: socket.socket, descriptor: int) -> None:
    """The other side of `receive_descriptor`, on a connected Unix socket."""
    socket.send_fds(link, [b"\0"], [descriptor])


def _take_descriptor(link: socket.socket) -> int:
    """One descriptor, closed on exec from the start; socket.recv_fds cannot ask for that."""
    numbers = array.array("i")
    space = socket.CMSG_SPACE(numbers.itemsize)
    _, ancillary, _, _ = link.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: numbers.itemsize])
            return numbers[0]
    raise ConnectionAbortedError(errno.ECONNABORTED, "the other side sent no descriptor")


def open_device() -> int:
    """Open `/dev/fuse`. Raises NotSupportedError or AccessDeniedError, naming other ways."""
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise AccessDeniedError(
                f"{DEVICE} may not be opened here (container: device rule; host: its mode): pass a "
                f"mounted descriptor as /dev/fd/N, or {OTHER_WAYS}"
            ) from error
        raise NotSupportedError(
            f"no usable {DEVICE} here ({error.strerror}): load the fuse module or add the device "
            f"to the container, or {OTHER_WAYS}"
        ) from error


def _data(options: MountOptions) -> str:
    words = ["default_permissions", f"max_read={options.max_read_bytes}"]
    return ",".join(words + ["allow_other"] * options.allow_other)


def _mount_as_root(mountpoint: str, options: MountOptions) -> int:
    import ctypes

    descriptor = open_device()
    data = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if options.read_only else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.mount(
        options.fsname.encode(),
        os.fsencode(mountpoint),
        KIND.encode(),
        ctypes.c_ulong(flags),
        f"{data},{_data(options)}".encode(),
    )
    if code == 0:
        return descriptor
    number = ctypes.get_errno()
    os.close(descriptor)
    error = OSError(number, os.strerror(number), mountpoint)
    if number == errno.ENODEV:
        raise NotSupportedError(f"this kernel has no FUSE: {OTHER_WAYS}") from error
    if number == errno.EPERM:
        raise AccessDeniedError(
            f"mount at {mountpoint} was refused, though CAP_SYS_ADMIN is there (seccomp or "
            f"AppArmor): pass a mounted descriptor as /dev/fd/N, or {OTHER_WAYS}"
        ) from error
    raise from_os_error(error, f"mount at {mountpoint}") from error


def _mount_by_helper(mountpoint: str, options: MountOptions) -> int:
    """Mount through the setuid `fusermount3`, which sends the descriptor back."""
    os.close(open_device())  # its own message says less than ours
    words = [_data(options), f"fsname={options.fsname}", "subtype=bootseer", "nosuid", "nodev"]
    words += ["ro"] * options.read_only
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = _run_helper(
            ["-o", ",".join(words), "--", mountpoint],
            pass_fds=(theirs.fileno(),),
            environment={"_FUSE_COMMFD": str(theirs.fileno())},
        )
        if done.returncode:
            raise _refused(mountpoint, done.stderr.strip())
        ours.settimeout(_FUSERMOUNT_S)
        try:
            return _take_descriptor(ours)
        except OSError as error:
            raise from_os_error(error, f"take the descriptor of {mountpoint}") from error


def _refused(mountpoint: str, said: str) -> BootseerError:
    hint = "allow it, pass a mounted descriptor as /dev/fd/N, or " + OTHER_WAYS
    if "allow_other" in said:
        hint = "put user_allow_other in /etc/fuse.conf, or mount without allow_other"
    elif "ermitted" in said and _no_new_privileges():
        hint = "this process has no_new_privs: pass a mounted descriptor as /dev/fd/N, or "
        hint += OTHER_WAYS
    return AccessDeniedError(f"fusermount3 did not mount at {mountpoint} ({said}): {hint}")


def _no_new_privileges() -> bool:
    with open("/proc/self/status", encoding="ascii") as file:
        return any(line.split() == ["NoNewPrivs:", "1"] for line in file)


def _run_helper(
    words: list[str],
    *,
    pass_fds: tuple[int, ...] = (),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["fusermount3", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
            env={**base, **(environment or {})},
            timeout=_FUSERMOUNT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise NotSupportedError(
            "mounting without CAP_SYS_ADMIN needs fusermount3: install the package fuse3, or "
            + OTHER_WAYS
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotSupportedError(f"fusermount3 does not work here: {error}") from error


def set_read_ahead(mountpoint: str, kib: int) -> None:
    """Raise the kernel's read-ahead, once INIT is answered (which caps it at 128 KiB).

    Without the privilege, or for a passed descriptor, it stays as it is.
    """
    found = None if is_passed(mountpoint) else find_mount(mountpoint)
    if found is None:
        return
    try:
        with open(f"/sys/class/bdi/{found.device}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(kib))
    except OSError:
        pass  # slower reads of cold files, nothing else


def unmount(mountpoint: str, *, lazily: bool = False, force: bool = False) -> None:
    """Unmount, as root or through fusermount3. Raises BusyError while files are open there.

    `lazily` takes the name away now and the rest when its last file is closed; `force` also
    ends the connection, so that who waits gets ECONNABORTED. NotFoundError: nothing is there.
    """
    if can_mount():
        import ctypes

        flags = UMOUNT_NOFOLLOW | (MNT_DETACH if lazily else 0) | (MNT_FORCE if force else 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise BusyError(f"{mountpoint} is in use; close its files, or unmount it lazily")
        if number in (errno.EINVAL, errno.ENOENT):
            raise NotFoundError(f"nothing is mounted at {mountpoint}; check the path")
        error = OSError(number, os.strerror(number), mountpoint)
        raise from_os_error(error, f"unmount {mountpoint}") from error
    words = ["-u", "-q", *(["-z"] if lazily or force else []), "--", mountpoint]
    done = _run_helper(words)
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
