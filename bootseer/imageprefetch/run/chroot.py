"""A command in a chroot of our own on a mounted image's tree, in namespaces of its own.

What the command writes goes to an overlay that is thrown away.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from typing import NoReturn

from bootseer.errors import NotFoundError
from bootseer.imageprefetch.run.command import (
    EVENTS_INSIDE,
    PASSED_ON,
    Command,
    await_end,
    signals_passed_on,
)
from bootseer.system.child_processes import end_with_parent
from bootseer.system.libc import last_error, libc
from bootseer.system.mount_calls import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
)

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000


def run(command: Command, until: Callable[[], bool] | None) -> int:
    """Run a command to its end, or until `until`; returns as `await_end`."""
    with tempfile.TemporaryDirectory(prefix="bootseer-root-") as work:
        pid = _start(command, work)
        with signals_passed_on() as pass_on_to:
            pass_on_to(pid)
            return await_end(pid, until, lambda: os.kill(pid, signal.SIGKILL))


def _start(command: Command, work: str) -> int:
    """Start the command in namespaces of its own; returns the process to be waited for.

    That process ends with the command and by its code; killing it kills the command and all that
    it started. Call it in a process that has one thread.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in PASSED_ON:
            if callable(signal.getsignal(number)):  # what our caller would do with it
                signal.signal(number, signal.SIG_DFL)
        _make_namespaces(command, work)
    except BaseException as error:  # this process must end here, whatever happened
        _exit_with(error)


def _exit_with(error: BaseException) -> NoReturn:
    code = 127 if isinstance(error, (NotFoundError, FileNotFoundError)) else 126
    os.write(2, f"bootseer: cannot run the command: {error}\n".encode(errors="replace"))
    os._exit(code)


def _make_namespaces(command: Command, work: str) -> NoReturn:
    """Make the namespaces, and pass on signals and exit code of their first process."""
    end_with_parent(signal.SIGKILL)
    if libc().unshare(_CLONE_NEWNS | _CLONE_NEWPID):
        raise OSError(last_error().errno, "no namespaces of our own")
    inner = os.fork()
    if not inner:
        try:
            end_with_parent(signal.SIGKILL)
            _run_inside(command, work)
        except BaseException as error:  # as above
            _exit_with(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: os.kill(inner, got))
    _, status = os.waitpid(inner, 0)
    _exit_as(status)


def _exit_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _run_inside(command: Command, work: str) -> NoReturn:
    """Mount the tree and what a command needs besides, and run the command there."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("bootseer", work, "tmpfs")
    upper, overlay_work, root = (os.path.join(work, name) for name in ("upper", "work", "root"))
    for folder in (upper, overlay_work, root):
        os.mkdir(folder)
    options = f"lowerdir={command.tree},upperdir={upper},workdir={overlay_work}"
    mount("overlay", root, "overlay", 0, options)
    host = {name: os.open(name, os.O_PATH | os.O_CLOEXEC) for name in ("/dev", "/sys")}
    if command.events_dir:
        host[EVENTS_INSIDE] = os.open(command.events_dir, os.O_PATH | os.O_CLOEXEC)
    os.chroot(root)
    os.chdir("/")
    # From here on no link of the image can lead out of its tree.
    os.makedirs("/proc", exist_ok=True)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for target, fd in host.items():
        os.makedirs(target, exist_ok=True)
        mount(f"/proc/self/fd/{fd}", target, "", MS_BIND | MS_REC)
    # A namespace's first process gets only signals that it handles: it passes them on.
    pid = os.fork()
    if pid:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: os.kill(pid, got))
        while True:
            ended, status = os.wait()  # the command, or a process that it left behind
            if ended == pid:
                _exit_as(status)
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    directory = command.config.working_dir or "/"
    is_new = not os.path.isdir(directory)
    os.makedirs(directory, exist_ok=True)
    identity = _find_identity(command.config.user)
    if identity is not None:
        if is_new:  # as podman makes it
            os.chown(directory, *identity)
        os.setgroups([])
        os.setgid(identity[1])
        os.setuid(identity[0])
    os.chdir(directory)
    variables = command.variables()
    os.execvpe(command.words[0], list(command.words), variables)


def _find_identity(user: str) -> tuple[int, int] | None:
    """The user and group that the image names (`name`, `uid`, or either with `:group`), if any."""
    if not user:
        return None
    name, _, group = user.partition(":")
    uid, gid = _find_numbers("/etc/passwd", name, (2, 3))
    if group:
        gid = _find_numbers("/etc/group", group, (2, 2))[0]
    return uid, gid


def _find_numbers(path: str, name: str, columns: tuple[int, int]) -> tuple[int, int]:
    """Two numbers of a line of passwd or group, by name or number."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                words = line.rstrip("\n").split(":")
                if len(words) > max(columns) and name in (words[0], words[2]):
                    return int(words[columns[0]]), int(words[columns[1]])
    except (OSError, ValueError):
        pass
    if name.isdigit():
        return int(name), 0
    raise NotFoundError(f"the image has no user or group {name!r}; name another one")
