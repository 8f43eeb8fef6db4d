"""Mounting EROFS: metadata in a local file, data in a file of another file system.

Linux 6.12 mounts both files as they are. Older kernels need a block device for each, so there a
loop device stands over each file and goes when the mount does (autoclear).

Sources: mount(2), loop(4) and `linux/loop.h` for the loop device's calls and structure.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from typing import NamedTuple

from bootseer.errors import BusyError, NotSupportedError, from_os_error
from bootseer.system.mount_calls import (
    ATTR_ATIME,
    ATTR_NOATIME,
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REMOUNT,
    attach_tree,
    change_tree,
    clone_tree,
    mount,
)
from bootseer.system.mountinfo import all_mounts

KIND = "erofs"
READ_AHEAD_KIB = 16  # also while recording: what is recorded is what will be asked for again
_BDI = "/sys/class/bdi"
_LOOP_CONTROL = "/dev/loop-control"
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_LO_READ_ONLY, _LO_AUTOCLEAR, _LO_DIRECT_IO = 1, 4, 16
_LOOP_TRIES = 16
_LOOP_MAJOR = 7
# struct loop_config: fd, block size, struct loop_info64 (its flags at byte 52), 64 bytes spare
_LOOP_CONFIG = struct.Struct("<II52xI176x64x")
_NO_FILES = (errno.ENOTBLK, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)


class Erofs(NamedTuple):
    """A mounted image: `device` and `source` as in /proc/self/mountinfo; whether over loops.

    `bdis` are what `set_read_ahead` sets.
    """

    device: str
    source: str
    loop: bool
    bdis: tuple[str, ...]


def clone(source: str) -> int:
    """A descriptor of the tree mounted at `source`, to be shown elsewhere; raises OSError."""
    return clone_tree(source)


def attach(tree: int, target: str, *, nosuid: bool) -> None:
    """Show what `clone` gave at a place, setuid programs and devices working there or not.

    At no moment are they allowed where they should not be; raises OSError.
    """
    kept = ATTR_NOSUID | ATTR_NODEV
    wanted = ATTR_RDONLY | ATTR_NOATIME | (kept if nosuid else 0)
    change_tree(tree, add=wanted, remove=ATTR_ATIME | (0 if nosuid else kept))
    attach_tree(tree, target)


def restrict(target: str, *, nosuid: bool) -> None:
    """Let setuid programs and devices below `target` work there, or not; raises OSError.

    Other places that show the same tree are as they were.
    """
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOATIME
    mount("none", target, "none", flags | (MS_NOSUID | MS_NODEV if nosuid else 0))


def mount_erofs(meta: str, data: str, target: str, *, loop: bool | None = None) -> Erofs:
    """Mount the image whose metadata is the file `meta` and whose data is the file `data`.

    `loop` says whether to use loop devices; None uses them only where the kernel needs them. The
    data's server must answer from another thread. Raises NotSupportedError where the kernel has no
    EROFS, or neither way works, and the errors of other faults.
    """
    before = _bdis()
    if loop is not True:
        try:
            mount(meta, target, KIND, MS_RDONLY | MS_NOATIME, f"device={data}")
            # The kernel does not say which one belongs to a mount. One that another mount made
            # at the same time may be among them; it gets the same read-ahead.
            bdis = tuple(_bdis() - before)
            set_read_ahead(bdis, READ_AHEAD_KIB)
            return _find_mounted(target, meta, bdis, loop=False)
        except OSError as error:
            if error.errno not in _NO_FILES or loop is False:
                raise _explain_refusal(error, target) from error
    devices: list[int] = []
    try:
        paths = [_attach(path, devices) for path in (meta, data)]
        mount(paths[0], target, KIND, MS_RDONLY | MS_NOATIME, f"device={paths[1]}")
        bdis = tuple(f"{_LOOP_MAJOR}:{path.removeprefix('/dev/loop')}" for path in paths)
        set_read_ahead(bdis, READ_AHEAD_KIB)
    except OSError as error:
        raise _explain_refusal(error, target) from error
    finally:
        for device in devices:
            os.close(device)  # unmounted ones go with their last descriptor
    return _find_mounted(target, paths[0], bdis, loop=True)


def _explain_refusal(error: OSError, target: str) -> Exception:
    if error.errno == errno.ENODEV:
        return NotSupportedError(
            "this kernel has no EROFS: load its module (modprobe erofs), or record and replay "
            "files inside the container (`bootseer image files`)"
        )
    return from_os_error(error, f"mount the image at {target}")


def _find_mounted(target: str, source: str, bdis: tuple[str, ...], *, loop: bool) -> Erofs:
    """Find what was just mounted; another process may have mounted over it already."""
    parent, name = os.path.split(os.path.abspath(target))
    ours = (os.path.join(os.path.realpath(parent), name), KIND, source)
    mounts = reversed(all_mounts())
    mounted = next((m for m in mounts if (m.target, m.kind, m.source) == ours), None)
    if mounted is None:
        raise BusyError(f"the image at {target} was unmounted again at once, by another process")
    return Erofs(mounted.device, mounted.source, loop, bdis)


# --- read-ahead -------------------------------------------------------------------------------


def _bdis() -> frozenset[str]:
    try:
        return frozenset(name for name in os.listdir(_BDI) if name.startswith(KIND))
    except OSError:
        return frozenset()


def set_read_ahead(bdis: tuple[str, ...], kib: int) -> None:
    """How far the kernel reads ahead in files that are opened from now on."""
    for bdi in bdis:
        try:
            with open(f"{_BDI}/{bdi}/read_ahead_kb", "w", encoding="ascii") as file:
                file.write(str(kib))
        except OSError:
            pass  # the only effect: more or less than the best amount is read ahead


# --- loop devices -----------------------------------------------------------------------------


def _attach(path: str, devices: list[int]) -> str:
    """A loop device over a file; its descriptor goes to `devices`. Raises OSError."""
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_LOOP_TRIES):
            device = _free_device()
            fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _configure(fd, backing)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # another process took it meanwhile
                    raise
            else:
                devices.append(fd)
                return device
        raise OSError(errno.EBUSY, "no free loop device", path)
    finally:
        os.close(backing)


def _free_device() -> str:
    control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        number = fcntl.ioctl(control, _GET_FREE)
    finally:
        os.close(control)
    device = f"/dev/loop{number}"
    if not os.path.exists(device):  # in a container, whose /dev does not grow
        os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
    return device


def _configure(fd: int, backing: int) -> None:
    flags = _LO_READ_ONLY | _LO_AUTOCLEAR
    for direct in (_LO_DIRECT_IO, 0):
        try:
            fcntl.ioctl(fd, _CONFIGURE, _LOOP_CONFIG.pack(backing, 4096, flags | direct))
            return
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
