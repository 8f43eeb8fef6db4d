"""Child processes of `start`: each in its own process group, and killed whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from bootseer.entrypoint.exec_program import RESET_SIGNALS
from bootseer.system.interpreter import command_for
from bootseer.system.proc_files import read_proc

MARKER = "BOOTSEER_PART_ID"
"""Variable by which the processes of one part are found again, whatever group they moved to."""

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL: time to release a lease and to undo what is half done."""

_REPORT_FD = 3


class Child:
    """One running process group; a context manager that leaves nothing running.

    `link` is our end of the socket to a part's process, None for a plain command.
    """

    def __init__(self, pid: int, marker: str, link: socket.socket | None) -> None:
        self.pid = pid
        self.marker = marker
        self.link = link
        self.wait_status: int | None = None
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1  # an old kernel or a sandbox: the loop looks now and then instead

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reap(self) -> bool:
        """Collect the process if it has ended; tell whether it has."""
        if self.wait_status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.wait_status = status
        return self.wait_status is not None

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # gone, or only processes left that are not ours to signal

    def kill(self) -> None:
        """End every process of this child at once, including those that left its group."""
        for _ in range(5):  # a process may fork between the look and the kill
            if self.wait_status is None:
                self.signal(signal.SIGKILL)
            strays = list(_marked(self.marker))
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            if not strays:
                break
        self._give_up_on()

    def kill_leader(self) -> None:
        """End the first process alone: what it left working in the background goes on."""
        if self.wait_status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._give_up_on()

    def _give_up_on(self) -> None:
        """Wait for a killed process, but not for one held in the kernel by a dead file system."""
        until = time.monotonic() + GRACE_S
        while not self.reap() and time.monotonic() < until:
            time.sleep(0.002)
        if self.wait_status is None:
            self.wait_status = signal.SIGKILL

    def close_link(self) -> None:
        """Close our end of the socket; calling it twice is safe."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def close(self) -> None:
        """Kill what still runs and free the descriptors; calling it twice is safe."""
        if self.wait_status is None:
            self.kill()
        self.close_link()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def spawn_part(message: Mapping[str, object], environ: Mapping[str, str]) -> Child:
    """Start a part's own process and hand it its request; raises OSError when that fails."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            command = command_for("bootseer.entrypoint.child")
            child = _spawn(command, environ, theirs.fileno(), ours)
        ours.sendall(json.dumps({**message, "parent": os.getpid()}).encode())
        ours.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it died at once; its end is noticed like any other
    except BaseException:  # nobody else has it to close
        ours.close()
        raise
    return child


def spawn_plain(command: Sequence[str], environ: Mapping[str, str]) -> Child:
    """Start a plain command, found in PATH; raises OSError when it cannot be started."""
    return _spawn(command, environ, None, None)


def _spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    link_fd: int | None,
    link: socket.socket | None,
) -> Child:
    marker = os.urandom(8).hex()
    # The job's standard input is the job's: nothing before it may read from it.
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if link_fd is not None:
        actions.append((os.POSIX_SPAWN_DUP2, link_fd, _REPORT_FD))
    pid = os.posix_spawnp(
        command[0],
        list(command),
        {**environ, MARKER: marker},
        file_actions=actions,
        setpgroup=0,
        setsigdef=RESET_SIGNALS,
    )
    return Child(pid, marker, link)


def end_all(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """SIGTERM to all, then SIGKILL to whatever is left of them after `grace_s` seconds."""
    alive = [child for child in children if not child.reap()]
    for child in alive:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # a stopped process would not hear the former
    until = time.monotonic() + grace_s
    while alive and time.monotonic() < until:
        time.sleep(0.01)
        alive = [child for child in alive if not child.reap()]
    for child in children:
        child.kill()


def orphans_live_on() -> bool:
    """As PID 1, collect adopted children that ended; tell whether some have yet to end."""
    if os.getpid() != 1:
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _marked(marker: str) -> Iterable[int]:
    """Processes, zombies apart, that carry the marker in their environment."""
    wanted = f"{MARKER}={marker}".encode()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            if wanted in read_proc(f"/proc/{name}/environ").split(b"\0"):
                yield int(name)
        except OSError:
            continue  # ended meanwhile, another user's, or in a call that hangs
