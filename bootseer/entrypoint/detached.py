"""A part that runs beside the job: nobody waits for it, and nothing hangs on it.

A fork of `start`, because loading an interpreter anew would take as long as a quick job needs to
read its first files. It is nobody's child, for the job, which takes the place of `start`, must
not find one that it did not make. It has none of the job's streams and descriptors: what it has
to say goes into events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from bootseer import events
from bootseer.system.fork import fork, name_thread

NAME = b"bootseer-beside"
"""What `ps` shows of it; the kernel keeps 15 characters."""
_MAX_FD = 4096


def begin(
    part: str, module: str, request: Mapping[str, object], environ: Mapping[str, str]
) -> None:
    """Have `module.run(request, event writer, our process id)` run beside; returns at once.

    Raises OSError where no process can be made. Call it in a process that has one thread.
    """
    job = os.getpid()  # which `start` keeps when it becomes the job
    between = fork()
    if between == 0:
        _orphan(part, module, request, environ, job)
    status = os.waitpid(between, 0)[1]
    if status:
        raise OSError(status, "no process could be made for it")


def _orphan(
    part: str, module: str, request: Mapping[str, object], environ: Mapping[str, str], job: int
) -> NoReturn:
    """Ends by os._exit alone: nothing of `start` may run twice."""
    code = 1
    try:
        os.setsid()
        if fork() == 0:
            _detach()
            _run(part, module, request, environ, job)
        code = 0
    finally:
        os._exit(code)


def _detach() -> None:
    import signal  # here and below: what a start itself can do without, it does not wait for

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.closerange(3, _MAX_FD)  # whoever waits for the end of a pipe must not wait for us
    name_thread(NAME)


def _run(
    part: str, module: str, request: Mapping[str, object], environ: Mapping[str, str], job: int
) -> None:
    import importlib

    with events.open_writer(None, environ) as writer:
        try:
            importlib.import_module(module).run(request, writer, job)
        except Exception as error:  # the border: the job runs already, only the report may hear
            from bootseer.errors import describe

            writer.point(part, "fallback", {"bootseer.reason": describe(error)})
