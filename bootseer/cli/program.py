"""The `bootseer` program as it is installed: the command, in the environment that was given.

A shell stands before us, for it alone can start Python deaf to the job's PYTHONHOME. On its way it
drops variables whose names it has no use for (`my.key`, as Kubernetes allows) and adds some of
its own, none of which the job may see; so it hands over what it was given. Importable on Python
3.9, and in front of every process of a job.
"""

from __future__ import annotations

import os

from bootseer.cli import main as command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

GIVEN = b"_BOOTSEER_ENVIRON"
"""The environment that the shell was given: a line a variable, line breaks in it as 0x01."""


def main() -> int:
    """Run the command line of this process and return its exit code."""
    restore_environment(os.environb)
    return command.main()


def restore_environment(environ: MutableMapping[bytes, bytes]) -> None:
    """Make `environ` what the shell before us was given, where it told us."""
    told = environ.pop(GIVEN, b"")
    if not told:
        return
    given: dict[bytes, bytes] = {}
    for line in told.split(b"\n"):
        name, equals, value = line.partition(b"=")
        if name and equals:
            given.setdefault(name.replace(b"\1", b"\n"), value.replace(b"\1", b"\n"))
    for name in environ.keys() - given.keys():
        del environ[name]
    for name, value in given.items():
        # Of a value with 0x01 or a line break in it, the shell's copy is the exact one.
        if environ.get(name) != value and not (b"\n" in value and name in environ):
            environ[name] = value
