"""`bootseer image record`."""

from __future__ import annotations

import os
from typing import Any

import click

from bootseer.cli.image.hotset.group import (
    cache_directory,
    describe_workload,
    open_image,
    which_workload_option,
)
from bootseer.cli.image.options import (
    WINDOW_S,
    PodmanStyleCommand,
    deadline_option,
    image_access_options,
    log_file_option,
    platform_option,
    podman_arguments,
    podman_platform,
    words_after_dashes,
)
from bootseer.cli.shared import sizes
from bootseer.entrypoint import job_process
from bootseer.errors import UsageError


@click.command("record", cls=PodmanStyleCommand, options_metavar="[OPTIONS]")
@which_workload_option
@click.option(
    "--window",
    "window_s",
    envvar="BOOTSEER_IMAGE_RECORD_WINDOW",
    type=WINDOW_S,
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Recording ends this long after the start, unless `first_step` is recorded before.",
)
@click.option("--stop", is_flag=True, help="End the command once it is recorded.")
@click.option(
    "--with",
    "runner",
    envvar="BOOTSEER_IMAGE_RECORD_WITH",
    type=click.Choice(["auto", "podman", "chroot"]),
    default="auto",
    show_default=True,
    help="What runs the command; auto takes podman where it is installed.",
)
@click.option(
    "--env",
    "-e",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the command, over the image's own; without a value, as it is here. "
    "Repeatable.",
)
@click.option("--push", is_flag=True, help="Build the hot set and publish it at once.")
@image_access_options
@deadline_option
@log_file_option
@platform_option
@podman_arguments("-- COMMAND...")
@click.pass_context
def command(
    context: click.Context,
    /,
    ref: str,
    options: tuple[str, ...],
    workload: str,
    variables: tuple[str, ...],
    push: bool,
    cache: str,
    plain_http: bool,
    platform: str,
    **fields: Any,
) -> int:
    """Start COMMAND on the image REF, cold, and record what it reads until its first step.

    Needs the image's block image (`bootseer image build REF`) and root. The command runs by
    podman or in a chroot, with the image's own environment, on a throw-away overlay; podman's own
    options may stand behind REF. It tells its first step with `bootseer event first_step`, or by
    writing to $BOOTSEER_EVENTS. Returns the command's exit code.
    """
    from bootseer.imageprefetch.run import podman_options
    from bootseer.imageprefetch.run.record_image import RecordSettings, record

    podman_options.check_platform(
        podman_platform(platform), instead="; record it on such a machine"
    )
    options, words = _split_words(options, words_after_dashes(context))
    recorded = record(
        RecordSettings(
            ref=ref,
            words=words,
            podman_options=options,
            workload=workload,
            cache=cache_directory(cache),
            environment=dict(map(_parse_variable, variables)),
            plain_http=plain_http or None,
            **fields,
        ),
        job_process.say,
    )
    if recorded.trace is None:
        why = "failed before its first step" if recorded.failed else "read nothing of the image"
        click.echo(f"bootseer: the command {why}; nothing is kept of it", err=True)
        return recorded.exit_code
    click.echo(
        f"bootseer: recorded {describe_workload(workload)}: "
        f"{sizes.format_size(recorded.trace.touched_bytes())} over "
        f"{recorded.trace.starts} full starts",
        err=True,
    )
    if push:
        _push_hot_set(ref, workload, cache, plain_http)
    else:
        from bootseer.imageprefetch.hotset import local_packer

        local_packer.start_recorded(
            ref,
            recorded.digest,
            workload,
            cache_directory(cache),
            plain_http=plain_http or None,
        )
        workload_words = f" --workload {workload}" if workload else ""
        click.echo(
            "bootseer: mounts on this node replay it in a moment; publish it for others with "
            f"`bootseer image hotset build {ref}{workload_words} --push`",
            err=True,
        )
    return recorded.exit_code


def _split_words(
    before: tuple[str, ...], after: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return podman's options and the command, from the words before and after `--`.

    A command none of whose words looks like an option needs no `--`. Raises UsageError.
    """
    if after is None and not any(len(word) > 1 and word.startswith("-") for word in before):
        before, after = (), before
    if not after:
        raise UsageError("name the command to be recorded, behind --")
    return before, after


def _parse_variable(text: str) -> tuple[str, str]:
    """Return name and value of NAME=VALUE; the value of a plain NAME is this process's own.

    A plain NAME keeps a secret out of the command line. Raises UsageError.
    """
    name, equals, value = text.partition("=")
    if not name:
        raise UsageError("--env takes NAME=VALUE, or NAME")
    if equals:
        return name, value
    if name not in os.environ:
        raise UsageError(f"the variable {name} is not set here; set it, or give {name}=VALUE")
    return name, os.environ[name]


def _push_hot_set(ref: str, workload: str, cache: str, plain_http: bool) -> None:
    from bootseer.cli.image.hotset.build import publish
    from bootseer.imageprefetch.hotset import store
    from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher

    with open_image(ref, cache=cache, plain_http=plain_http, push=True) as image:
        own, trace = image.own_trace(workload), image.trace(workload)
        assert trace is not None  # it was recorded just now
        with open_fetcher(cache_directory(cache)) as fetcher:
            hot_set, _ = store.pack(image.hot_sets, image.parts, trace, fetcher, own=own)
        publish(image, hot_set)
