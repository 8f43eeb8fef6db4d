"""`bootseer snapshotter`, and `bootseer-snapshotter`: containerd's lazily mounted images."""

from __future__ import annotations

import sys

import click


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
    default="/var/lib/bootseer/snapshotter",
    show_default=True,
    help="Snapshots and their state; must not lie on an overlay file system.",
)
@click.option("--plain", is_flag=True, help="Mount nothing lazily, hand all to the plain way.")
@click.option(
    "--events", metavar="DIR", help="Write events there: what became of each image, and why."
)
def command(address: str, root: str, plain: bool, events: str | None) -> None:
    from bootseer.imageprefetch.snapshotter import plain as plain_mounter
    from bootseer.imageprefetch.snapshotter import running, server
    from bootseer.profiler.events import open_writer

    writer = open_writer(events)
    settings = running.Settings(root=root, address=address)
    with writer, running.serving(settings, plain_mounter.PlainMounter(), _say, writer):
        server.wait_for_signal()


def _say(text: str) -> None:
    """One line of the log; whoever started us keeps standard error."""
    sys.stderr.write(f"bootseer-snapshotter: {' '.join(text.split())}\n")
    sys.stderr.flush()


def main() -> int:
    """The program `bootseer-snapshotter`."""
    from bootseer.cli import root

    return root.main(["snapshotter", *sys.argv[1:]])
