"""Run a part alongside the job, in a process that nothing waits for or depends on.

A fork of `start`, because starting another interpreter would take as long as a quick job needs to
read its first files. It is not a child of `start`, because the job, which replaces `start`, must
not have a child that it did not make. It has none of the job's streams and descriptors: it reports
by events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bootseer import events
from bootseer.system.child_processes import close_descriptors, fork, name_thread, silence_streams

NAME = b"bootseer-beside"
"""Its name in `ps`; the kernel keeps 15 characters."""


def start_detached(
    part: str,
    module: str,
    request: Mapping[str, object],
    environ: Mapping[str, str],
    keep: Sequence[int] = (),
) -> None:
    """Call `module.run(request, event writer, our process id)` in a new process; returns at once.

    The process has the descriptors `keep`, with the locks on them, until it closes them. Raises
    OSError if no process can be made. Must be called in a process that has one thread.
    """
    job = os.getpid()  # kept by `start` when it becomes the job
    intermediate = fork()
    if intermediate == 0:
        _run_intermediate(part, module, request, environ, job, keep)
    status = os.waitpid(intermediate, 0)[1]
    if status:
        raise OSError(status, "no process could be made for it")


def _run_intermediate(
    part: str,
    module: str,
    request: Mapping[str, object],
    environ: Mapping[str, str],
    job: int,
    keep: Sequence[int],
) -> NoReturn:
    """Fork the part's process and end, so that it has no parent of ours.

    Both processes end by os._exit alone: nothing of `start` may run twice.
    """
    code = 1
    try:
        os.setsid()
        if fork() == 0:
            _detach(keep)
            _run_module(part, module, request, environ, job)
        code = 0
    finally:
        os._exit(code)


def _detach(keep: Sequence[int]) -> None:
    import signal  # here and below: only after the fork, as `start` would wait for it

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    silence_streams()
    close_descriptors(0, 1, 2, *keep)
    name_thread(NAME)


def _run_module(
    part: str, module: str, request: Mapping[str, object], environ: Mapping[str, str], job: int
) -> None:
    import importlib

    with events.open_writer(None, environ) as writer:
        try:
            importlib.import_module(module).run(request, writer, job)
        except Exception as error:  # the border: the job runs already, so only the report has it
            from bootseer.errors import describe

            writer.point(part, "fallback", {"bootseer.reason": describe(error)})
