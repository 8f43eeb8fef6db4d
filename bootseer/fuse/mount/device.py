"""The `/dev/fuse` descriptor of a mount, shared by threads that may outlive the mount."""

from __future__ import annotations

import errno
import os
import threading


class Device:
    """`with device as descriptor:` may write to it; `close` waits for these blocks to end.

    Without this, a late reply could be written into another file that was given the same number.
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

    def close(self) -> None:
        """No use after this; twice is safe."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._users == 0)
        os.close(self.descriptor)
