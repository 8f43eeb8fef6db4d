"""Replace this process by another program.

Importable on Python 3.9, for the guard in front of `start`.
"""

from __future__ import annotations

import os

from bootseer.entrypoint import job_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Mapping, Sequence
else:
    import _signal  # `signal` itself imports enum: 2 ms


def execute(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exec the command with default signal dispositions; returns 126 or 127 if that fails.

    Raises ValueError for a word or a variable that cannot be passed to any program.
    """
    for number in job_process.IGNORED_BY_PYTHON:
        _signal.signal(number, _signal.SIG_DFL)
    try:
        try:
            os.execvpe(command[0], list(command), environ)
        except OSError as error:
            import shutil  # slow to load, and needed by few jobs

            path = shutil.which(command[0])
            if error.errno != job_process.ENOEXEC or path is None:
                raise
            # A script without an interpreter line: a shell runs it, as in execvp(3).
            os.execve("/bin/sh", ["sh", path, *command[1:]], environ)
    except OSError as error:
        return job_process.mirror_result(job_process.make_failure(command, error))
