"""`bootseer snapshotter` and `bootseer-snapshotter`: serve containerd lazily mounted images."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from bootseer.cli.image.options import serving_options


@click.command(
    "snapshotter",
    help="""Serve containerd as its proxy snapshotter, until SIGTERM.

    Images are pulled, run and named as ever; those that have a block image (`bootseer image build
    REF`) are mounted at once instead of being fetched, all others are unpacked as containerd
    does. Needs root. docs/snapshotter.md has containerd's side of the configuration.
    """,
)
@click.option(
    "--address",
    metavar="SOCKET",
    default="/run/bootseer/snapshotter.sock",
    show_default=True,
    help="The Unix socket that containerd's proxy_plugins section names.",
)
@click.option(
    "--root",
    metavar="DIR",
    default="/var/lib/containerd/io.containerd.snapshotter.v1.bootseer",
    show_default=True,
    help="Snapshots and their state, on a file system that overlays can lie on. The default is "
    "where kubelet looks for the disk that images fill.",
)
@click.option("--plain", is_flag=True, help="Mount nothing lazily, hand all to the plain way.")
@click.option(
    "--only",
    multiple=True,
    metavar="HOST[/PATH]",
    help="Mount lazily what lies there and nothing else; repeatable. See docs/snapshotter.md, "
    "Safety.",
)
@serving_options
@click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    help="A registry that speaks http (on loopback they may); repeatable.",
)
@click.option(
    "--events",
    "events_dir",
    envvar="BOOTSEER_EVENTS",
    default="",
    metavar="DIR",
    help="Write events there: what became of each image, and why.",
)
@click.option(
    "--events-days",
    metavar="DAYS",
    type=click.FloatRange(0),
    default=0.0,
    help="Remove this node's event files there that are older, at the start and once a day; "
    "0 = never.",
)
@click.option(
    "--log-file", default="", metavar="FILE", help="Where images' servers say what goes wrong."
)
def command(
    address: str,
    root: str,
    plain: bool,
    plain_http: tuple[str, ...],
    events_dir: str,
    events_days: float,
    **lazy: Any,
) -> None:
    from bootseer.events.writer import open_writer
    from bootseer.imageprefetch.snapshotter import event_cleanup, grpc_server, lazy_mounter, process
    from bootseer.imageprefetch.snapshotter.plain_mounter import PlainMounter
    from bootseer.storage.options import StoreOptions

    # containerd has just reached the registry; an image that fails for longer is pulled plainly.
    options = StoreOptions(plain_http=plain_http, retry_s=5.0)
    how = lazy_mounter.LazySettings(**lazy, events_dir=events_dir, options=options)
    settings = process.SnapshotterSettings(root=root, address=address)
    with (
        open_writer(events_dir or None) as writer,
        PlainMounter(lazy["runtime"]) if plain else lazy_mounter.BlockImageMounter(how) as mounter,
        process.running_snapshotter(settings, mounter, _log_line, writer),
        event_cleanup.daily_cleanup(events_dir, events_days * event_cleanup.DAY_S),
    ):
        grpc_server.wait_for_signal()


def _log_line(text: str) -> None:
    """Write one line of the log to standard error."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed: the pulls go on
        sys.stderr.write(f"bootseer-snapshotter: {' '.join(text.split())}\n")
        sys.stderr.flush()


def main() -> int:
    """Run the program `bootseer-snapshotter`; return its exit code."""
    from bootseer.cli import root
    from bootseer.system.processes import fill_streams

    fill_streams()
    return root.main(["snapshotter", *sys.argv[1:]])
