"""A read whose bytes are not all in memory yet: replied to as soon as they are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from bootseer.fuse.operations import Data, Reply


class PendingRead(ABC):
    """Brings together the reply to a read and its bytes, in whichever order they come.

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
