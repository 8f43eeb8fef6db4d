"""A command in a chroot of our own on a mounted image's tree, in namespaces of its own.

What the command writes goes to an overlay that is thrown away.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Callable
from typing import NoReturn

from bootseer.errors import NotFoundError
from bootseer.imageprefetch.run.command import EVENTS_INSIDE, PASSED_ON, Command, await_end

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1


def run(command: Command, until: Callable[[], bool] | None) -> int:
    """Run a command to its end, or until `until`; returns as `await_end`."""
    with tempfile.TemporaryDirectory(prefix="bootseer-root-") as work:
        pid = _in_chroot(command, work)
        return await_end(pid, until, lambda: os.kill(pid, signal.SIGKILL))


def _in_chroot(command: Command, work: str) -> int:
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
        _outer(command, work)
    except BaseException as error:  # a border: this process must end here
        _say_and_exit(error)


def _say_and_exit(error: BaseException) -> NoReturn:
    code = 127 if isinstance(error, (NotFoundError, FileNotFoundError)) else 126
    os.write(2, f"bootseer: cannot run the command: {error}\n".encode(errors="replace"))
    os._exit(code)


def _outer(command: Command, work: str) -> NoReturn:
    """Make the namespaces, and pass on signals and exit code of the process within."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "no namespaces of our own")
    inner = os.fork()
    if not inner:
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _inner(libc, command, work)
        except BaseException as error:  # a border, as above
            _say_and_exit(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: os.kill(inner, got))
    _, status = os.waitpid(inner, 0)
    _leave(status)


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _inner(libc: ctypes.CDLL, command: Command, work: str) -> NoReturn:
    _mount(libc, "none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount(libc, "bootseer", work, "tmpfs", 0)
    places = [os.path.join(work, name) for name in ("upper", "work", "root")]
    for place in places:
        os.mkdir(place)
    options = f"lowerdir={command.tree},upperdir={places[0]},workdir={places[1]}"
    _mount(libc, "overlay", places[2], "overlay", 0, options)
    host = {name: os.open(name, os.O_PATH | os.O_CLOEXEC) for name in ("/dev", "/sys")}
    if command.events_dir:
        host[EVENTS_INSIDE] = os.open(command.events_dir, os.O_PATH | os.O_CLOEXEC)
    os.chroot(places[2])
    os.chdir("/")
    # From here on no link of the image can lead out of its tree.
    os.makedirs("/proc", exist_ok=True)
    _mount(libc, "proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for target, fd in host.items():
        os.makedirs(target, exist_ok=True)
        _mount(libc, f"/proc/self/fd/{fd}", target, "", _MS_BIND | _MS_REC)
    # The first process of a namespace hears only signals that it handles: be that for the command.
    pid = os.fork()
    if pid:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: os.kill(pid, got))
        while True:
            ended, status = os.wait()  # of the command, or of what it left behind
            if ended == pid:
                _leave(status)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    directory = command.config.working_dir or "/"
    is_new = not os.path.isdir(directory)
    os.makedirs(directory, exist_ok=True)
    identity = _identity(command.config.user)
    if identity is not None:
        if is_new:  # as podman makes it
            os.chown(directory, *identity)
        os.setgroups([])
        os.setgid(identity[1])
        os.setuid(identity[0])
    os.chdir(directory)
    variables = command.variables()
    os.execvpe(command.words[0], list(command.words), variables)


def _mount(
    libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int, data: str = ""
) -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _identity(user: str) -> tuple[int, int] | None:
    """The user and group that the image names (`name`, `uid`, or either with `:group`), if any."""
    if not user:
        return None
    name, _, group = user.partition(":")
    uid, gid = _looked_up("/etc/passwd", name, (2, 3))
    if group:
        gid = _looked_up("/etc/group", group, (2, 2))[0]
    return uid, gid


def _looked_up(path: str, name: str, columns: tuple[int, int]) -> tuple[int, int]:
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
