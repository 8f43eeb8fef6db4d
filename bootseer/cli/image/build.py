"""`bootseer image build`: make the block image of a stock image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.options import cache_option, plain_http_option
from bootseer.cli.shared import progress, sizes
from bootseer.cli.shared.options import echo_json, json_option
from bootseer.entrypoint import job_process

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_build.builder import BuildSettings


@click.command(
    "build",
    help="""Make the block image of the image REF and push it next to it, once.

    REF is an image's name, oci-layout:DIR[:TAG], docker-archive:FILE[:NAME], or docker-daemon:NAME
    for one that a running Docker or Podman holds. The block image lies in the same repository and
    refers to the image; tag and image stay as they are. Needs no root and no container program.
    Building twice gives the same block image, and does nothing where there is one.
    """,
)
@click.option(
    "--to",
    envvar="BOOTSEER_IMAGE_BUILD_TO",
    default="",
    metavar="REF",
    help="Which image of a registry or layout an archive's or a container program's image is: "
    "there the block image goes.",
)
@click.option(
    "--platform",
    envvar="BOOTSEER_IMAGE_PLATFORM",
    default="",
    metavar="OS/ARCH[/VARIANT]",
    help="Which image of several. Default: this machine's.",
)
@cache_option("This node's directory, where the build works and from where a broken one goes on.")
@click.option(
    "--socket",
    envvar="BOOTSEER_IMAGE_SOCKET",
    default="",
    metavar="PATH",
    help="Docker's or Podman's socket; by default the usual places are tried.",
)
@click.option(
    "--lease",
    envvar="BOOTSEER_IMAGE_BUILD_LEASE",
    default="",
    metavar="URL",
    help="A store that all nodes share (a folder, hdfs://, webhdfs://): one of them builds, the "
    "others wait.",
)
@click.option("--rebuild", is_flag=True, help="Build although there is a block image.")
@click.option(
    "--threads",
    envvar="BOOTSEER_IMAGE_BUILD_THREADS",
    type=click.IntRange(1, 64),
    default=None,
    metavar="N",
    help="Threads that compress. Default: one a processor, 8 at most.",
)
@click.option(
    "--max-entries",
    envvar="BOOTSEER_IMAGE_BUILD_MAX_ENTRIES",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="Refuse an image of more files than this, over all layers.",
)
@click.option(
    "--max-size",
    envvar="BOOTSEER_IMAGE_BUILD_MAX_SIZE",
    callback=sizes.parse_size,
    default="128GiB",
    show_default=True,
    metavar="SIZE",
    help="Refuse an image that unpacks to more than this.",
)
@click.option(
    "--wait",
    "wait_s",
    envvar="BOOTSEER_IMAGE_BUILD_WAIT",
    type=click.FloatRange(0, 86_400),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long another build of the image is waited for.",
)
@plain_http_option
@json_option
@click.argument("ref")
def command(ref: str, as_json: bool, **options: Any) -> int:
    import dataclasses

    from bootseer.imageprefetch.image_build.builder import build_image

    with progress.show_progress(ref) as meter:
        report = build_image(
            _make_settings(ref, **options),
            expect=meter.expect,
            progress=meter.advance,
            note=job_process.say,
            stage=_ignore_stage if progress.is_bar_shown() else job_process.say,
        )
    if as_json:
        echo_json(dataclasses.asdict(report))
        return 0
    if not report.built:
        click.echo(f"{report.block_image}: there already, for {report.subject}")
        return 0
    click.echo(
        f"{report.block_image}: {report.files} files, {sizes.format_size(report.data_bytes)} in "
        f"{sizes.format_size(report.stored_bytes)}, for {report.subject}"
    )
    return 0


def _ignore_stage(text: str) -> None:
    """Print nothing, as the progress bar shows the stage."""


def _make_settings(
    ref: str,
    *,
    cache: str,
    platform: str,
    plain_http: bool,
    threads: int | None,
    max_entries: int,
    max_size: int,
    **fields: Any,
) -> BuildSettings:
    import os

    from bootseer.config.loading import default_cache
    from bootseer.imageprefetch.image_build.builder import BuildSettings
    from bootseer.imageprefetch.image_build.flatten import Limits
    from bootseer.storage.oci.platforms import parse_platform

    return BuildSettings(
        ref=ref,
        cache_dir=cache or default_cache(),
        platform=parse_platform(platform) if platform else None,
        plain_http=plain_http or None,
        threads=threads or min(8, len(os.sched_getaffinity(0))),
        limits=Limits(entries=max_entries, unpacked_bytes=2 * max_size),
        data_limit_bytes=max_size,
        **fields,
    )
