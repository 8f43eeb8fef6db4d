"""`bootseer image hotset merge`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from bootseer.cli.image.hotset.group import (
    describe_workload,
    open_image,
    which_workload_option,
)
from bootseer.cli.image.options import image_access_options
from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, from_os_error


@click.command("merge")
@which_workload_option
@click.option(
    "--output",
    "-o",
    default="",
    metavar="FILE",
    help="Write the merged recording there, and leave this node's as it is.",
)
@image_access_options
@json_option
@click.argument("ref")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path())
def command(
    ref: str, files: tuple[str, ...], workload: str, output: str, as_json: bool, **access: Any
) -> int:
    """Merge recordings of the image REF: this node's, the published one, and FILES.

    A FILE is a `.trace` of another node (its cache, images/DIGEST/traces). The result takes the
    place of this node's recording; `hotset build` packs it.
    """
    from bootseer.blocks.trace import trace_file

    others = [trace_file.parse(_read_file(path), name=path) for path in files]
    with open_image(ref, **access) as image:
        own = image.trace(workload)
        recordings = [trace for trace in (own, *others) if trace is not None]
        if not recordings:
            raise NotFoundError(
                f"nothing is recorded of {describe_workload(workload)} of {ref}; start it once "
                f"with `bootseer image record {ref} -- COMMAND`"
            )
        result = trace_file.merge(
            [dataclasses.replace(trace, workload=workload) for trace in recordings]
        )
        if output:
            _write_file(output, trace_file.serialise(result))
        else:
            image.keep_trace(result)
    touched = result.touched_bytes()
    if as_json:
        body = {"workload": workload, "starts": result.starts, "touched_bytes": touched}
        echo_json({**body, "merged": len(recordings)})
        return 0
    click.echo(
        f"{len(recordings)} recordings, {result.starts} full starts, {sizes.format_size(touched)}"
    )
    return 0


def _read_file(path: str) -> bytes:
    from bootseer.blocks.trace.trace_file import LIMITS

    try:
        with open(path, "rb") as file:
            return file.read(LIMITS.packed_bytes + 1)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error


def _write_file(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error
