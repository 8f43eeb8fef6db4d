"""`bootseer image hotset push`."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.image.hotset.build import publish
from bootseer.cli.image.hotset.group import (
    describe_workload,
    open_image,
    which_workload_option,
)
from bootseer.cli.image.options import image_access_options
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, UsageError


@click.command("push")
@which_workload_option
@image_access_options
@json_option
@click.argument("ref")
def command(ref: str, workload: str, as_json: bool, **access: Any) -> int:
    """Publish the hot set that `build` made last for a workload of the image REF."""

    with open_image(ref, push=True, **access) as image:
        hot_set = image.hot_sets.load(workload)
        if hot_set is None:
            raise NotFoundError(
                f"no hot set of {describe_workload(workload)} of {ref} was made on this node; "
                f"run `bootseer image hotset build {ref}` first"
            )
        if hot_set.hot.block_image != image.parts.block_image:
            raise UsageError(
                f"{ref} has another block image since the hot set was made; build it again"
            )
        hot_set = publish(image, hot_set)
    if as_json:
        echo_json(hot_set.as_dict())
        return 0
    click.echo(hot_set.digest)
    return 0
