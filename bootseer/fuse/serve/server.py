"""Serving operations at a mount point, in this process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BusyError, StoreUnavailableError, UsageError
from bootseer.fuse.mount.device import Device
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import MountPoint, absolute, can_mount, has_ended, is_passed
from bootseer.fuse.mount.passthrough import Backings, OpenInodes
from bootseer.fuse.operations import Data, Operations
from bootseer.fuse.protocol import requests
from bootseer.fuse.protocol.notifications import Notifier
from bootseer.fuse.serve.dispatch import Negotiated, Session, init_answer, negotiate
from bootseer.fuse.serve.pending_replies import send_data, send_error
from bootseer.fuse.serve.receive_loop import Loop
from bootseer.reporting import Reporter

_FIRST_BUFFER_BYTES = 1 << 20
_RETRY_S = 0.05


def handshake(device: int, options: MountOptions) -> Negotiated:
    """Answer INIT, the first request of every mount, and return what was settled.

    Raises StoreUnavailableError when the mount ended before, or the kernel speaks otherwise.
    """
    os.set_blocking(device, True)
    buffer = bytearray(_FIRST_BUFFER_BYTES)
    try:
        count = os.readv(device, [buffer])
        request = requests.parse(memoryview(buffer)[:count])
        if request.opcode != requests.Opcode.INIT:
            send_error(device, request.unique, errno.EIO)
            raise requests.WireError("another server began it; pass a descriptor just mounted")
        settled = negotiate(request.body, options, privileged=can_mount())
        send_data(device, request.unique, Data((init_answer(request.body, settled, options),)))
        return settled
    except (OSError, requests.WireError) as error:
        raise StoreUnavailableError(f"the kernel does not begin a mount: {error}") from error


class Mount:
    """A mounted file system, served by threads of this process.

    `with Mount(operations, "/mnt/x") as mount:` serves inside the block; `run()` serves until
    somebody unmounts. A process must not look into its own mount from a thread that serves it.
    Operations that have a method `attached(notifier)` are given the notifier before the first
    request, and those with `ending()` are told before this side takes the mount away. A
    descriptor that was passed in (`/dev/fd/N`, `unix:PATH`) is served until its mount ends or
    this process does; whoever mounted it unmounts it.
    """

    def __init__(
        self, operations: Operations, mountpoint: str, *, options: MountOptions | None = None
    ) -> None:
        options = options or MountOptions()
        if not hasattr(operations, "write"):
            options = dataclasses.replace(options, read_only=True)
        self.operations = operations
        self.mountpoint = absolute(mountpoint)
        self.options = options
        self._faults = Reporter("fuse.fault", options.on_fault)
        self._device: Device | None = None
        self._threads: list[threading.Thread] = []
        self._loop: Loop | None = None
        self._closing = threading.Lock()
        self._counting = threading.Lock()
        self._living = 0
        self._failed = False
        self._point = MountPoint(self.mountpoint)

    def start(self) -> None:
        """Mount, and serve in threads; returns once the mount answers. Raises as `open_mount`."""
        device = open_mount(self.mountpoint, self.options)
        point = MountPoint(self.mountpoint, lambda: has_ended(device))
        try:
            settled = handshake(device, self.options)
            point.set_read_ahead(self.options.read_ahead_kib)
            self.adopt(device, settled)
        except BaseException:  # a mount without a server would hang its readers
            point.abandon()
            os.close(device)
            self._device = None
            raise

    def adopt(
        self,
        descriptor: int,
        settled: Negotiated,
        *,
        point: MountPoint | None = None,
        open_inodes: OpenInodes | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        """Serve a mount whose INIT was answered already.

        `point` is that mount, by default what is mounted there now. `open_inodes` are those of
        the server before this one. `on_death` is called when a thread of the server fails; by
        default the mount is ended.
        """
        device = self._device = Device(descriptor)
        self._point = point or MountPoint(self.mountpoint, device.ended)
        if settled.passthrough and open_inodes is None:
            open_inodes = OpenInodes()
        backings = Backings(descriptor, open_inodes, self._faults)
        session = Session(self.operations, self.options, backings, self._faults)
        self._loop = Loop(
            device,
            session,
            self._faults,
            max_write_bytes=settled.max_write_bytes,
            slow_threads=self.options.slow_threads,
            on_death=on_death or self._abandon,
        )
        for number in range(self.options.threads):
            name = f"fuse-{number}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        if hasattr(self.operations, "attached"):
            self.operations.attached(self.notifier)
        self._living = len(self._threads)
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        """The body of each receiving thread."""
        loop, device = self._loop, self._device
        assert loop is not None
        assert device is not None
        loop.serve()
        with self._counting:
            self._living -= 1
            last = self._living == 0
        if last and self._failed:
            device.close()  # nobody listens: who waits must fail, not wait for ever

    @property
    def notifier(self) -> Notifier:
        """To push bytes into the page cache, or invalidate what is there."""
        if self._device is None:
            raise UsageError(f"{self.mountpoint} is not mounted yet; start it first")
        return Notifier(self._device)

    @property
    def serving(self) -> bool:
        """Whether the mount is there and answered."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the mount is gone, whoever unmounted it; False when the time is over first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not self.serving

    def run(self) -> None:
        """Mount and serve until somebody unmounts; unmounts when a signal's exception comes."""
        with self:
            self.wait()

    def unmount(self) -> None:
        """Unmount; a busy mount loses its name after `unmount_grace_s`, and then its users.

        Twice is safe. Not for a passed descriptor.
        """
        end = time.monotonic() + self.options.unmount_grace_s
        while self.serving and self._point.present:
            try:
                self._point.unmount()
            except BusyError:
                if time.monotonic() >= end:
                    break
                time.sleep(_RETRY_S)
        if not is_passed(self.mountpoint) and not self.wait(1.0):
            self._point.abandon()
            self.wait(1.0)

    def close(self) -> None:
        """Unmount, end the threads and tell the operations. Twice is safe."""
        with self._closing:
            if self._device is not None and hasattr(self.operations, "ending"):
                self.operations.ending()
            self.unmount()
            device, self._device = self._device, None
            if device is None or self.serving:
                return  # threads still wait on the descriptor: it ends with the process
            if self._loop is not None:
                self._loop.stop()
            device.close()
            self.operations.destroy()

    def _abandon(self) -> None:
        """A thread failed: readers must not wait for what nobody answers."""
        self._failed = True
        if is_passed(self.mountpoint):
            os._exit(70)  # the descriptor is closed with the process; nothing else ends it
        self._point.abandon()

    def __enter__(self) -> Mount:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
