"""Files that the kernel reads from a backing file itself (passthrough, Linux 6.9 and newer)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
import threading

from bootseer.fuse.operations import Inode, Opened
from bootseer.fuse.protocol import replies
from bootseer.reporting import Reporter

_SLOT = struct.Struct("<QII")
_SLOTS = 1 << 16
NONE = (0, 0)
_FIRST_KERNEL = (6, 9)


def is_supported() -> bool:
    """Whether this kernel is new enough; it may still refuse a file."""
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return numbers is not None and tuple(map(int, numbers.groups())) >= _FIRST_KERNEL


class OpenInodes:
    """The backing id (0 = served by us) and the number of handles of each open inode.

    In memory that the next server of the mount shares, as the handles outlive a server. One
    writer at a time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOTS * _SLOT.size)
        self._slots: dict[Inode, int] = {}
        self._free: list[int] = []
        self._used = 0

    def take_over(self) -> None:
        """Read the entries of the server before this one."""
        self._slots, self._free, self._used = {}, [], 0
        for slot, (inode, _, handles) in enumerate(_SLOT.iter_unpack(self._memory)):
            if handles:
                self._slots[Inode(inode)] = slot
                self._used = slot + 1
        taken = set(self._slots.values())
        self._free = [slot for slot in range(self._used) if slot not in taken]

    @property
    def full(self) -> bool:
        """Whether no further inode can be added."""
        return not self._free and self._used == _SLOTS

    def get(self, inode: Inode) -> tuple[int, int]:
        """Backing id and number of handles."""
        slot = self._slots.get(inode)
        if slot is None:
            return NONE
        _, backing_id, handles = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
        return backing_id, handles

    def set(self, inode: Inode, backing_id: int, handles: int) -> None:
        """Record an inode's state; no handles = it is closed."""
        slot = self._slots.get(inode)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._used = self._used, self._used + 1
            self._slots[inode] = slot
        _SLOT.pack_into(self._memory, slot * _SLOT.size, inode, backing_id, handles)
        if not handles:
            self._free.append(self._slots.pop(inode))


class Backings:
    """Registers backing files, by the kernel's rule of one way of access for each inode.

    While an inode is open by passthrough, each further opening must use the same backing file;
    while it is open otherwise, passthrough must wait until it has been closed.
    """

    def __init__(self, device: int, inodes: OpenInodes | None, faults: Reporter) -> None:
        self._device = device
        self._inodes = inodes
        self._faults = faults
        self._lock = threading.Lock()

    def acquire(self, inode: Inode, opened: Opened) -> int:
        """Count an opening; returns its backing id, 0 when it is served by us."""
        inodes = self._inodes
        if inodes is None:
            return 0
        with self._lock:
            backing_id, handles = inodes.get(inode)
            if not handles:
                if inodes.full:
                    self._inodes = None  # without counting, the rule cannot be kept
                    self._faults.report(
                        "passthrough", f"more than {_SLOTS} files are open: it ends"
                    )
                    return 0
                if opened.backing_fd >= 0:
                    backing_id = self._register(opened.backing_fd)
            inodes.set(inode, backing_id, handles + 1)
            return backing_id

    def release(self, inode: Inode) -> None:
        """Count a closed handle of the inode."""
        inodes = self._inodes
        if inodes is None:
            return
        with self._lock:
            backing_id, handles = inodes.get(inode)
            if not handles:
                return
            inodes.set(inode, backing_id, handles - 1)
            if handles == 1 and backing_id:
                self._unregister(backing_id)

    def _register(self, descriptor: int) -> int:
        """The backing id; 0 = refused, which is reported once, and the file is served by us."""
        request = bytearray(replies.BACKING_MAP.pack(descriptor, 0, 0))
        try:
            return int(fcntl.ioctl(self._device, replies.BACKING_OPEN, request))
        except OSError as error:
            if error.errno != errno.ELOOP:  # the file is on stacked file systems already
                self._faults.report_failure("passthrough", error)
            return 0

    def _unregister(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._device, replies.BACKING_CLOSE, struct.pack("<I", backing_id))
        except OSError as error:
            self._faults.report_failure("ending a passthrough", error)
