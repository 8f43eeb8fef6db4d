"""Replies that are sent later: from any thread, or when their requester has been killed.

`Device` is what they are sent to, `PendingReplies` are those of a mount, and `PendingRead` is how a
tree replies to a read whose bytes are not all in memory yet.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from bootseer.fuse.operations import Data, Reply
from bootseer.fuse.protocol.replies import NOTIFY_RESEND, pack_error
from bootseer.fuse.protocol.requests import OUT_HEADER
from bootseer.fuse.serve.requesters import is_being_killed
from bootseer.reporting import Reporter
from bootseer.system.lru import put_youngest

_MAX_EARLY_INTERRUPTS = 256
_WATCH_S = 0.1
_MAX_VIEWS = 1000
Body = TypeVar("Body")
_pack_header = OUT_HEADER.struct.pack

NO_REQUESTER = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED})
"""Errnos of sending a reply that no process waits for: interrupted before, or unmounted."""


class Device:
    """The `/dev/fuse` descriptor of a mount, shared by threads that may outlive the mount.

    `with device as descriptor:` may write to it; `close` waits for these blocks to end.

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
        """Close it once no thread uses it; twice is safe."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._users == 0)
        os.close(self.descriptor)


def send_data(device: int, unique: int, data: Data) -> None:
    """Send bytes as the reply. Raises OSError of the device, but for `NO_REQUESTER`."""
    views = data.views
    if len(views) > _MAX_VIEWS:
        views = [b"".join(views)]
    try:
        os.writev(device, (_pack_header(16 + sum(map(len, views)), 0, unique), *views))
    except OSError as error:
        if error.errno not in NO_REQUESTER:
            raise


def send_error(device: int, unique: int, number: int) -> None:
    """Send an errno as the reply. Raises as `send_data`."""
    _send(device, pack_error(unique, number))


def request_resend(device: int) -> None:
    """Have the kernel send again every request that got no reply yet (Linux 6.9 and newer)."""
    _send(device, NOTIFY_RESEND)


def _send(device: int, message: bytes) -> None:
    try:
        os.write(device, message)
    except OSError as error:
        if error.errno not in NO_REQUESTER:
            raise


class PendingReply:
    """The reply to one request that waits; for a READ, the `Reply` that operations take."""

    __slots__ = ("_interrupted", "_pending", "pid", "unique")

    def __init__(self, pending: PendingReplies, unique: int, pid: int) -> None:
        self._pending = pending
        self._interrupted = False
        self.unique = unique
        self.pid = pid

    def data(self, data: Data) -> None:
        """See `operations.Reply`. After `interrupted` the bytes are only released."""
        try:
            if self._pending.claim(self):
                self._pending.send(send_data, self.unique, data)
        finally:
            if data.release is not None:
                data.release()

    def error(self, number: int) -> None:
        """See `operations.Reply`."""
        if self._pending.claim(self):
            self._pending.send(send_error, self.unique, number)

    @property
    def interrupted(self) -> bool:
        """The reader was killed, and its read got EINTR."""
        return self._interrupted

    def interrupt(self) -> None:
        """Reply to a killed requester, which cannot end before it has a reply."""
        if self._pending.claim(self):
            self._interrupted = True
            self._pending.send(send_error, self.unique, errno.EINTR)


class PendingReplies:
    """All pending replies of a mount.

    A signal that a reader survives must not cut its read short (EINTR from a file breaks
    programs), and the kernel reports only the first signal. So a requester that got one is
    checked ten times a second, until it has its reply or is found killed.
    """

    def __init__(self, device: Device, faults: Reporter) -> None:
        self._device = device
        self._faults = faults
        self._pending: dict[int, PendingReply] = {}
        self._early_interrupts: dict[int, None] = {}
        """Of requests whose reply may still become pending."""
        self._interrupted: set[int] = set()
        self._lock = threading.Lock()
        self._is_watching = False

    def add(self, unique: int, pid: int) -> PendingReply:
        """Make a reply that will be sent later."""
        reply = PendingReply(self, unique, pid)
        with self._lock:
            self._pending[unique] = reply
            is_interrupted = unique in self._early_interrupts
            if is_interrupted:
                del self._early_interrupts[unique]
        if is_interrupted:
            self.interrupt(unique)
        return reply

    def claim(self, reply: PendingReply) -> bool:
        """True for the one caller that is to send this reply."""
        return self._pending.pop(reply.unique, None) is reply

    def send(self, send: Callable[[int, int, Body], None], unique: int, body: Body) -> None:
        """Send a reply, from any thread; one that the kernel refuses is reported as a fault."""
        try:
            with self._device as descriptor:
                send(descriptor, unique, body)
        except OSError as error:
            if error.errno not in NO_REQUESTER:
                self._faults.report_failure("sending a late answer", error)

    def interrupt(self, unique: int) -> None:
        """Handle INTERRUPT: the requester got a signal. Its reply may not be pending yet."""
        with self._lock:
            if unique not in self._pending:
                put_youngest(self._early_interrupts, unique, None, _MAX_EARLY_INTERRUPTS)
                return
            self._interrupted.add(unique)
            start = not self._is_watching
            self._is_watching = True
        if start:
            threading.Thread(target=self._watch, name="fuse-signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._interrupted &= self._pending.keys()
                replies = [self._pending[u] for u in self._interrupted if u in self._pending]
                if not replies:
                    self._is_watching = False
                    return
            for reply in replies:
                if is_being_killed(reply.pid):
                    reply.interrupt()
            time.sleep(_WATCH_S)


class PendingRead(ABC):
    """A read whose bytes are not all in memory yet: replied to as soon as they are.

    It brings together the reply and the bytes, in whichever order they come.

    `Operations.read` tries `collect`; where that returns None it calls `reply_by` with the reply.
    `resume` may be called before that, from any thread. Subclasses say where the bytes come from.
    """

    __slots__ = ("_lock", "_resumed", "reply")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resumed = False
        self.reply: Reply | None = None

    @abstractmethod
    def collect(self) -> Data | None:
        """The bytes; or None, and `resume` will be called once there may be more of them."""

    @abstractmethod
    def fail(self, reply: Reply, error: Exception) -> None:
        """Reply to a read that `collect` failed."""

    def send(self, reply: Reply, data: Data) -> None:
        """Reply with what `collect` returned."""
        reply.data(data)

    def reply_by(self, reply: Reply) -> None:
        """Reply once the bytes are there."""
        with self._lock:
            self.reply = reply
            resumed = self._resumed
        if resumed:
            self._try(reply)

    def resume(self) -> None:
        """Collect again."""
        with self._lock:
            self._resumed = True
            reply = self.reply
        if reply is not None:
            self._try(reply)

    def _try(self, reply: Reply) -> None:
        try:
            data = self.collect()
        except Exception as error:  # whatever it is, the reader must have a reply
            self.fail(reply, error)
            return
        if data is not None:
            self.send(reply, data)
