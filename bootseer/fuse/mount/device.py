"""One mounted `/dev/fuse` descriptor, shared by threads that may outlive the mount."""

from __future__ import annotations

import errno
import os
import threading

from bootseer.fuse.mount.mount_point import has_ended


class Device:
    """`with device as fd:` may write to it; `close` waits for who does.

    Without this, a late answer could be written into whatever file got the number next.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._users = 0
        self._closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> int:
        with self._changed:
            if self._closed:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self._users += 1
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._users -= 1
            if self._closed:
                self._changed.notify_all()

    def ended(self) -> bool:
        """Whether its mount is over; after `close` it may be."""
        try:
            with self as descriptor:
                return has_ended(descriptor)
        except OSError:
            return True

    def close(self) -> None:
        """No later use; twice is safe."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._users == 0)
        os.close(self.descriptor)
