"""A real terminal for tests: a process whose session's controlling terminal is a pty of ours."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time


class Terminal:
    """Runs a command on a pseudo terminal; a context manager that leaves nothing behind."""

    def __init__(self, command: list[str], env: dict[str, str], rows: int = 31, columns: int = 97):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, env)
        self.resize(rows, columns)
        self.text = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, text: bytes) -> None:
        os.write(self.master, text)

    def expect(self, wanted: bytes, seconds: float = 30.0) -> bytes:
        """Read until `wanted` came; return and forget everything up to its end."""
        end = time.monotonic() + seconds
        while wanted not in self.text:
            if not self._more(end):
                raise AssertionError(f"{wanted!r} never came, only {self.text!r}")
        before, _, self.text = self.text.partition(wanted)
        return before + wanted

    def _more(self, end: float) -> bool:
        ready = select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:
            data = b""
        self.text += data
        return bool(data)

    def wait(self) -> int:
        """Read to the end and return the wait status."""
        end = time.monotonic() + 30
        while self._more(end):
            pass
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        return status

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)
