"""Work that the agent does at times, in a process of its own."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bootseer.system.child_processes import close_descriptors, end_with_parent, fork, name_thread
from bootseer.system.priority import go_idle

NAME = b"bootseer-sweep"
"""The name of its process, as `ps` shows it."""


@dataclass(frozen=True, slots=True)
class Sweeper:
    """What is done every `interval_s`, first after a random part of that time.

    `functions` ("package.module:function") are called one after the other with `arguments`. What
    one raises is written to standard error, and it is called again the next time.
    """

    functions: Sequence[str]
    arguments: Sequence[object]
    interval_s: float
    idle: bool = False
    """Whether it uses the processor and the disk only when nobody else does."""

    def start(self) -> int:
        """Begin, in a new process, which ends with this one; returns its process id."""
        agent = os.getpid()
        child = fork()
        if child == 0:
            self._sweep(agent)
        return child

    def _sweep(self, agent: int) -> NoReturn:
        try:
            close_descriptors(0, 1, 2)  # the agent's place must be free after it
            end_with_parent(signal.SIGKILL)
            name_thread(NAME)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # those are for the agent
            if self.idle:  # else it holds locks for which starts wait
                go_idle()
            # Not all nodes of a job at once.
            wait_s = self.interval_s * int.from_bytes(os.urandom(4)) / 2**32
            while os.getppid() == agent:  # it may have ended before the kernel was asked
                time.sleep(wait_s)
                for name in self.functions:
                    self._call(name)
                wait_s = self.interval_s
        finally:
            os._exit(1)

    def _call(self, name: str) -> None:
        try:
            function: Callable[..., object] = pkgutil.resolve_name(name)
            function(*self.arguments)
        except Exception as error:  # a border: the other functions, and the next time, remain
            sys.stderr.write(f"bootseer: the agent's {name} failed: {error!r}\n")
            sys.stderr.flush()
