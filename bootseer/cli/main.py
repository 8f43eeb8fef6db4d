"""The `bootseer` command: choose what handles a command line, by its first words.

Commands with a start-up budget parse their arguments themselves; all others go through click,
which is imported only for them. This file must stay importable on Python 3.9 and import nothing
at module level but `sys`: `bootseer run` stands in front of every process of a job.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command line (without the program name) and return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] == "run":
        from bootseer.entrypoint import run

        code = run.main(args[1:])
        return run.leave_now(code) if argv is None else code
    if args and args[0] == "event":
        from bootseer.cli import event

        return event.main(args[1:])
    if args and args[0] == "start":
        from bootseer.cli import start_guard

        return start_guard.main(args[1:])
    if sys.version_info < (3, 11):
        sys.stderr.write(
            "bootseer: only `run` and `event` work on Python older than 3.11; "
            "use a newer Python for the other commands\n"
        )
        return 7
    if args[:2] in (["image", "mount"], ["image", "umount"]):
        from bootseer.agent import client

        agent_code = client.run_command(args)
        if agent_code is not None:
            return agent_code
    if args[:2] in (["image", "mount"], ["image", "run"]):
        from bootseer.cli.image import direct as image_direct

        image_code = image_direct.run_without_click(args)
        if image_code is not None:
            return _exit_now(image_code) if argv is None else image_code
    if args[:2] == ["deps", "run"]:
        from bootseer.cli.deps import direct as deps_direct

        deps_code = deps_direct.run_without_click(args)
        if deps_code is not None:
            return _exit_now(deps_code) if argv is None else deps_code
    from bootseer.cli import root

    if args[:1] == ["report"] and argv is None:
        import gc

        gc.disable()  # the process ends with the report: there is no garbage worth collecting
        return _exit_now(root.main(args))
    return root.main(args)


def _exit_now(code: int) -> int:
    """End this process without tearing down the interpreter.

    Freeing what a mount imported, or the data of a large report, would delay the caller.
    """
    import os

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the stream is closed, or its reader is
    os._exit(code)
