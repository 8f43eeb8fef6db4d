"""The threads that receive requests from `/dev/fuse` and reply to them.

The thread that received a READ replies to it, unless the operations take the reply and send it
later from any other thread. Requests that may wait for a network (all of writing, and those of
`Operations.may_block`) go to a few worker threads, so that a READ is always received at once. A
process that waits for a request which changes nothing may be killed, as a reader may: what the
request gave it is then taken back.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import threading
from collections.abc import Callable

from bootseer.fuse.operations import Data, Reply
from bootseer.fuse.protocol.replies import SUCCESS
from bootseer.fuse.protocol.requests import IN_HEADER, INTERRUPT_IN, OUT_HEADER, READ_FIELDS, Opcode
from bootseer.fuse.serve.dispatch import REVERSIBLE, WITHOUT_REPLY, Dispatcher
from bootseer.fuse.serve.pending_replies import (
    NO_REQUESTER,
    Device,
    PendingReplies,
    PendingReply,
    send_data,
    send_error,
)
from bootseer.reporting import Reporter

_RETRIED = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
# The second one for a request that was being received while the mount ended.
_ENDED = frozenset({errno.ENODEV, errno.ECONNABORTED})
_HEADER_BYTES = 40
_SPARE_BYTES = 4096
_COPY_BYTES = 16 << 10
_MAX_IDLE_BUFFERS = 4
_Work = tuple[bytearray | bytes, int, PendingReply | None]
"""A request, its length, and its pending reply where its process may be killed."""


class BufferedLater:
    """The `Later` of a receiving thread's reads.

    It parses the request in the thread's buffer only when it is called: most reads need no such
    call, and a small read is so short that making an object for each could be measured.
    """

    __slots__ = ("_pending", "buffer", "taken")

    def __init__(self, pending: PendingReplies, buffer: bytearray) -> None:
        self._pending = pending
        self.buffer = buffer
        self.taken: PendingReply | None = None

    def __call__(self) -> Reply:
        if self.taken is None:
            _, _, unique, _, _, _, pid, *_ = IN_HEADER.struct.unpack_from(self.buffer)
            self.taken = self._pending.add(unique, pid)
        return self.taken

    @property
    def thread(self) -> int:
        """See `Later`."""
        return int(IN_HEADER.struct.unpack_from(self.buffer)[6])


class ReceiveLoop:
    """Receives the requests of one mount; `on_death` is called by a thread of it that failed."""

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        faults: Reporter,
        *,
        max_write_bytes: int,
        max_workers: int,
        on_death: Callable[[], None],
    ) -> None:
        self._device = device.descriptor
        self._dispatcher = dispatcher
        self._faults = faults
        self._buffer_bytes = max_write_bytes + _SPARE_BYTES
        self._blocking = dispatcher.blocking_opcodes()
        self._max_workers = max_workers
        self._on_death = on_death
        self._pending = PendingReplies(device, faults)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._unfinished = 0
        self._buffers: list[bytearray] = []
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Receive and reply until the mount ends; the body of each receiving thread."""
        later = BufferedLater(self._pending, bytearray(self._buffer_bytes))
        try:
            self._receive(later)
        except BaseException as error:
            # A reader whose request is never received hangs; better that it fails now.
            self._faults.report_failure("a receiving thread", error)
            with contextlib.suppress(OSError):
                self._refuse(READ_FIELDS.unpack_from(later.buffer)[1], later, error)
            self._on_death()

    def stop(self) -> None:
        """End the worker threads."""
        with self._lock:
            workers = list(self._workers)
        for _ in workers:
            self._work.put(None)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(5.0)

    def _receive(self, later: BufferedLater) -> None:
        # Each line here runs for every read. There are up to 100,000 small ones a second, and
        # only one thread at a time runs Python, so a tenth of a microsecond can be measured:
        # names are local, and `readinto` is `os.readv` with less around it.
        device, write_device = self._device, os.writev
        read_device = io.FileIO(device, "rb", closefd=False).readinto
        read, unpack, pack = self._dispatcher.operations.read, READ_FIELDS.unpack_from, SUCCESS.pack
        opcode_read, view_type = int(Opcode.READ), memoryview
        buffer = later.buffer
        while True:
            try:
                count = read_device(buffer)
            except OSError as error:
                if _has_ended(error):
                    return
                continue
            if not count:
                continue
            opcode, unique, inode, handle, offset, size = unpack(buffer)
            if opcode != opcode_read:
                buffer = later.buffer = self._handle_other(opcode, buffer, count)
                continue
            try:
                data = read(inode, handle, offset, size, later)
            except BaseException as error:  # one failing read must cost one reply only
                self._refuse(unique, later, error)
                continue
            if type(data) is view_type:
                try:
                    write_device(device, (pack(16 + len(data), unique), data))
                except OSError as error:
                    self._on_refused_reply(unique, error)
                del data  # its owner may close that memory
                continue
            release = self._finish_read(unique, later, data)
            del data  # its owner may reuse that memory
            if release is not None:
                self._release(release)

    def _release(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception as error:  # the reply was sent; only memory may be lost
            self._faults.report_failure("releasing a read's memory", error)

    def _finish_read(
        self, unique: int, later: BufferedLater, data: Data | memoryview | None
    ) -> Callable[[], None] | None:
        """Send what `read` returned where that is not one view; returns what releases it."""
        taken, later.taken = later.taken, None
        if isinstance(data, Data):
            try:
                send_data(self._device, unique, data)
            except OSError as error:
                self._on_refused_reply(unique, error)
            return data.release
        if taken is None:
            self._refuse(unique, later, TypeError("neither bytes nor a reply taken"))
        return None

    def _handle_other(self, opcode: int, buffer: bytearray, count: int) -> bytearray:
        """Handle any request but READ; returns the buffer to receive into from now on."""
        if opcode in self._blocking:
            return self._pass_to_worker(buffer, count)
        if opcode == Opcode.INTERRUPT:
            self._pending.interrupt(INTERRUPT_IN.struct.unpack_from(buffer, _HEADER_BYTES)[0])
        else:
            self._answer(memoryview(buffer)[:count])
        return buffer

    def _on_refused_reply(self, unique: int, error: OSError) -> None:
        """Handle a reply that the kernel refused. But for ENOMEM it fails the request itself."""
        if error.errno in NO_REQUESTER:
            return
        self._faults.report_failure("sending an answer", error)
        if error.errno == errno.ENOMEM:
            send_error(self._device, unique, errno.EIO)

    def _refuse(self, unique: int, later: BufferedLater, error: BaseException) -> None:
        number = self._dispatcher.errno_of(error, "read")
        if later.taken is not None:
            later.taken.error(number)
            later.taken = None
        else:
            send_error(self._device, unique, number)

    def _answer(self, data: memoryview, pending: PendingReply | None = None) -> None:
        """Answer one request that is not READ; `pending` is its reply where it may be killed."""
        if READ_FIELDS.unpack_from(data.obj)[0] in WITHOUT_REPLY:
            self._dispatcher.forget(data)
            return
        unique, number, body = self._dispatcher.dispatch(data)
        if pending is not None and not self._pending.claim(pending):
            if not number:
                self._dispatcher.take_back(data, body)
            return
        header = OUT_HEADER.struct.pack(16 + len(body), -number, unique)
        try:
            os.writev(self._device, (header, body))
        except OSError as error:
            self._on_refused_reply(unique, error)

    def _pass_to_worker(self, buffer: bytearray, count: int) -> bytearray:
        """Have a worker thread answer; returns the buffer to receive into from now on."""
        opcode, unique = READ_FIELDS.unpack_from(buffer)[:2]
        pending = None
        if opcode in REVERSIBLE:
            pending = self._pending.add(unique, IN_HEADER.struct.unpack_from(buffer)[6])
        with self._lock:
            self._unfinished += 1
            if self._unfinished > len(self._workers) < self._max_workers:
                worker = threading.Thread(target=self._run_worker, name="fuse-slow", daemon=True)
                self._workers.append(worker)
                worker.start()
        if count <= _COPY_BYTES:
            copy = bytes(memoryview(buffer)[:count]).ljust(READ_FIELDS.size, b"\0")
            self._work.put((copy, count, pending))
            return buffer
        self._work.put((buffer, count, pending))
        with self._lock:
            return self._buffers.pop() if self._buffers else bytearray(self._buffer_bytes)

    def _run_worker(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            buffer, count, pending = work
            try:
                self._answer(memoryview(buffer)[:count], pending)
            except BaseException as error:  # without the thread its requesters would hang
                self._faults.report_failure("a slow thread", error)
                self._on_death()
                return
            with self._lock:
                self._unfinished -= 1
                if isinstance(buffer, bytearray) and len(self._buffers) < _MAX_IDLE_BUFFERS:
                    self._buffers.append(buffer)


def _has_ended(error: OSError) -> bool:
    """Whether the mount has ended, by an error of receiving; raises an unexpected one."""
    if error.errno in _ENDED:
        return True
    if error.errno not in _RETRIED:
        raise error
    return False
