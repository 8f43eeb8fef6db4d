"""Reporting a command's error: one line on standard error, and an exit code.

Does not import click.
"""

from __future__ import annotations

import os
import sys

from bootseer.errors import BootseerError, from_os_error


def report_error(error: BootseerError | OSError) -> int:
    """Print one line for an error of bootseer or of the operating system; return the exit code.

    A broken pipe prints nothing and returns 141, the exit status that shells give for SIGPIPE.
    """
    if isinstance(error, BootseerError):
        return print_failure(str(error), error.exit_code)
    if isinstance(error, BrokenPipeError):
        discard_output()
        return 141
    has_name = error.filename is not None
    action = f"use {os.fsdecode(error.filename)}" if has_name else "write the output"
    mapped = from_os_error(error, action)
    if not has_name:
        discard_output()
    return print_failure(str(mapped), mapped.exit_code)


def print_failure(text: str, exit_code: int) -> int:
    """Print `text` as one line on standard error; return `exit_code`."""
    if sys.stderr is not None:
        # A file name in the text may contain line breaks or terminal control sequences.
        printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        sys.stderr.write(f"bootseer: {printable}\n")
    return exit_code


def discard_output() -> None:
    """Detach standard output, which cannot be written.

    Otherwise Python flushes it at exit and reports the failure a second time.
    """
    sys.stdout = None
