"""Become another program. Importable on Python 3.9, for the border in front of `start`."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence

from bootseer.entrypoint import process

# Python itself ignores these two; a command started by us must not inherit that.
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


def execute(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exec the command with the signal dispositions a fresh process has; returns 126 or 127.

    Raises ValueError when a word or a variable cannot be handed to any program.
    """
    for number in RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execvpe(command[0], list(command), environ)
        except OSError as error:
            import shutil  # heavy, and needed by few jobs

            path = shutil.which(command[0])
            if error.errno != errno.ENOEXEC or path is None:
                raise
            # A script without a first line: a shell runs it, as execvp(3) does.
            os.execve("/bin/sh", ["sh", path, *command[1:]], environ)
    except OSError as error:
        return process.leave(process.failure(command, error))
