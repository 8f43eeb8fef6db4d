"""What a command's error becomes: one line on standard error, and an exit code. Knows no click."""

from __future__ import annotations

import os
import sys

from bootseer.errors import BootseerError, from_os_error


def report(error: BootseerError | OSError) -> int:
    """Print one line for an error of ours or of the system; returns the exit code."""
    if isinstance(error, BootseerError):
        return fail(str(error), error.exit_code)
    if isinstance(error, BrokenPipeError):
        forget_output()
        return 141
    named = error.filename is not None
    action = f"use {os.fsdecode(error.filename)}" if named else "write the output"
    mapped = from_os_error(error, action)
    if not named:
        forget_output()
    return fail(str(mapped), mapped.exit_code)


def fail(text: str, exit_code: int) -> int:
    """Print one line; returns the exit code."""
    if sys.stderr is not None:
        # Names come from anywhere; none may begin a second line or drive the terminal.
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        sys.stderr.write(f"bootseer: {shown}\n")
    return exit_code


def forget_output() -> None:
    """Nobody can be told any more; Python would complain again when it flushes at exit."""
    sys.stdout = None
