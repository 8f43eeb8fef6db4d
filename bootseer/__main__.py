"""The program `bootseer`, and `python -m bootseer`: one command line, in the environment given.

What stands in front of a job is found by hand, everything else through click, loaded late. This
file must stay importable on Python 3.9 and import nothing at module level that the interpreter
has not: `bootseer run` stands in front of every process of a job.

The installed program starts in a shell, for it alone can start Python deaf to the job's
PYTHONHOME. On its way a shell drops variables whose names it has no use for (`my.key`, as
Kubernetes allows) and adds some of its own, none of which the job may see; so it hands over what
it was given.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

GIVEN = b"_BOOTSEER_ENVIRON"
"""The environment that the shell was given: a line a variable, line breaks in it as 0x01."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line (without the program name) and return its exit code."""
    if argv is not None:
        return _dispatch(argv, at_exit=False)
    restore_environment(os.environb)
    return _dispatch(sys.argv[1:], at_exit=True)


def _dispatch(args: list[str], *, at_exit: bool) -> int:
    """`at_exit`: this process has nothing else to do."""
    if args and args[0] == "run":
        from bootseer.entrypoint import run

        code = run.main(args[1:])
        return run.leave_now(code) if at_exit else code
    if args and args[0] == "event":
        from bootseer.cli import event

        return event.main(args[1:])
    if args and args[0] == "start":
        from bootseer.entrypoint import start_guard

        return start_guard.main(args[1:], _by_click)
    if sys.version_info < (3, 11):
        sys.stderr.write(
            "bootseer: only `run` and `event` work on Python older than 3.11; "
            "use a newer Python for the other commands\n"
        )
        return 7
    if args[:2] in (["image", "mount"], ["image", "umount"]):
        from bootseer.agent import client

        answered = client.run_command(args)
        if answered is not None:
            return answered
    if args[:2] in (["image", "mount"], ["image", "run"]):
        from bootseer.cli.image import direct as image_direct

        ended = image_direct.command(args)
        if ended is not None:
            return _leave_now(ended) if at_exit else ended
    if args[:2] == ["deps", "run"]:
        from bootseer.cli.deps import direct as deps_direct

        ended = deps_direct.command(args)
        if ended is not None:
            return _leave_now(ended) if at_exit else ended
    if args[:1] == ["report"] and at_exit:
        import gc

        gc.disable()  # nothing is left to collect when this process has ended
        return _leave_now(_by_click(args))
    return _by_click(args)


def restore_environment(environ: MutableMapping[bytes, bytes]) -> None:
    """Make `environ` what the shell before us was given, where there was one."""
    encoded = environ.pop(GIVEN, b"")
    if not encoded:
        return
    given: dict[bytes, bytes] = {}
    for line in encoded.split(b"\n"):
        name, equals, value = line.partition(b"=")
        if name and equals:
            given.setdefault(name.replace(b"\1", b"\n"), value.replace(b"\1", b"\n"))
    for name in environ.keys() - given.keys():
        del environ[name]
    for name, value in given.items():
        # Of a value with 0x01 or a line break in it, the shell's copy is the exact one.
        if environ.get(name) != value and not (b"\n" in value and name in environ):
            environ[name] = value


def _by_click(args: list[str]) -> int:
    from bootseer.cli import root

    return root.main(args)


def _leave_now(code: int) -> int:
    """End this process at once: tearing down what a mount imported, or a report of many processes
    holds, takes longer than telling."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or its reader left
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
