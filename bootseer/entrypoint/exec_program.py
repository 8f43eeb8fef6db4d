"""Become another program. Importable on Python 3.9, for the border in front of `start`."""

from __future__ import annotations

import os

from bootseer.entrypoint import transparent_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Mapping, Sequence
else:
    import _signal  # `signal` itself imports enum: 2 ms

# Python itself ignores these two; a command started by us must not inherit that.
RESET_SIGNALS = (_signal.SIGPIPE, _signal.SIGXFSZ)


def execute(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exec the command with the signal dispositions a fresh process has; returns 126 or 127.

    Raises ValueError when a word or a variable cannot be handed to any program.
    """
    for number in RESET_SIGNALS:
        _signal.signal(number, _signal.SIG_DFL)
    try:
        try:
            os.execvpe(command[0], list(command), environ)
        except OSError as error:
            import shutil  # heavy, and needed by few jobs

            path = shutil.which(command[0])
            if error.errno != transparent_child.ENOEXEC or path is None:
                raise
            # A script without a first line: a shell runs it, as execvp(3) does.
            os.execve("/bin/sh", ["sh", path, *command[1:]], environ)
    except OSError as error:
        return transparent_child.leave(transparent_child.failure(command, error))
