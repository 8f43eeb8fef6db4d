"""Files that the kernel reads by itself (FUSE passthrough, Linux 6.9 and newer)."""

from __future__ import annotations

import fcntl
import struct
import threading
from dataclasses import dataclass

from bootseer.fuse import replies
from bootseer.fuse.faults import Faults
from bootseer.fuse.operations import Handle, Inode, Opened


@dataclass(slots=True)
class _Open:
    """How one inode is open: the kernel allows one backing file for it, or cached reads."""

    backing_id: int = 0
    passed: int = 0
    cached: int = 0


class Backings:
    """Registers backing files, and keeps the kernel's rule of one way of access for each inode.

    While an inode is open by passthrough, another opening of it must use the same backing file
    or bypass the cache; while it is open through the cache, passthrough must wait. A server
    that took over does not know how its predecessor opened things, so it only bypasses.
    """

    def __init__(self, device: int, *, enabled: bool, took_over: bool, faults: Faults) -> None:
        self._device = device
        self._enabled = enabled
        self._took_over = took_over
        self._faults = faults
        self._inodes: dict[Inode, _Open] = {}
        self._ways: dict[tuple[Inode, Handle], list[str]] = {}
        self._lock = threading.Lock()

    def opened(self, inode: Inode, opened: Opened) -> tuple[int, int]:
        """FOPEN_… flags to add for this opening, and its backing id."""
        if not self._enabled:
            return 0, 0
        if self._took_over:
            return (replies.FOPEN_DIRECT_IO if opened.backing_fd >= 0 else 0), 0
        with self._lock:
            state = self._inodes.setdefault(inode, _Open())
            if opened.backing_fd >= 0 and not state.backing_id and not state.cached:
                state.backing_id = self._register(opened.backing_fd)
            if state.backing_id:
                state.passed += 1
            elif not opened.direct:
                state.cached += 1
            way = "passed" if state.backing_id else "direct" if opened.direct else "cached"
            self._ways.setdefault((inode, opened.handle), []).append(way)
            return (replies.FOPEN_PASSTHROUGH if state.backing_id else 0), state.backing_id

    def released(self, inode: Inode, handle: Handle) -> None:
        """One opening of `opened` is closed."""
        if not self._enabled:
            return
        with self._lock:
            ways = self._ways.get((inode, handle))
            state = self._inodes.get(inode)
            if not ways or state is None:
                return
            way = ways.pop()
            state.passed -= way == "passed"
            state.cached -= way == "cached"
            if not ways:
                del self._ways[inode, handle]
            if state.passed == state.cached == 0:
                del self._inodes[inode]
                if state.backing_id:
                    self._unregister(state.backing_id)

    def _register(self, descriptor: int) -> int:
        """0 = the kernel will not; it is said once, and the file is served as any other."""
        request = bytearray(replies.BACKING_MAP.pack(descriptor, 0, 0))
        try:
            return int(fcntl.ioctl(self._device, replies.BACKING_OPEN, request))
        except OSError as error:
            self._faults.failed("passthrough", error)
            return 0

    def _unregister(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._device, replies.BACKING_CLOSE, struct.pack("<I", backing_id))
        except OSError as error:
            self._faults.failed("ending a passthrough", error)
