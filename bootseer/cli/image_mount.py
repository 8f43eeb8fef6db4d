"""`bootseer image mount`: an image's tree at once."""

from __future__ import annotations

import click

from bootseer.cli import sizes


@click.command(
    "mount",
    help="""Mount the image REF at DIR; returns when the tree is there.

    Its bytes arrive as they are read; the hot set of the workload, what its starts read, comes
    first and ahead of need. `podman run --rootfs DIR:O CMD` runs a container in it. Needs root
    and the image's block image (`bootseer image build REF`); without one, pull the image the
    plain way. What programs read until the first step is recorded for the next hot set.
    """,
)
@click.option(
    "--workload",
    envvar="BOOTSEER_IMAGE_WORKLOAD",
    default="",
    metavar="NAME",
    help="Whose hot set is replayed, and whose starts are recorded.",
)
@click.option(
    "--cache",
    envvar="BOOTSEER_CACHE",
    default="",
    metavar="PATH",
    help="This node's directory for what is kept of images.",
)
@click.option(
    "--cache-limit",
    envvar="BOOTSEER_IMAGE_CACHE_LIMIT",
    callback=sizes.parsed,
    metavar="SIZE",
    default="64GiB",
    show_default=True,
    help="The largest size of the blocks kept there.",
)
@click.option(
    "--fill/--no-fill",
    envvar="BOOTSEER_IMAGE_FILL",
    default=True,
    show_default=True,
    help="Fetch the rest of the image too, when nothing else wants the link.",
)
@click.option(
    "--fill-rate",
    envvar="BOOTSEER_IMAGE_FILL_RATE",
    callback=sizes.parsed,
    metavar="SIZE",
    default="0",
    help="Bytes a second that filling may take; 0 = any.",
)
@click.option(
    "--hot/--no-hot",
    envvar="BOOTSEER_IMAGE_HOT",
    default=True,
    show_default=True,
    help="Replay the hot set.",
)
@click.option(
    "--record/--no-record",
    envvar="BOOTSEER_IMAGE_MOUNT_RECORD",
    default=True,
    show_default=True,
    help="Record what programs read.",
)
@click.option(
    "--record-window",
    "record_window_s",
    envvar="BOOTSEER_IMAGE_RECORD_WINDOW",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 86_400),
    default=120.0,
    show_default=True,
    help="Recording ends so long after the mount at the latest.",
)
@click.option(
    "--events",
    "events_dir",
    envvar="BOOTSEER_IMAGE_EVENTS",
    default="",
    metavar="DIR",
    help="Recording ends when `first_step` is told in this directory of event files.",
)
@click.option(
    "--deadline",
    "deadline_s",
    envvar="BOOTSEER_IMAGE_DEADLINE",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 86_400),
    default=60.0,
    show_default=True,
    help="A read that got no bytes for so long fails with an input/output error.",
)
@click.option(
    "--loop/--no-loop",
    envvar="BOOTSEER_IMAGE_LOOP",
    default=None,
    help="Over loop devices or not; by default where the kernel (before 6.12) needs them.",
)
@click.option(
    "--plain-http",
    envvar="BOOTSEER_IMAGE_PLAIN_HTTP",
    is_flag=True,
    help="The registry speaks http (on loopback it always may).",
)
@click.option(
    "--runtime",
    envvar="BOOTSEER_RUNTIME",
    default="",
    metavar="PATH",
    help="Where this node's servers keep their state.",
)
@click.option(
    "--log-file",
    envvar="BOOTSEER_IMAGE_LOG_FILE",
    default="",
    metavar="FILE",
    help="Append what goes wrong to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("ref")
@click.argument("directory", metavar="DIR", type=click.Path())
def command(
    ref: str,
    directory: str,
    workload: str,
    cache: str,
    cache_limit: int,
    fill: bool,
    fill_rate: int,
    hot: bool,
    record: bool,
    record_window_s: float,
    events_dir: str,
    deadline_s: float,
    loop: bool | None,
    plain_http: bool,
    runtime: str,
    log_file: str,
    as_json: bool,
) -> None:
    from bootseer.imageprefetch import mounting

    made = mounting.mount(
        mounting.MountSettings(
            ref=ref,
            directory=directory,
            workload=workload,
            cache=cache,
            cache_limit_bytes=cache_limit,
            runtime=runtime,
            fill=fill,
            fill_rate_bytes_s=fill_rate,
            record=record,
            record_window_s=record_window_s,
            events_dir=events_dir,
            plain_http=plain_http or None,
            deadline_s=deadline_s,
            loop=loop,
            hot=hot,
            log_file=log_file,
        )
    )
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps(dataclasses.asdict(made), indent=1))
        return
    for note in made.notes:
        click.echo(f"bootseer: {note}", err=True)
    click.echo(_said(made.digest, made.hot_set, made.hot_bytes, made.shared), err=True)


def _said(digest: str, hot_set: str, hot_bytes: int, shared: bool) -> str:
    """Which way it went, in one line."""
    if shared:
        way = "another mount of this node serves it"
    elif hot_set:
        way = f"a hot set of {sizes.shown(hot_bytes)} follows"
    else:
        way = "no hot set: bytes arrive as they are read"
    return f"bootseer: mounted {digest[:19]}; {way}"
