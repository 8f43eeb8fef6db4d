"""Commands of `image` that the node's agent carries out, which has imported what they need.

The container of `image run` is run here: its podman is a child of the command that was given, in
its process group, with its terminal. All that comes before and after it is the agent's.
"""

from __future__ import annotations

import os
import sys

from bootseer.agent import client
from bootseer.cli.image import words as image_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from bootseer.agent.protocol import Program

_KEEP = "BOOTSEER_AGENT_KEEP"
"""For how many seconds without a start an agent that a command leaves behind stays."""


def run_command(args: list[str]) -> int | None:
    """The exit code of a command that the agent ran; None where it is to be run here."""
    is_run = args[1] == "run"
    code = client.run_command(
        args,
        lambda task: _end_servers(task, args),
        on_begun=_get_ready if is_run else lambda: None,
        run_program=_run_program if is_run else None,
    )
    if code != client.LOST:
        return code
    if args[1] == "mount":
        _take_back(args)
    return None


def leave_agent(runtime: str) -> None:
    """Leave an agent behind for the next start, where that is asked for; nothing raises."""
    keep_s = os.environ.get(_KEEP, "")
    if not keep_s or client.is_available(runtime):
        return
    import subprocess

    words = ["agent", "--idle-exit", keep_s, *(["--runtime", runtime] if runtime else [])]
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "bootseer", *words]
    try:
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    except OSError:
        pass  # the next start does without


def _get_ready() -> None:
    """Import what runs a program, while the agent works; take back what it does on a signal."""
    import gc

    gc.disable()  # until the program runs: importing makes no garbage
    import signal
    import subprocess
    from typing import NoReturn

    from bootseer.imageprefetch.run import command

    del command, subprocess

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
            signal.signal(number, end)


def _run_program(program: Program, on_signal: Callable[[int], None]) -> int:
    import gc

    from bootseer.errors import BootseerError
    from bootseer.imageprefetch.run.command import run_foreground

    gc.freeze()
    gc.enable()
    try:
        return run_foreground(program.words, on_signal, program.environ)
    except (BootseerError, OSError) as error:  # it has begun, or never will: not again
        from bootseer.cli.shared import failures

        return failures.report_error(error)


def _end_servers(task: int, args: list[str]) -> None:
    """End the servers that a task of the agent was starting, as it is ended."""
    fields = None
    if args[1] == "mount":
        fields = image_words.parse_mount(args[2:], os.environ)
    elif args[1] == "run":
        parsed = image_words.parse_run(args[2:], os.environ)
        fields = parsed[0] if parsed is not None else None
    if fields is not None:
        from bootseer.config.paths import default_runtime
        from bootseer.imageprefetch.mount import mount_task

        mount_task.end_unregistered(task, fields.get("runtime") or default_runtime())


def _take_back(args: list[str]) -> None:
    """Unmount what an `image mount ...` may have left whose process was killed; nothing raises."""
    fields = image_words.parse_mount(args[2:], os.environ)
    if fields is None:  # it is mounted over then
        return
    from bootseer.imageprefetch.mount import mount_task
    from bootseer.imageprefetch.mount.settings import MountSettings

    fields.pop("as_json")
    mount_task.take_back(MountSettings(**fields))
