"""How a file system is mounted and served, with the defaults."""

from __future__ import annotations

from collections.abc import Callable

from bootseer.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """Settings of one mount.

    `allow_other` lets other users in (a plain user needs `user_allow_other` in /etc/fuse.conf).
    `threads` receive requests and reply to reads; at most `slow_threads` more run what may wait
    for a network (writing, and what `Operations.may_block` covers). `timeout_s` is how long the
    kernel may cache names and attributes. `passthrough` lets the kernel read
    `Opened.backing_fd` itself (needs CAP_SYS_ADMIN); the mount then counts as one more layer of
    stacked file systems, of which Linux allows two, so leave it off below an EROFS image that an
    overlay covers. `over` mounts over a mount of ours that is served there, which is refused
    otherwise: what has opened its files goes on. `on_fault` is called once for each kind of
    internal fault, which is also reported as an event `fuse.fault`.
    """

    read_only: bool = True
    allow_other: bool = False
    fsname: str = "bootseer"
    threads: int = 2
    slow_threads: int = 8
    max_read_bytes: int = 1 << 20
    max_write_bytes: int = 1 << 20
    read_ahead_kib: int = 1024
    timeout_s: float = 60.0
    max_background: int = 64
    passthrough: bool = False
    over: bool = False
    unmount_grace_s: float = 5.0
    on_fault: Callable[[str], None] | None = None
