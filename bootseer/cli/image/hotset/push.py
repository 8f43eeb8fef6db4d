"""`bootseer image hotset push`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.hotset.build import publish
from bootseer.cli.image.hotset.group import of, opened, which_option
from bootseer.cli.image.options import place_options
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, UsageError


@click.command("push")
@which_option
@place_options
@json_option
@click.argument("ref")
def command(ref: str, workload: str, as_json: bool, **where: Any) -> int:
    """Publish the hot set that `build` made last for a workload of the image REF."""

    with opened(ref, push=True, **where) as image:
        made = image.hot_sets.load(workload)
        if made is None:
            raise NotFoundError(
                f"no hot set of {of(workload)} of {ref} was made on this node; "
                f"run `bootseer image hotset build {ref}` first"
            )
        if made.hot.block_image != image.parts.block_image:
            raise UsageError(
                f"{ref} has another block image since the hot set was made; build it again"
            )
        made = publish(image, made)
    if as_json:
        echo_json(made.as_dict())
        return 0
    click.echo(made.digest)
    return 0
