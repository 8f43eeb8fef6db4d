"""`bootseer image agent`: a process that stands ready to mount images at once."""

from __future__ import annotations

import click

from bootseer.cli.image.options import runtime_option


@click.command(
    "agent",
    help="""Stand ready on this node, so that `bootseer image mount` takes no time to begin.

    Importing what a mount needs takes longer than mounting. The agent has it imported, and runs
    each mount that is asked for in a fork of itself, with the caller's environment, streams and
    working directory. Mounts outlive it; without it they begin by themselves. Only root may ask,
    and only from the agent's own mount namespace.
    """,
)
@runtime_option
def command(runtime: str) -> None:
    from bootseer.agent import server

    server.serve(runtime)
