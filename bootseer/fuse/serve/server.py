"""Serving a mount in this process: the handshake, and the threads that receive requests."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from bootseer.errors import BusyError, StoreUnavailableError
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import MountPoint, can_mount, is_passed
from bootseer.fuse.mount.passthrough import Backings, OpenInodes
from bootseer.fuse.operations import Data, Operations
from bootseer.fuse.protocol import requests
from bootseer.fuse.serve.dispatch import Dispatcher, Negotiated, init_reply, negotiate
from bootseer.fuse.serve.pending_replies import Device, send_data, send_error
from bootseer.fuse.serve.receive_loop import ReceiveLoop
from bootseer.reporting import Reporter

_FIRST_BUFFER_BYTES = 1 << 20
_RETRY_S = 0.05


def handshake(device: int, options: MountOptions) -> Negotiated:
    """Reply to INIT, the first request of every mount; returns what was negotiated.

    Raises StoreUnavailableError when the mount ended before, or the kernel speaks otherwise.
    """
    os.set_blocking(device, True)
    buffer = bytearray(_FIRST_BUFFER_BYTES)
    try:
        count = os.readv(device, [buffer])
        request = requests.parse(memoryview(buffer)[:count])
        if request.opcode != requests.Opcode.INIT:
            send_error(device, request.unique, errno.EIO)
            raise requests.ProtocolError("another server began it; pass a descriptor just mounted")
        negotiated = negotiate(request.body, options, privileged=can_mount())
        reply = init_reply(request.body, negotiated, options)
        send_data(device, request.unique, Data((reply,)))
        return negotiated
    except (OSError, requests.ProtocolError) as error:
        raise StoreUnavailableError(f"the kernel does not begin a mount: {error}") from error


class Server:
    """Threads of this process that serve the mount at `point`, from `start` until it ends.

    `descriptor` is the mount's, after the `handshake`, and is closed by the server. `on_death` is
    called when one of the threads fails: requests may then stay without a reply. `open_inodes`
    are those of the server before this one; None where nothing is passed through. No thread that
    serves may use the mount itself.
    """

    def __init__(
        self,
        operations: Operations,
        point: MountPoint,
        descriptor: int,
        negotiated: Negotiated,
        options: MountOptions,
        *,
        on_death: Callable[[], None],
        open_inodes: OpenInodes | None,
    ) -> None:
        self._operations = operations
        self._point = point
        self._options = options
        self._device = Device(descriptor)
        faults = Reporter("fuse.fault", options.on_fault)
        backings = Backings(descriptor, open_inodes, faults)
        self._loop = ReceiveLoop(
            self._device,
            Dispatcher(operations, options, backings, faults),
            faults,
            max_write_bytes=negotiated.max_write_bytes,
            max_workers=options.slow_threads,
            on_death=on_death,
        )
        self._threads = [
            threading.Thread(target=self._loop.serve, name=f"fuse-{number}", daemon=True)
            for number in range(options.threads)
        ]
        self._closing = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Serve from now on."""
        for thread in self._threads:
            thread.start()

    @property
    def is_serving(self) -> bool:
        """Whether any thread still receives requests."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the mount has ended; False when the time is over first."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return not self.is_serving

    def close(self) -> None:
        """Unmount, end the threads and destroy the operations. Twice is safe.

        A busy mount loses its name after `unmount_grace_s`, and then its users get errors. A
        descriptor that was passed to us is not unmounted: its mount ends when the last process
        that holds the open file closes it, or when the one that mounted it unmounts it.
        """
        with self._closing:
            if self._closed:
                return
            self._operations.before_unmount()
            self._unmount()
            self._closed = True
            if self.is_serving:
                return  # threads still wait on the descriptor: it ends with the process
            self._loop.stop()
            self._device.close()
            self._operations.destroy()

    def _unmount(self) -> None:
        point = self._point
        end_s = time.monotonic() + self._options.unmount_grace_s
        while self.is_serving and point.present:
            try:
                point.unmount()
            except BusyError:
                if time.monotonic() >= end_s:
                    break
                time.sleep(_RETRY_S)
        if not is_passed(point.target) and not self.wait(1.0):
            point.abandon()
            self.wait(1.0)
