"""What a server tells the kernel unasked: pushed bytes, and what to forget."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from bootseer.fuse.mount.device import Device
from bootseer.fuse.operations import Buffer, Inode
from bootseer.fuse.protocol import replies

_NOT_THERE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED})


class Notifier:
    """Notifications on one mount; never from a thread that answers a read of the same bytes.

    The kernel locks the pages concerned, so a notification waits for reads of them under way:
    answer waiting readers first. All methods return False when the kernel does not know the
    inode or name (any more), which loses nothing; other refusals raise OSError.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def store(self, inode: Inode, offset: int, data: Buffer) -> bool:
        """Put bytes into the page cache: later cached reads of them send no request.

        Whole pages, except at the end of the file. EINVAL when the mount's largest write is
        smaller than the data needs (Linux takes any size below 4 GiB).
        """
        head = replies.notify_store(inode, offset, len(data))
        return self._send((head, data))

    def invalidate(self, inode: Inode, offset: int = 0, length: int = 0) -> bool:
        """Drop cached attributes and pages; `length` 0 = to the end, `offset` < 0 = no pages."""
        message = replies.notify_inval_inode(inode, offset, length)
        return self._send((message,))

    def invalidate_entry(self, parent: Inode, name: bytes) -> bool:
        """Forget a name of a directory, also that it was not there."""
        message = replies.notify_inval_entry(parent, name)
        return self._send((message,))

    def resend(self) -> bool:
        """Send again every request that was received and not answered (Linux 6.9 and newer)."""
        return self._send((replies.notify(replies.NOTIFY_RESEND),))

    def _send(self, parts: Sequence[Buffer]) -> bool:
        try:
            with self._device as descriptor:
                os.writev(descriptor, parts)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise
        return True
