"""Child processes of `start`: each in a process group of its own, and killed whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from bootseer.entrypoint.job_process import IGNORED_BY_PYTHON
from bootseer.errors import describe
from bootseer.system.child_processes import command_for, fork, silence_descriptors
from bootseer.system.processes import children_of, read_proc

MARKER = "BOOTSEER_PART_ID"
"""Variable that marks the processes of one part, even those that left its process group."""

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL: time to release a lease and to undo what is half done."""

_SOCKET_FD = 3  # as in `part_process.SOCKET_FD`


class ProcessGroup:
    """One running process group; a context manager that leaves nothing running.

    `marker` marks the processes of a spawned group; a forked one has none, and its strays are found
    as descendants. `link` is our end of the socket to a part's process, None for a plain command.
    """

    def __init__(self, pid: int, marker: str, link: socket.socket | None) -> None:
        self.pid = pid
        self.marker = marker
        self.link = link
        self.wait_status: int | None = None
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1  # an old kernel or a sandbox: the loop polls instead

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reap(self) -> bool:
        """Collect the first process if it has ended; returns whether it has."""
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
            pass  # ended, or only processes are left that we may not signal

    def kill(self) -> None:
        """Kill all processes of the part at once, including those that left the group."""
        for _ in range(5):  # a process may fork between the search and the kill
            strays: list[int] = []
            if self.wait_status is None:
                if not self.marker:  # afterwards they have another parent
                    strays += _find_descendants(self.pid)
                self.signal(signal.SIGKILL)
            if self.marker:
                strays += _find_marked(self.marker)
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            if not strays:
                break
        self._wait_for_end()

    def kill_leader(self) -> None:
        """Kill the first process alone: its background processes go on."""
        if self.wait_status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait_for_end()

    def _wait_for_end(self) -> None:
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


def spawn_part(message: Mapping[str, object], environ: Mapping[str, str]) -> ProcessGroup:
    """Start a part's own process and send it its request; raises OSError when that fails."""
    command = command_for("bootseer.entrypoint.part_process")
    return start_part(message, lambda link: _spawn(command, environ, link.fileno()))


def start_part(
    message: Mapping[str, object], begin: Callable[[socket.socket], ProcessGroup]
) -> ProcessGroup:
    """Have `begin` start a process that has one end of a socket, and send it a request there.

    Raises OSError when that fails.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            group = begin(theirs)
        group.link = ours
        ours.sendall(json.dumps({**message, "parent": os.getpid()}).encode())
        ours.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it ended at once; `start` notices that like any other end
    except BaseException:  # the socket has no other owner yet
        ours.close()
        raise
    return group


def spawn_plain(command: Sequence[str], environ: Mapping[str, str]) -> ProcessGroup:
    """Start a plain command, found in PATH; raises OSError when it cannot be started."""
    return _spawn(command, environ, None)


def fork_group(link: socket.socket, run: Callable[[socket.socket], None]) -> ProcessGroup:
    """Fork a process group that has `link`, its standard output and error, and nothing else open.

    `run` is called in it, and must neither return through frames of this process nor need what
    this process has. Raises OSError.
    """
    pid = fork()
    if pid == 0:
        exit_code = 1
        try:
            os.setpgid(0, 0)
            silence_descriptors({1, 2, link.fileno()})
            run(link)
            exit_code = 0
        except Exception as error:  # the border: nothing else of this process would say why
            with contextlib.suppress(OSError):
                os.write(2, f"bootseer: {describe(error)}\n".encode())
        finally:
            os._exit(exit_code)
    with contextlib.suppress(OSError):  # it did so itself already, or has ended
        os.setpgid(pid, pid)
    return ProcessGroup(pid, "", None)


def _spawn(command: Sequence[str], environ: Mapping[str, str], link_fd: int | None) -> ProcessGroup:
    marker = os.urandom(8).hex()
    # Standard input belongs to the job: nothing before it may read from it.
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if link_fd is not None:
        actions.append((os.POSIX_SPAWN_DUP2, link_fd, _SOCKET_FD))
    pid = os.posix_spawnp(
        command[0],
        list(command),
        {**environ, MARKER: marker},
        file_actions=actions,
        setpgroup=0,
        setsigdef=IGNORED_BY_PYTHON,
    )
    return ProcessGroup(pid, marker, None)


def end_groups(groups: Iterable[ProcessGroup], grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to all, then SIGKILL to what is left of them after `grace_s` seconds."""
    alive = [group for group in groups if not group.reap()]
    for group in alive:
        group.signal(signal.SIGTERM)
        group.signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
    until = time.monotonic() + grace_s
    while alive and time.monotonic() < until:
        time.sleep(0.01)
        alive = [group for group in alive if not group.reap()]
    for group in groups:
        group.kill()


def reap_orphans() -> bool:
    """As PID 1, collect adopted children that ended; returns whether some have yet to end."""
    if os.getpid() != 1:
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _find_descendants(pid: int) -> list[int]:
    found = children_of(pid)
    for process in found:  # grows while it is gone through
        found += children_of(process)
    return found


def _find_marked(marker: str) -> Iterable[int]:
    """Ids of the processes, without zombies, that have the marker in their environment."""
    wanted = f"{MARKER}={marker}".encode()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            if wanted in read_proc(f"/proc/{name}/environ").split(b"\0"):
                yield int(name)
        except OSError:
            continue  # ended meanwhile, another user's, or in a system call that hangs
