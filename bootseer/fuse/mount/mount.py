"""Mounting: a `/dev/fuse` descriptor, in the way that this machine and user allow."""

from __future__ import annotations

import array
import errno
import os
import stat
from typing import TYPE_CHECKING

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.fuse.mount import agent_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import (
    FUSERMOUNT_S,
    KIND,
    OTHER_WAYS,
    can_mount,
    clear_stale,
    run_helper,
)
from bootseer.system import mount_calls
from bootseer.system.mount_calls import MS_NODEV, MS_NOSUID, MS_RDONLY
from bootseer.system.processes import own_status

if TYPE_CHECKING:
    import socket

DEVICE = "/dev/fuse"


def open_mount(mountpoint: str, options: MountOptions) -> int:
    """Mount and return the descriptor to serve, which the caller closes.

    `mountpoint` is a directory; or `/dev/fd/N`, a descriptor that a privileged parent mounted
    and left open; or `unix:PATH`, a socket over which it sends one (SCM_RIGHTS). Without the
    privilege the node's agent mounts, where there is one, or else `fusermount3`. A stale mount
    of ours, left by a server that crashed, is replaced. Raises NotFoundError, UsageError,
    BusyError (a mount of ours is served there, without `over`), AccessDeniedError and
    NotSupportedError.
    """
    if mountpoint.startswith("/dev/fd/"):
        return _check_inherited(mountpoint)
    if mountpoint.startswith("unix:"):
        return receive_descriptor(mountpoint.removeprefix("unix:"))
    if not options.over:
        clear_stale(mountpoint)
    try:
        mode = os.stat(mountpoint).st_mode
    except OSError as error:
        raise from_os_error(error, f"mount at {mountpoint}") from error
    if not stat.S_ISDIR(mode):
        raise UsageError(f"cannot mount at {mountpoint}: it is no directory; name one")
    if can_mount():
        return _mount_as_root(mountpoint, options)
    if not agent_mount.is_there() or options.allow_other:
        return _mount_by_helper(mountpoint, options)
    try:
        return agent_mount.mount_by_agent(mountpoint, options)
    except BootseerError as error:
        try:
            return _mount_by_helper(mountpoint, options)
        except BootseerError as further:
            raise type(further)(f"{further}; {error}") from error


def _check_inherited(mountpoint: str) -> int:
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
    """Connect to the Unix socket `path` and receive one mounted descriptor from it."""
    import socket  # takes milliseconds, and a mount by root does without

    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s)
            link.connect(path)
            return _receive(link)
    except OSError as error:
        raise from_os_error(error, f"receive a mounted {DEVICE} from the socket {path}") from error


def _receive(link: socket.socket) -> int:
    """One descriptor, closed on exec from the start; socket.recv_fds cannot ask for that."""
    import socket

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
    descriptor = open_device()
    data = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if options.read_only else 0)
    try:
        mount_calls.mount(options.fsname, mountpoint, KIND, flags, f"{data},{_data(options)}")
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.ENODEV:
            raise NotSupportedError(f"this kernel has no FUSE: {OTHER_WAYS}") from error
        if error.errno == errno.EPERM:
            raise AccessDeniedError(
                f"mount at {mountpoint} was refused, though CAP_SYS_ADMIN is there (seccomp or "
                f"AppArmor): pass a mounted descriptor as /dev/fd/N, or {OTHER_WAYS}"
            ) from error
        raise from_os_error(error, f"mount at {mountpoint}") from error
    return descriptor


def _mount_by_helper(mountpoint: str, options: MountOptions) -> int:
    """Mount through the setuid `fusermount3`, which sends the descriptor back."""
    import socket

    os.close(open_device())  # for our error message, as that of fusermount3 says less
    words = [_data(options), f"fsname={options.fsname}", "subtype=bootseer", "nosuid", "nodev"]
    words += ["ro"] * options.read_only
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = run_helper(
            ["-o", ",".join(words), "--", mountpoint],
            pass_fds=(theirs.fileno(),),
            environment={"_FUSE_COMMFD": str(theirs.fileno())},
        )
        if done.returncode:
            raise _refusal(mountpoint, done.stderr.strip())
        ours.settimeout(FUSERMOUNT_S)
        try:
            return _receive(ours)
        except OSError as error:
            raise from_os_error(error, f"take the descriptor of {mountpoint}") from error


def _refusal(mountpoint: str, message: str) -> BootseerError:
    hint = "allow it, pass a mounted descriptor as /dev/fd/N, or " + OTHER_WAYS
    if "allow_other" in message:
        hint = "put user_allow_other in /etc/fuse.conf, or mount without allow_other"
    elif "ermitted" in message and own_status("NoNewPrivs") == "1":
        hint = "this process has no_new_privs: pass a mounted descriptor as /dev/fd/N, or "
        hint += OTHER_WAYS
    return AccessDeniedError(f"fusermount3 did not mount at {mountpoint} ({message}): {hint}")
