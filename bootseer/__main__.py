"""The program `bootseer`, and `python -m bootseer`: restore the caller's environment, then choose
what handles the command line, by its first words.

Commands with a start-up budget parse their arguments themselves; all others go through click,
which is imported only for them. This file must stay importable on Python 3.9 and import nothing
at module level that the interpreter has not: `bootseer run` stands in front of every process of a
job.

The installed program is started by a shell script, which alone can keep Python from reading the
job's PYTHONHOME. A shell drops variables whose names it cannot use (`my.key`, which Kubernetes
allows) and adds some of its own; so the script passes on the environment that it was given, and
the job gets that one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

ORIGINAL_ENVIRONMENT = b"_BOOTSEER_ENVIRON"
"""Variable with the environment that the shell script was given.

One `NAME=VALUE` a line; a line break inside a value is 0x01.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command line (without the program name) and return its exit code."""
    if argv is not None:
        return _dispatch(argv, at_exit=False)
    restore_environment(os.environb)
    return _dispatch(sys.argv[1:], at_exit=True)


def _dispatch(args: list[str], *, at_exit: bool) -> int:
    """Run a command line; with `at_exit` the process ends with it."""
    if args and args[0] == "run":
        from bootseer.entrypoint import run

        return _leave(run.main(args[1:]), at_exit)
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
    from bootseer.system.processes import fill_streams

    fill_streams()
    if args[:2] in (["image", "mount"], ["image", "umount"], ["image", "run"]):
        from bootseer.cli.image import by_agent

        agent_code = by_agent.run_command(args)
        if agent_code is not None:
            return agent_code
    if args[:2] in (["image", "mount"], ["image", "run"]):
        from bootseer.cli.image import direct as image_direct

        image_code = image_direct.run_without_click(args)
        if image_code is not None:
            return _leave(image_code, at_exit)
    if args[:2] == ["deps", "run"]:
        from bootseer.cli.deps import direct as deps_direct

        deps_code = deps_direct.run_without_click(args)
        if deps_code is not None:
            return _leave(deps_code, at_exit)
    if args[:1] == ["report"] and at_exit:
        import gc

        gc.disable()  # the process ends with the report: there is no garbage worth collecting
        return _leave(_by_click(args), at_exit)
    return _by_click(args)


def _leave(code: int, at_exit: bool) -> int:
    if not at_exit:
        return code
    from bootseer.entrypoint import job_process

    return job_process.leave_now(code)


def restore_environment(environ: MutableMapping[bytes, bytes]) -> None:
    """Make `environ` equal to what the shell script was given, if there was one."""
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


def _by_click(args: list[str]) -> int:
    from bootseer.cli import root

    return root.main(args)


if __name__ == "__main__":
    raise SystemExit(main())
