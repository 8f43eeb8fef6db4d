"""Reads and looks at names that wait: answered later, from any thread, or given up when killed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from bootseer.fuse.mount.device import Device
from bootseer.fuse.operations import Data
from bootseer.fuse.protocol.replies import header
from bootseer.fuse.protocol.requests import OUT_HEADER
from bootseer.fuse.serve.requesters import is_being_killed
from bootseer.reporting import Reporter

_EARLY_KEPT = 256
_WATCH_S = 0.1
_MOST_VIEWS = 1000
Answer = TypeVar("Answer")
_pack = OUT_HEADER.struct.pack

GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED})
"""What writing an answer says when nobody waits for it: interrupted in the queue, or unmounted."""


def send_data(device: int, unique: int, data: Data) -> None:
    """Send an answer's bytes. Raises OSError of the device, but for `GONE`."""
    views = data.views
    if len(views) > _MOST_VIEWS:
        views = [b"".join(views)]
    try:
        os.writev(device, (_pack(16 + sum(map(len, views)), 0, unique), *views))
    except OSError as error:
        if error.errno not in GONE:
            raise


def send_error(device: int, unique: int, number: int) -> None:
    """Send an errno as the answer. Raises as `send_data`."""
    try:
        os.write(device, header(unique, error=number))
    except OSError as error:
        if error.errno not in GONE:
            raise


class Parked:
    """One waiting request; of a read, the `Reply` that operations take."""

    __slots__ = ("_interrupted", "_reads", "pid", "unique")

    def __init__(self, reads: ParkedReads, unique: int, pid: int) -> None:
        self._reads = reads
        self._interrupted = False
        self.unique = unique
        self.pid = pid

    def data(self, data: Data) -> None:
        """See `operations.Reply`. After `interrupted` the bytes are only released."""
        try:
            if self._reads.take(self):
                self._reads.send(send_data, self.unique, data)
        finally:
            if data.release is not None:
                data.release()

    def error(self, number: int) -> None:
        """See `operations.Reply`."""
        if self._reads.take(self):
            self._reads.send(send_error, self.unique, number)

    @property
    def interrupted(self) -> bool:
        """The reader was killed, and its read answered with EINTR."""
        return self._interrupted

    def give_up(self) -> None:
        """Answer a killed reader, which could not end otherwise."""
        if self._reads.take(self):
            self._interrupted = True
            self._reads.send(send_error, self.unique, errno.EINTR)


class ParkedReads:
    """All waiting reads of a mount.

    A signal that a reader survives must not cut its read short (EINTR from a file breaks
    programs), and the kernel announces only the first signal. So a reader that got one is
    looked at, ten times a second, until it has its bytes or is found killed.
    """

    def __init__(self, device: Device, faults: Reporter) -> None:
        self._device = device
        self._faults = faults
        self._waiting: dict[int, Parked] = {}
        self._early: OrderedDict[int, None] = OrderedDict()
        self._suspects: set[int] = set()
        self._lock = threading.Lock()
        self._watching = False

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, unique: int, pid: int) -> Parked:
        """A reply to be given later."""
        parked = Parked(self, unique, pid)
        with self._lock:
            self._waiting[unique] = parked
            early = unique in self._early
            if early:
                del self._early[unique]
        if early:
            self.interrupt(unique)
        return parked

    def take(self, parked: Parked) -> bool:
        """True for the one caller that may answer."""
        return self._waiting.pop(parked.unique, None) is parked

    def send(self, send: Callable[[int, int, Answer], None], unique: int, answer: Answer) -> None:
        """Send an answer, from any thread; one that the kernel will not have is a fault."""
        try:
            with self._device as descriptor:
                send(descriptor, unique, answer)
        except OSError as error:
            if error.errno not in GONE:
                self._faults.report_failure("sending a late answer", error)

    def interrupt(self, unique: int) -> None:
        """The kernel says that the reader got a signal; its read may not be parked yet."""
        with self._lock:
            if unique not in self._waiting:
                self._early[unique] = None
                if len(self._early) > _EARLY_KEPT:
                    self._early.popitem(last=False)
                return
            self._suspects.add(unique)
            start = not self._watching
            self._watching = True
        if start:
            threading.Thread(target=self._watch, name="fuse-signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._suspects &= self._waiting.keys()
                suspects = [self._waiting[u] for u in self._suspects if u in self._waiting]
                if not suspects:
                    self._watching = False
                    return
            for parked in suspects:
                if is_being_killed(parked.pid):
                    parked.give_up()
            time.sleep(_WATCH_S)
