"""Which pages enter the page cache, by the kernel's own trace event; needs root.

It uses an instance of its own in tracefs, so other tracing is not affected. An event has inode,
offset and time of each page that was not in memory, the kernel's read-ahead included.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import NamedTuple

from bootseer.blocks.extents import PAGE_BYTES
from bootseer.context_managers import Closing
from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode.threads import start_without_signals
from bootseer.system.mount_calls import make_mount
from bootseer.system.processes import CAP_SYS_ADMIN, has_capability, sees_all_processes

EVENT = "events/filemap/mm_filemap_add_to_page_cache"
BUFFER_KB = 2048  # of each processor; it is read five times a second
POLL_S = 0.2
MOST_BYTES = 160 << 20  # of a busy machine; further events count as lost
MOUNTED = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
NAME = "bootseer-{pid}-{random}"
_LINE = re.compile(
    rb" (\d+)\.(\d{6}): mm_filemap_add_to_page_cache: dev (\d+):(\d+) ino ([0-9a-f]+)"
    rb" .*ofs=(\d+)(?: order=(\d+))?"
)
_LOST = re.compile(rb"\[LOST (\d+) EVENTS\]")


class PageAdded(NamedTuple):
    """Bytes `[offset, offset + length)` of an inode entered the page cache at `at_s`.

    The time is of CLOCK_MONOTONIC; `device` is of the file system that has the data.
    """

    device: int
    inode: int
    offset: int
    length: int
    at_s: float


def parse_lines(text: bytes) -> tuple[list[PageAdded], int]:
    """The events in a piece of `trace_pipe`, and how many it says were lost. Pure."""
    out = []
    for match in _LINE.finditer(text):
        seconds, micros, major, minor, inode, offset, order = match.groups()
        device = os.makedev(int(major), int(minor))
        length = PAGE_BYTES << int(order or 0)
        at_s = int(seconds) + int(micros) / 1e6
        out.append(PageAdded(device, int(inode, 16), int(offset), length, at_s))
    return out, sum(int(m[1]) for m in _LOST.finditer(text))


class Tracer(Closing):
    """Collects events from `start` to `close`; a context manager.

    With `pid`, only of that process and its later children, where process ids are those of the
    whole machine; `own_tree` says whether that is so. `start` raises NotSupportedError, saying what
    is missing, where the kernel or the privilege does not allow it.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._texts: list[bytes] = []  # parsed at the end: until then the start comes first
        self._text_bytes = 0
        self.lost = 0
        self.own_tree = False
        self._added: list[PageAdded] = []
        self._root = self._instance = self._pipe = -1
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._name = NAME.format(pid=os.getpid(), random=os.urandom(4).hex())

    def start(self) -> Tracer:
        """Begin to trace."""
        self.own_tree = self._pid is not None and sees_all_processes()
        self._root = _open_tracefs()
        try:
            self._prepare(self._pid if self.own_tree else None)
        except OSError as error:
            self.close()
            raise NotSupportedError(f"no tracing of the page cache: {error.strerror}") from error
        return self

    def _prepare(self, pid: int | None) -> None:
        self._remove_stale()
        os.mkdir(f"instances/{self._name}", dir_fd=self._root)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._instance = os.open(f"instances/{self._name}", flags, dir_fd=self._root)
        self._write("trace_clock", "mono")
        self._write("buffer_size_kb", str(BUFFER_KB))
        if pid is not None:
            self._write("options/event-fork", "1")
            self._write("set_event_pid", str(pid))
        self._write(f"{EVENT}/enable", "1")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self._pipe = os.open("trace_pipe", flags, dir_fd=self._instance)
        self._thread = threading.Thread(target=self._run, name="tracefs", daemon=True)
        start_without_signals(self._thread)

    def _remove_stale(self) -> None:
        """Remove the instances of recorders that were killed."""
        folder = os.open("instances", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root)
        try:
            for name in os.listdir(folder):
                prefix, _, rest = name.partition("-")
                # The kernel refuses to remove one that is in use; one that is just being made is
                # not in use yet.
                if prefix == NAME.partition("-")[0] and not _lives(rest.partition("-")[0]):
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=folder)
        finally:
            os.close(folder)

    def _write(self, name: str, text: str) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._instance)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def _run(self) -> None:
        while not self._end.wait(POLL_S):
            self._drain()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._pipe, 1 << 18)
            except BlockingIOError:
                return
            except OSError:
                return
            if not data:
                return
            if self._text_bytes + len(data) > MOST_BYTES:
                self.lost += 1
                continue
            self._text_bytes += len(data)
            self._texts.append(data)

    def events(self) -> list[PageAdded]:
        """All events, after `close`; adds to `lost` the number that the kernel lost."""
        if self._texts:
            self._added, lost = parse_lines(b"".join(self._texts))
            self.lost += lost
            self._texts = []
        return self._added

    def close(self) -> None:
        """Stop, read the rest of the buffer, and remove the instance; twice is safe."""
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._write(f"{EVENT}/enable", "0")
            self._end.set()
            self._thread.join()
            self._thread = None
            self._drain()
        for fd in (self._pipe, self._instance):
            if fd >= 0:
                os.close(fd)
        if self._instance >= 0:
            with contextlib.suppress(OSError):
                os.rmdir(f"instances/{self._name}", dir_fd=self._root)
        if self._root >= 0:
            os.close(self._root)
        self._pipe = self._instance = self._root = -1

    def __enter__(self) -> Tracer:
        return self.start()


def _lives(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}")


def may_trace() -> bool:
    """Whether tracing may work: the kernel allows it only to the machine's root."""
    return has_capability(CAP_SYS_ADMIN)


def _open_tracefs() -> int:
    """A descriptor of tracefs: where it is mounted, else of a mount of our own without a path."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    for place in MOUNTED:
        if os.path.isdir(f"{place}/instances") and os.access(f"{place}/instances", os.W_OK):
            return os.open(place, flags)
    try:
        mounted = make_mount("tracefs")
    except OSError as error:
        raise NotSupportedError(
            f"no tracing of the page cache: cannot make a mount of tracefs: {error.strerror}"
        ) from error
    try:
        return os.open(".", flags, dir_fd=mounted)
    finally:
        os.close(mounted)
