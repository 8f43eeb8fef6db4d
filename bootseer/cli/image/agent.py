"""`bootseer image agent`: a process that has imported what mounting an image needs."""

from __future__ import annotations

import click

from bootseer.agent import server
from bootseer.agent.fork_server import TaskTable
from bootseer.cli import root
from bootseer.cli.image import direct
from bootseer.cli.image.options import runtime_option
from bootseer.imageprefetch.mount import mount_task

MODULES = (
    # With what they import, all that a mount needs; a test compares the list with a mount.
    "bootseer.cli.image.group",
    "bootseer.cli.image.mount",
    "bootseer.cli.image.outcome",
    "bootseer.cli.image.umount",
    "bootseer.imageprefetch.mount.interrupts",
    "bootseer.imageprefetch.mount.serverless_choice",
    "bootseer.storage.oci.config",
    "bootseer.imageprefetch.hotset.local_packer",
    "bootseer.imageprefetch.run.temporary_mounts",
    "bootseer.imageprefetch.mount.mount_worker",
    "bootseer.imageprefetch.record.first_step",
    "bootseer.imageprefetch.record.start_recording",
    "bootseer.imageprefetch.record.trace_store",
    "bootseer.fuse.serve.handover",
    "bootseer.blockimage.serve.background_fill",
    "bootseer.blockimage.serve.image_server",
    "bootseer.blockimage.serve.page_cache_warmer",
    "bootseer.blocks.cache.sealed_objects",
    "bootseer.blocks.trace.recorder",
    "bootseer.storage.oci.open",
    "bootseer.storage.oci.registry_repository",
    "bootseer.storage.oci.layout_repository",
    # What these import on first use, which would take a tenth of a mount's time.
    "bootseer.config.loading",
    "bootseer.events.resource",
    "bootseer.storage.token_files",
    "encodings.ascii",
    "encodings.idna",
    "tomllib",
)

TASKS = TaskTable(
    {
        "image mount": f"{__name__}:mount",
        "image umount": "bootseer.cli.root:main",
        mount_task.NAME: f"{mount_task.__name__}:main",
    },
    MODULES,
)


def mount(words: list[str]) -> int:
    """Run `image mount` as a task of the agent; return its exit code."""
    exit_code = direct.run_without_click(words, with_helper=False)
    return root.main(words) if exit_code is None else exit_code


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
    server.serve(runtime, TASKS)
