"""Ask the node's agent to run a command, in place of a Python that has yet to import it.

Imports next to nothing: the first milliseconds of each mount pass here.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Sequence

    from bootseer.agent.protocol import Program

    RunProgram = Callable[[Program, Callable[[int], None]], int]

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""
BEGIN_S = 2.0
"""How long an agent that is slow, or was stopped, may keep a command from beginning by itself."""
SILENT_S = 3.0
"""How long a task that has begun may give no sign of life: less than a start may lose to us."""
LOST = -1
"""In place of an exit code: the task's process was killed, or hung and was killed here."""
LOST_TEXT = "the node's agent died or hung while it worked; this goes on without it"
_TASK_S = 300.0
"""Beyond the limits that each task has of its own. A container's start has no limit as a whole."""
_UMOUNT_SILENT_S = 30.0
"""A kernel that unmounts waits for reads, and lets the process say nothing meanwhile."""
_NUMBER_BYTES = 4
_done_without: set[str] = set()
"""Sockets of agents that did not answer, or were lost: this process asks them for nothing more."""
_END_S = 10.0
_KILL_S = 1.0


def run_command(
    words: Sequence[str],
    before_kill: Callable[[int], None] = lambda _: None,
    *,
    on_begun: Callable[[], None] = lambda: None,
    run_program: RunProgram | None = None,
) -> int | None:
    """As `ask`, for a command line: its --runtime counts, and an interrupt is an exit code too.

    LOST, with a line on standard error, where the agent began it and then was lost.
    """
    silent_s = _UMOUNT_SILENT_S if words[1:2] == ["umount"] else SILENT_S
    try:
        exit_code = ask(
            words,
            runtime=_option(words, "--runtime"),
            silent_s=silent_s,
            before_kill=before_kill,
            on_begun=on_begun,
            run_program=run_program,
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        from bootseer.errors import StoreUnavailableError  # few commands come here

        if not isinstance(error, StoreUnavailableError):
            raise
        sys.stderr.write(f"bootseer: {error}\n")
        return error.exit_code
    if exit_code == LOST:
        sys.stderr.write(f"bootseer: {LOST_TEXT}\n")
    return exit_code


def ask(
    words: Sequence[str],
    output: int = 1,
    *,
    runtime: str = "",
    silent_s: float = SILENT_S,
    before_kill: Callable[[int], None] = lambda _: None,
    on_begun: Callable[[], None] = lambda: None,
    run_program: RunProgram | None = None,
) -> int | None:
    """The exit code of a task that the agent ran; None where none begins it within `BEGIN_S`.

    The task has this process's environment, working directory and standard streams; `output` takes
    the place of standard output. When this process is interrupted, the task is too. `on_begun` is
    called once it has begun. `run_program` runs the programs that the task wants run here, and is
    called with each, and with what is to be called with each signal that is passed on to it. It
    must raise nothing but an interrupt.

    LOST where the task died, or gave no sign of life for `silent_s` and was killed: nothing of it
    goes on, but what it had begun may still be there. `before_kill` is called with the process id
    of one that is to be killed. Raises StoreUnavailableError where it cannot be killed.
    """
    path = socket_path(runtime)
    if not _may_ask(path):
        return None
    from _socket import AF_UNIX, SOCK_STREAM, socket  # `socket` itself costs 5 ms

    import bootseer
    from bootseer.agent.protocol import VERSION, begin, send_request

    environ = {**os.environ, VERSION: bootseer.__version__}
    link = socket(AF_UNIX, SOCK_STREAM)
    try:
        try:
            link.settimeout(BEGIN_S)
            link.connect(path)
            if not _is_served_by_trusted(link):
                return None
            send_request(link, words, environ, (0, output, 2))
            process = begin(link)
        except OSError:  # it was killed, is busy, or was stopped: nothing was begun
            _done_without.add(path)
            return None
        if process is None:
            return None
        try:
            code = _await_end(link, process, silent_s, before_kill, on_begun, run_program)
            if code == LOST:
                _done_without.add(path)
            return code
        finally:
            if process >= 0:
                os.close(process)
    finally:
        link.close()


def _await_end(
    link: socket,
    process: int,
    silent_s: float,
    before_kill: Callable[[int], None],
    on_begun: Callable[[], None],
    run_program: RunProgram | None,
) -> int | None:
    """The task's exit code, None where it did nothing, or LOST.

    Where it is lost after what was asked for has run here, that program's exit code counts: what
    the task has not undone, the next one does. Raises StoreUnavailableError for one that stays.
    """
    from bootseer.agent.protocol import DECLINED, ENDED, SIGNALLED, await_answer, send_note

    lost = LOST
    limit_s = _TASK_S if run_program is None else float("inf")
    try:
        on_begun()
        while True:
            answer = await_answer(link, limit_s=limit_s, silent_s=silent_s)
            if answer is None or isinstance(answer, int) or run_program is None:
                break
            code = INTERRUPTED
            try:
                code = run_program(answer, lambda number: send_note(link, SIGNALLED, number))
            finally:
                send_note(link, ENDED, code)
            # Where something is run before yet another container, the one before never was.
            lost = code if answer.is_last else LOST
            if answer.is_last:
                silent_s = _UMOUNT_SILENT_S
    except TimeoutError:
        _end_silent(process, before_kill, lost)
        return lost
    except OSError:
        return lost
    except BaseException:  # an interrupt: the task takes back what it has begun
        _hang_up(link)
        raise
    if answer == DECLINED:
        return None
    return answer if isinstance(answer, int) else lost


def _end_silent(process: int, before_kill: Callable[[int], None], lost: int) -> None:
    """As `_kill`; nothing is raised where the client's program has ended: its exit code counts."""
    from bootseer.errors import StoreUnavailableError

    try:
        _kill(process, before_kill)
    except StoreUnavailableError as error:
        if lost == LOST:
            raise
        sys.stderr.write(f"bootseer: {error}\n")


def _kill(process: int, before_kill: Callable[[int], None]) -> None:
    """End a task that hangs, so that it does nothing more when it goes on."""
    import signal

    from bootseer.errors import StoreUnavailableError
    from bootseer.system.readiness import readable

    try:
        if process >= 0:
            before_kill(_number_of(process))
            signal.pidfd_send_signal(process, signal.SIGKILL)
            if readable(process, timeout_s=_KILL_S):
                return
    except ProcessLookupError:
        return  # it has ended meanwhile
    except OSError:
        pass  # it is not ours to end, or not of our process namespace
    raise StoreUnavailableError(
        "the node's agent hangs in a task that cannot be ended; start the agent again"
    )


def _number_of(process: int) -> int:
    """The process id behind a descriptor of a process. Raises ProcessLookupError without one."""
    with open(f"/proc/self/fdinfo/{process}", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "Pid" and int(value) > 0:
                return int(value)
            if name == "Pid" and int(value) == 0:
                raise PermissionError("a process of another namespace")
    raise ProcessLookupError


def is_available(runtime: str) -> bool:
    """Whether an agent may be asked. One that was killed still looks available."""
    return _may_ask(socket_path(runtime))


def socket_path(runtime: str) -> str:
    """Where the agent listens; "" is this node's usual runtime directory."""
    if not runtime:
        from bootseer.config.paths import default_runtime

        runtime = default_runtime()
    return os.path.join(runtime, "images/agent.sock")


def _may_ask(path: str) -> bool:
    """Whether the socket is root's or our own: it is sent our environment, secrets included."""
    try:
        return path not in _done_without and os.stat(path).st_uid in (0, os.geteuid())
    except OSError:
        return False


def _is_served_by_trusted(link: socket) -> bool:
    """Whether root or we ourselves listen at the other end: it may have us run programs."""
    from _socket import SO_PEERCRED, SOL_SOCKET

    credentials = link.getsockopt(SOL_SOCKET, SO_PEERCRED, 3 * _NUMBER_BYTES)
    uid = int.from_bytes(credentials[_NUMBER_BYTES : 2 * _NUMBER_BYTES], sys.byteorder)
    return uid in (0, os.geteuid())


def _hang_up(link: socket) -> None:
    """Interrupt the task and wait for its end, for `_END_S` at most.

    What it wants run meanwhile is not run.
    """
    from _socket import SHUT_WR

    from bootseer.agent.protocol import Program, await_answer

    try:
        link.shutdown(SHUT_WR)
        while isinstance(await_answer(link, limit_s=_END_S, silent_s=_END_S), Program):
            pass
    except OSError:
        pass  # it ends without us


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option in a command line that was not parsed yet."""
    for number, word in enumerate(words):
        if word == "--":  # what follows is another program's
            break
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
        if word == name and number + 1 < len(words):
            return words[number + 1]
    return ""
