"""Run one command so that neither it nor its parent can notice that we stand in between.

The child stays in our process group and session and keeps our descriptors, so the terminal, job
control and a `kill` of the whole group treat it as they would without us. What reaches only us
is passed on: every signal that can be caught, except those that the terminal sends to the whole
foreground group. When the child stops for job control, so do we.

One case cannot be distinguished: a signal that a process sends to the whole group (`kill -TERM
-GROUP`) looks like one sent to us alone, so the child gets it twice, directly and from us.

Exit codes: the child's own; 128+N when signal N ended it; 126 when it cannot be executed, 127
when it is not found. Where the terminal's Ctrl-C ended the child, we die of SIGINT too, because a
shell tells by this that its loop is to end; the code it sees is the same 130.

Killing us with SIGKILL leaves the child running: nothing of ours ends a job of its own accord.
Killing the group, the cgroup or the container ends both.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Iterable, Mapping, Sequence

    FileActions = Sequence[tuple[int, int, int]]  # (os.POSIX_SPAWN_DUP2, from, to)
else:
    import _signal  # `signal` itself imports enum: 2 ms

# Raised by faults of the receiving process itself; these cannot be blocked.
_SYNCHRONOUS = {
    _signal.SIGSEGV,
    _signal.SIGBUS,
    _signal.SIGFPE,
    _signal.SIGILL,
    _signal.SIGTRAP,
    _signal.SIGSYS,
}
_TERMINAL = {
    _signal.SIGINT,
    _signal.SIGQUIT,
    _signal.SIGHUP,
    _signal.SIGWINCH,
    _signal.SIGCONT,
    _signal.SIGTSTP,
    _signal.SIGTTIN,
    _signal.SIGTTOU,
}
_STOPS = {_signal.SIGTSTP, _signal.SIGTTIN, _signal.SIGTTOU}
_SI_KERNEL = 0x80  # si_code of asm-generic/siginfo.h
# Linux's numbers, the same on every architecture: the module `errno` is a file to load.
ENOENT, EIO, E2BIG, ENOEXEC = 2, 5, 7, 8
# Python ignores these at start-up. Whether they were ignored before is unknown, so a command that
# we start gets the default, as almost all processes have it.
IGNORED_BY_PYTHON = (_signal.SIGPIPE, _signal.SIGXFSZ)


class Result:
    """How a child ended: `code` is our own exit code, `signal` the one that killed it (0 = none).

    `error` says why the command could not be executed, "" if it was. `interrupted`: the terminal's
    Ctrl-C ended it.
    """

    __slots__ = ("code", "error", "interrupted", "signal")

    def __init__(
        self, code: int, signal: int = 0, error: str = "", interrupted: bool = False
    ) -> None:
        self.code, self.signal, self.error, self.interrupted = code, signal, error, interrupted


def original_environment() -> dict[str, str]:
    """Return the environment that this process was started with.

    Python adds LC_CTYPE in a C locale (PEP 538); a child must not see that.
    """
    environ = dict(os.environ)
    if environ.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8"):
        try:
            with open("/proc/self/environ", "rb", buffering=0) as file:
                given = file.read(1 << 22)
        except OSError:
            return environ
        if not given.startswith(b"LC_CTYPE=") and b"\0LC_CTYPE=" not in given:
            del environ["LC_CTYPE"]
    return environ


class Child:
    """A running command. Signals to us are blocked from before its start and passed on by `wait`.

    `on_signal(number)` gets each signal first; it returns True to keep it from the child.
    """

    def __init__(self, on_signal: Callable[[int], bool] | None = None) -> None:
        self.pid = 0
        self._on_signal = on_signal
        self._was_asked_to_stop = self._terminal_interrupt = False
        self._held: Iterable[int] = ()
        self._before: Iterable[int] = ()

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], file_actions: FileActions = ()
    ) -> None:
        """Block signals and start the command; raises OSError when it cannot be executed."""
        held = set(_signal.valid_signals()) - _SYNCHRONOUS
        held -= {_signal.SIGKILL, _signal.SIGSTOP}
        self._held = held
        self._before = _signal.pthread_sigmask(_signal.SIG_BLOCK, held)
        try:
            self.pid = self._spawn(command, environ, file_actions)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Restore the signal mask of this process."""
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._before)

    def _spawn(
        self, command: Sequence[str], environ: Mapping[str, str], file_actions: FileActions
    ) -> int:
        if _signal.getsignal(_signal.SIGCHLD) == _signal.SIG_IGN:
            # The kernel would reap the child for us and drop its exit code.
            return self._spawn_by_fork(command, environ, file_actions)
        try:
            return self._posix_spawn(command, environ, file_actions)
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
        # A script without an interpreter line: a shell runs it, as in execvp(3).
        from shutil import which

        path = command[0] if "/" in command[0] else which(command[0]) or command[0]
        return self._posix_spawn(["/bin/sh", path, *command[1:]], environ, file_actions)

    def _posix_spawn(
        self, command: Sequence[str], environ: Mapping[str, str], file_actions: FileActions
    ) -> int:
        return os.posix_spawnp(
            command[0],
            list(command),
            environ,
            file_actions=file_actions,
            setsigmask=self._before,
            setsigdef=IGNORED_BY_PYTHON,
        )

    def _spawn_by_fork(
        self, command: Sequence[str], environ: Mapping[str, str], file_actions: FileActions
    ) -> int:
        """Spawn for the rare parent that ignores SIGCHLD, which the child is to inherit."""
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
                for number in IGNORED_BY_PYTHON:
                    _signal.signal(number, _signal.SIG_DFL)
                for action in file_actions:
                    os.dup2(action[1], action[2])
                _signal.pthread_sigmask(_signal.SIG_SETMASK, self._before)
                os.execvpe(command[0], list(command), environ)
            except OSError as error:
                os.write(write_end, b"%d" % (error.errno or EIO))
            finally:
                os._exit(126)
        os.close(write_end)
        failed = os.read(read_end, 16)
        os.close(read_end)
        if failed:
            os.waitpid(pid, 0)
            raise OSError(int(failed), os.strerror(int(failed)))
        return pid

    def wait(self, on_other: Callable[[int, int], None] | None = None) -> Result:
        """Wait for the child's end, passing signals on; reap adopted children as well.

        `on_other(pid, wait status)` is called for these.
        """
        while True:
            status = self._reap(on_other)
            if status is not None:
                break
            info = _signal.sigwaitinfo(self._held)
            if info.si_signo != _signal.SIGCHLD and not (
                self._on_signal and self._on_signal(info.si_signo)
            ):
                self._forward_signal(info.si_signo, info.si_code)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            interrupted = number == _signal.SIGINT and self._is_from_terminal()
            return Result(128 + number, number, interrupted=interrupted)
        return Result(os.WEXITSTATUS(status))

    def _is_from_terminal(self) -> bool:
        """Whether a SIGINT came from the terminal; the one sent to us may still be pending."""
        info = _signal.sigtimedwait({_signal.SIGINT}, 0)
        return self._terminal_interrupt or (info is not None and info.si_code == _SI_KERNEL)

    def _reap(self, on_other: Callable[[int, int], None] | None) -> int | None:
        """Collect all children that changed; return the command's wait status if it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                # A tracer or another thread took its status; there is nothing better to return.
                return 255 << 8
            if pid == 0:
                return None
            if os.WIFSTOPPED(status):
                if pid == self.pid:
                    self._stop_like_child(os.WSTOPSIG(status))
            elif pid == self.pid:
                return status
            elif on_other is not None:
                on_other(pid, status)

    def _forward_signal(self, number: int, code: int) -> None:
        if code == _SI_KERNEL and number in _TERMINAL:
            # The terminal signals the whole group. A hang-up goes only to the session's leader,
            # which the child would be in our place.
            self._terminal_interrupt |= number == _signal.SIGINT
            if number != _signal.SIGHUP or os.getsid(0) != os.getpid():
                return
        if number == _signal.SIGCONT and not self._is_stopped() and _has_terminal():
            return  # the shell continued the whole group
        self._was_asked_to_stop = number in _STOPS
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            pass  # a set-user-id child; without us the sender would have been refused as well

    def _is_stopped(self) -> bool:
        # Needed by job control alone.
        from bootseer.system.processes import read_proc, stat_fields

        try:
            return stat_fields(read_proc(f"/proc/{self.pid}/stat"))[0] in (b"T", b"t")
        except (OSError, IndexError, RuntimeError):  # no /proc, or no thread to ask it
            return True

    def _stop_like_child(self, number: int) -> None:
        """Stop as the child did, if there is something to continue us.

        That is a shell at a terminal, or the sender of a stop signal that we passed on.
        """
        if not self._was_asked_to_stop and not _has_terminal():
            return
        self._was_asked_to_stop = False
        if _signal.SIGCONT in _signal.sigpending():
            return  # already continued
        if number not in _STOPS:
            os.kill(os.getpid(), _signal.SIGSTOP)
            return
        # One signal, not two: the terminal may have sent us the same, which is still pending.
        # A SIGCONT that arrives from here on removes it.
        os.kill(os.getpid(), number)
        if not self._is_stopped():
            _signal.sigtimedwait({number}, 0)
            return
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {number})
        _signal.pthread_sigmask(_signal.SIG_BLOCK, {number})
        # We run again, so this SIGCONT ended the stop; kept pending, it would prevent the next one.
        _signal.sigtimedwait({_signal.SIGCONT}, 0)


def _has_terminal() -> bool:
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    os.close(fd)
    return True


def make_failure(command: Sequence[str], error: OSError) -> Result:
    """The result of a command that cannot be executed: 127 if it was not found, else 126."""
    code = 127 if error.errno == ENOENT else 126
    reason = os.strerror(error.errno) if error.errno else str(error)
    return Result(code, error=f"cannot run '{command[0]}': {reason}")


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
    file_actions: FileActions = (),
    on_signal: Callable[[int], bool] | None = None,
) -> Child:
    """Start `command` with `environ` and our variables `added`; raises OSError if that fails.

    If the environment is too long because of our variables, they are left out.
    """
    child = Child(on_signal)
    try:
        child.start(command, {**environ, **added}, file_actions)
        return child
    except OSError as error:
        if error.errno != E2BIG or not added:
            raise
    child.start(command, environ, file_actions)
    return child


def run_command(
    command: Sequence[str], environ: Mapping[str, str], added: Mapping[str, str]
) -> Result:
    """Run a command to its end; if it cannot be executed, the result says why."""
    try:
        return start(command, environ, added).wait()
    except OSError as error:
        return make_failure(command, error)


def say(text: str) -> None:
    """Write one line of ours to standard error, if possible."""
    try:
        sys.stderr.write(f"bootseer: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # it is closed, or full: the exit code tells enough


def leave_now(code: int) -> int:
    """End this process without tearing down the interpreter.

    That costs 2 ms at least, and more after large imports or data, and frees nothing that matters.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or its reader has ended
    os._exit(code)


def mirror_result(result: Result) -> int:
    """End as the child did: return its exit code, or die of the terminal's Ctrl-C.

    Writes `result.error` to standard error.
    """
    if result.error:
        say(result.error)
    if result.interrupted and os.getpid() != 1:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGINT})
        os.kill(os.getpid(), _signal.SIGINT)
    return result.code
