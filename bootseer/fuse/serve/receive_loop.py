"""The threads that receive requests from `/dev/fuse` and answer them.

READ is answered by the thread that received it, or parked by the operations and answered from
any other thread. What the operations call quick is answered at once too. Requests that may wait
for a network (all of writing, and what `Operations.slow` names) go to
a few more threads, so that no wait ever keeps a reader from being heard. Who waits for one that
changes nothing may be killed, as a reader may; what comes of it then is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import threading
from collections.abc import Callable

from bootseer.fuse.mount.device import Device
from bootseer.fuse.operations import Data, Reply
from bootseer.fuse.protocol.replies import SUCCESS
from bootseer.fuse.protocol.requests import HOT, IN_HEADER, INTERRUPT_IN, OUT_HEADER, Opcode
from bootseer.fuse.serve.dispatch import KILLABLE, UNANSWERED, Session
from bootseer.fuse.serve.pending_replies import GONE, Parked, ParkedReads, send_data, send_error
from bootseer.reporting import Reporter

_GO_ON = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
# The second one for a request that was being handed over while the mount ended.
_ENDED = frozenset({errno.ENODEV, errno.ECONNABORTED})
_HEADER_BYTES = 40
_SPARE_BYTES = 4096
_COPY_BYTES = 16 << 10
_MOST_IDLE_BUFFERS = 4
_Work = tuple[bytearray | bytes, int, Parked | None]
"""A request, its length, and who waits for it where they may be killed."""


class Later:
    """What `read` calls to answer later; one for each thread.

    It looks at the request in the thread's buffer only when it is called: most reads never do,
    and a small read is so short that setting this up each time could be measured.
    """

    __slots__ = ("_reads", "buffer", "taken")

    def __init__(self, reads: ParkedReads, buffer: bytearray) -> None:
        self._reads = reads
        self.buffer = buffer
        self.taken: Parked | None = None

    def __call__(self) -> Reply:
        if self.taken is None:
            _, _, unique, _, _, _, pid, *_ = IN_HEADER.struct.unpack_from(self.buffer)
            self.taken = self._reads.park(unique, pid)
        return self.taken

    @property
    def thread(self) -> int:
        """The thread that reads, as our PID namespace knows it; 0 where it does not."""
        return int(IN_HEADER.struct.unpack_from(self.buffer)[6])


class Loop:
    """Serves one device.

    `on_death` is called by a receiving thread that failed.
    """

    def __init__(
        self,
        device: Device,
        session: Session,
        faults: Reporter,
        *,
        max_write_bytes: int,
        slow_threads: int,
        on_death: Callable[[], None],
    ) -> None:
        self._device = device.descriptor
        self._session = session
        self._faults = faults
        self._buffer_bytes = max_write_bytes + _SPARE_BYTES
        self._slow = session.slow_opcodes()
        self._most_workers = slow_threads
        self._on_death = on_death
        self.parked = ParkedReads(device, faults)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._busy = 0
        self._buffers: list[bytearray] = []
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Receive and answer until the mount is gone; the body of each receiving thread."""
        later = Later(self.parked, bytearray(self._buffer_bytes))
        try:
            self._receive(later)
        except BaseException as error:
            # A reader whose server is deaf hangs for ever; better that it fails now.
            self._faults.report_failure("a receiving thread", error)
            with contextlib.suppress(OSError):
                self._refuse(HOT.unpack_from(later.buffer)[1], later, error)
            self._on_death()

    def stop(self) -> None:
        """End the extra threads."""
        with self._lock:
            workers = list(self._workers)
        for _ in workers:
            self._work.put(None)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(5.0)

    def _receive(self, later: Later) -> None:
        # Each line here runs for every read. Small ones come by the 100,000 a second, and threads
        # wait for each other while Python runs, so a tenth of a microsecond can be measured:
        # names are local, and `readinto` is `os.readv` with less around it.
        device, write_device = self._device, os.writev
        read_device = io.FileIO(device, "rb", closefd=False).readinto
        read, unpack, pack = self._session.operations.read, HOT.unpack_from, SUCCESS.pack
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
                buffer = later.buffer = self._take_other(opcode, buffer, count)
                continue
            try:
                data = read(inode, handle, offset, size, later)
            except BaseException as error:  # one failing read must cost one answer only
                self._refuse(unique, later, error)
                continue
            if type(data) is view_type:
                try:
                    write_device(device, (pack(16 + len(data), unique), data))
                except OSError as error:
                    self._unsent(unique, error)
                del data  # its owner may want to close that memory
                continue
            release = self._answer_read(unique, later, data)
            del data  # its owner may want to reuse that memory
            if release is not None:
                self._release(release)

    def _release(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception as error:  # the answer was sent; only memory may be lost
            self._faults.report_failure("releasing a read's memory", error)

    def _answer_read(
        self, unique: int, later: Later, data: Data | memoryview | None
    ) -> Callable[[], None] | None:
        """Send what `read` returned, unless it was one view; returns what releases it."""
        taken, later.taken = later.taken, None
        if isinstance(data, Data):
            try:
                send_data(self._device, unique, data)
            except OSError as error:
                self._unsent(unique, error)
            return data.release
        if taken is None:
            self._refuse(unique, later, TypeError("neither bytes nor a reply taken"))
        return None

    def _take_other(self, opcode: int, buffer: bytearray, count: int) -> bytearray:
        """All but READ; returns the buffer to receive into from now on."""
        if opcode in self._slow:
            return self._hand_over(buffer, count)
        if opcode == Opcode.INTERRUPT:
            self.parked.interrupt(INTERRUPT_IN.struct.unpack_from(buffer, _HEADER_BYTES)[0])
        else:
            self._answer(memoryview(buffer)[:count])
        return buffer

    def _unsent(self, unique: int, error: OSError) -> None:
        """The kernel would not take an answer. It fails the request itself, but for ENOMEM."""
        if error.errno in GONE:
            return
        self._faults.report_failure("sending an answer", error)
        if error.errno == errno.ENOMEM:
            send_error(self._device, unique, errno.EIO)

    def _refuse(self, unique: int, later: Later, error: BaseException) -> None:
        number = self._session.errno_of(error, "read")
        if later.taken is not None:
            later.taken.error(number)
            later.taken = None
        else:
            send_error(self._device, unique, number)

    def _answer(self, data: memoryview, waiting: Parked | None = None) -> None:
        """Answer one request that is not READ; `waiting` tells whether its asker still does."""
        if HOT.unpack_from(data.obj)[0] in UNANSWERED:
            self._session.forget(data)
            return
        unique, number, answer = self._session.answer(data)
        if waiting is not None and not self.parked.take(waiting):
            if not number:
                self._session.unwanted(data, answer)
            return
        header = OUT_HEADER.struct.pack(16 + len(answer), -number, unique)
        try:
            os.writev(self._device, (header, answer))
        except OSError as error:
            self._unsent(unique, error)

    def _hand_over(self, buffer: bytearray, count: int) -> bytearray:
        """Let another thread answer; returns the buffer to receive into from now on."""
        opcode, unique = HOT.unpack_from(buffer)[:2]
        waiting = None
        if opcode in KILLABLE:
            waiting = self.parked.park(unique, IN_HEADER.struct.unpack_from(buffer)[6])
        with self._lock:
            self._busy += 1
            if self._busy > len(self._workers) < self._most_workers:
                worker = threading.Thread(target=self._run_slow, name="fuse-slow", daemon=True)
                self._workers.append(worker)
                worker.start()
        if count <= _COPY_BYTES:
            self._work.put(
                (bytes(memoryview(buffer)[:count]).ljust(HOT.size, b"\0"), count, waiting)
            )
            return buffer
        self._work.put((buffer, count, waiting))
        with self._lock:
            return self._buffers.pop() if self._buffers else bytearray(self._buffer_bytes)

    def _run_slow(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            buffer, count, waiting = work
            try:
                self._answer(memoryview(buffer)[:count], waiting)
            except BaseException as error:  # a lost thread would hang its readers
                self._faults.report_failure("a slow thread", error)
                self._on_death()
                return
            with self._lock:
                self._busy -= 1
                if isinstance(buffer, bytearray) and len(self._buffers) < _MOST_IDLE_BUFFERS:
                    self._buffers.append(buffer)


def _has_ended(error: OSError) -> bool:
    """Whether there is nothing to receive any more; raises what is no usual end of a wait."""
    if error.errno in _ENDED:
        return True
    if error.errno not in _GO_ON:
        raise error
    return False
