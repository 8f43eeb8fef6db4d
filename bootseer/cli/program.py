"""The installed `bootseer` program: restore the caller's environment, then run the command.

The program is started by a shell script, which alone can keep Python from reading the job's
PYTHONHOME. A shell drops variables whose names it cannot use (`my.key`, which Kubernetes allows)
and adds some of its own; so the script passes on the environment that it was given, and the job
gets that one. Runs in front of every process of a job. Must stay importable on Python 3.9.
"""

from __future__ import annotations

import os

from bootseer.cli import main as command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

ORIGINAL_ENVIRONMENT = b"_BOOTSEER_ENVIRON"
"""Variable with the environment that the shell script was given.

One `NAME=VALUE` a line; a line break inside a value is 0x01.
"""


def main() -> int:
    """Run the command line of this process and return its exit code."""
    restore_environment(os.environb)
    return command.main()


def restore_environment(environ: MutableMapping[bytes, bytes]) -> None:
    """Make `environ` equal to what the shell script was given, if the script passed it on."""
    encoded = environ.pop(ORIGINAL_ENVIRONMENT, b"")
    if not encoded:
        return
    original: dict[bytes, bytes] = {}
    for line in encoded.split(b"\n"):
        name, equals, value = line.partition(b"=")
        if name and equals:
            original.setdefault(name.replace(b"\1", b"\n"), value.replace(b"\1", b"\n"))
    for name in environ.keys() - original.keys():
        del environ[name]
    for name, value in original.items():
        # Of a value with 0x01 or a line break in it, the shell's copy is the exact one.
        if environ.get(name) != value and not (b"\n" in value and name in environ):
            environ[name] = value
