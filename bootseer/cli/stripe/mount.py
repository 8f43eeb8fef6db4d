"""`bootseer stripe mount`: mount checkpoints of a store as a directory."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import store_options, take_store_options


@click.command(
    "mount",
    help="""Mount what URL names, a folder, a checkpoint or a file of a store, at DIR.

    Returns when the mount answers, and leaves the server in the background; `bootseer stripe
    umount DIR` ends it. Any program reads the files there at the speed of parallel streams, each
    byte verified where the checkpoint is striped; a byte that is wrong on every replica gives an
    input/output error. Where no mount is possible: `bootseer stripe get`, fsspec's
    `striped::URL`, or `bootseer.stripedfs.open`.
    """,
)
@click.option("--foreground", is_flag=True, help="Serve in this process until the mount ends.")
@click.option(
    "--read-only/--rw",
    "read_only",
    default=True,
    help="With --rw, files can be saved: each is striped and appears whole when it is closed.",
)
@click.option("--buffered", is_flag=True, help="Keep what is read in the page cache.")
@click.option(
    "--cache", metavar="PATH", help="Keep what is read in this directory of the node, too."
)
@click.option(
    "--cache-limit",
    callback=sizes.parse_size,
    metavar="SIZE",
    default="64GiB",
    show_default=True,
    help="The cache's largest size.",
)
@click.option(
    "--memory",
    callback=sizes.parse_size,
    metavar="SIZE",
    default="432MiB",
    show_default=True,
    help="Memory for blocks, whatever the files' sizes; the process needs 70 MiB more.",
)
@click.option(
    "--connections",
    type=click.IntRange(0, 1024),
    default=0,
    help="Requests at a time; 0 leaves it to the store.",
)
@click.option(
    "--deadline",
    "deadline_s",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 86_400),
    default=60.0,
    show_default=True,
    help="A read that got no bytes for so long fails with an input/output error.",
)
@click.option(
    "--prefetch",
    metavar="NAME",
    help="Fetch what will be loaded at once, in the background: a name or pattern below URL (of a "
    "pattern the newest whole checkpoint), @FILE for what a pointer file names, . for all of URL.",
)
@click.option("--allow-other", is_flag=True, help="Let other users of this machine in.")
@click.option(
    "--fuse-backend",
    "backend",
    type=click.Choice(["own", "fusepy"]),
    default="own",
    show_default=True,
    help="fusepy (over libfuse 2, read-only) serves where Linux's own interface cannot be used.",
)
@click.option(
    "--for-pid", type=click.IntRange(1), metavar="PID", help="Unmount when that process ends."
)
@click.option(
    "--log-file",
    metavar="FILE",
    help="Append what goes wrong to this file. Default: with --foreground standard error, else "
    "bootseer/checkpoint.log in XDG_STATE_HOME (~/.local/state).",
)
@store_options
@click.argument("url")
@click.argument("directory", metavar="DIR", type=click.Path())
def command(
    url: str,
    directory: str,
    foreground: bool,
    read_only: bool,
    buffered: bool,
    cache: str | None,
    cache_limit: int,
    memory: int,
    connections: int,
    deadline_s: float,
    prefetch: str | None,
    allow_other: bool,
    backend: str,
    for_pid: int | None,
    log_file: str | None,
    **store_parameters: Any,
) -> None:
    from bootseer.stripedfs.mount import background_log, mount
    from bootseer.stripedfs.mount import settings as mountsettings

    settings = mountsettings.MountSettings(
        url=url,
        mountpoint=directory,
        options=take_store_options(store_parameters),
        writable=not read_only,
        direct_bytes=mountsettings.NEVER_DIRECT if buffered else mountsettings.DIRECT_BYTES,
        allow_other=allow_other,
        cache=cache or "",
        cache_limit_bytes=cache_limit,
        memory_bytes=memory,
        connections=connections,
        deadline_s=deadline_s,
        backend="fusepy" if backend == "fusepy" else "own",
        for_pid=for_pid or 0,
        log_file=log_file or ("" if foreground else background_log.own_log()),
        prefetch="" if prefetch == "." else prefetch,
    )
    if foreground:
        mount.serve(settings)
    else:
        mount.mount(settings)
