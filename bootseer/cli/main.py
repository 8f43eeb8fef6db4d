"""The `bootseer` command: `run` and `event` by hand, everything else through click, loaded late.

This file must stay importable on Python 3.9 and import nothing at module level but `sys`:
`bootseer run` stands in front of every process of a job.
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

        answered = client.run_command(args)
        if answered is not None:
            return answered
    if args[:2] in (["image", "mount"], ["image", "run"]):
        from bootseer.cli.image import direct as image_direct

        ended = image_direct.command(args)
        if ended is not None:
            return _leave_now(ended) if argv is None else ended
    if args[:2] == ["deps", "run"]:
        from bootseer.cli.deps import direct as deps_direct

        ended = deps_direct.command(args)
        if ended is not None:
            return _leave_now(ended) if argv is None else ended
    from bootseer.cli import root

    if args[:1] == ["report"] and argv is None:
        import gc

        gc.disable()  # nothing is left to collect when this process has ended
        return _leave_now(root.main(args))
    return root.main(args)


def _leave_now(code: int) -> int:
    """End this process at once: tearing down what a mount imported, or a report of many processes
    holds, takes longer than telling."""
    import os

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or its reader left
    os._exit(code)
