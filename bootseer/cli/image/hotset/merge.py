"""`bootseer image hotset merge`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from bootseer.cli.image.hotset.group import of, opened, which_option
from bootseer.cli.image.options import place_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, from_os_error


@click.command("merge")
@which_option
@click.option(
    "--output",
    "-o",
    default="",
    metavar="FILE",
    help="Write the merged recording there, and leave this node's as it is.",
)
@place_options
@json_option
@click.argument("ref")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path())
def command(
    ref: str, files: tuple[str, ...], workload: str, output: str, as_json: bool, **where: Any
) -> int:
    """Merge recordings of the image REF: this node's, the published one, and FILES.

    A FILE is a `.trace` of another node (its cache, images/DIGEST/traces). The result takes the
    place of this node's recording; `hotset build` packs it.
    """
    from bootseer.blocks.trace import trace_file as traces

    others = [traces.parse(_read(path), name=path) for path in files]
    with opened(ref, **where) as image:
        own = image.trace(workload)
        found = [one for one in (own, *others) if one is not None]
        if not found:
            raise NotFoundError(
                f"nothing is recorded of {of(workload)} of {ref}; start it once with "
                f"`bootseer image record {ref} -- COMMAND`"
            )
        together = traces.merge([dataclasses.replace(one, workload=workload) for one in found])
        if output:
            _write(output, traces.serialise(together))
        else:
            image.keep_trace(together)
    touched = together.touched_bytes()
    if as_json:
        body = {"workload": workload, "starts": together.starts, "touched_bytes": touched}
        echo_json({**body, "merged": len(found)})
        return 0
    click.echo(f"{len(found)} recordings, {together.starts} full starts, {sizes.shown(touched)}")
    return 0


def _read(path: str) -> bytes:
    from bootseer.blocks.trace.trace_file import LIMITS

    try:
        with open(path, "rb") as file:
            return file.read(LIMITS.packed_bytes + 1)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error
