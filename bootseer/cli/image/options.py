"""Options that several commands about images have."""

from __future__ import annotations

import re
from typing import Any

import click

from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import Decorator, combine_options
from bootseer.errors import UsageError

_WORDS = "bootseer.words"
_SHORT_OPTION_WITH_VALUE = re.compile("-[^-e].")
WINDOW_S = click.FloatRange(0.1, 86_400)
"""The range of an option that is a time in seconds."""


def workload_option(text: str) -> Decorator:
    """Return the option `--workload` with `text` as its help."""
    return click.option(
        "--workload", envvar="BOOTSEER_IMAGE_WORKLOAD", default="", metavar="NAME", help=text
    )


def cache_option(text: str) -> Decorator:
    """Return the option `--cache` with `text` as its help."""
    return click.option("--cache", envvar="BOOTSEER_CACHE", default="", metavar="PATH", help=text)


def share_option(text: str) -> Decorator:
    """Return the option `--share`, a share of the recorded starts, with `text` as its help."""
    return click.option(
        "--share",
        envvar="BOOTSEER_IMAGE_HOTSET_SHARE",
        type=click.FloatRange(0, 1),
        default=0.5,
        show_default=True,
        metavar="SHARE",
        help=text,
    )


image_cache_option = cache_option("This node's directory for what is kept of images.")
plain_http_option = click.option(
    "--plain-http",
    envvar="BOOTSEER_IMAGE_PLAIN_HTTP",
    is_flag=True,
    help="The registry speaks http (on loopback it always may).",
)
runtime_option = click.option(
    "--runtime",
    envvar="BOOTSEER_RUNTIME",
    default="",
    metavar="PATH",
    help="Where this node's servers keep their state.",
)
deadline_option = click.option(
    "--deadline",
    "deadline_s",
    envvar="BOOTSEER_IMAGE_DEADLINE",
    metavar="SECONDS",
    type=WINDOW_S,
    default=60.0,
    show_default=True,
    help="A read that got no bytes for so long fails with an input/output error; those that follow "
    "in the same outage fail after 2 s.",
)
hot_option = click.option(
    "--hot/--no-hot",
    envvar="BOOTSEER_IMAGE_HOT",
    default=True,
    show_default=True,
    help="Replay the hot set.",
)
log_file_option = click.option(
    "--log-file",
    envvar="BOOTSEER_IMAGE_LOG_FILE",
    default="",
    metavar="FILE",
    help="Append what goes wrong to this file.",
)
platform_option = click.option(
    "--platform",
    envvar="BOOTSEER_IMAGE_PLATFORM",
    default="",
    metavar="OS/ARCH[/VARIANT]",
    help="Which image of several. Only this machine's are mounted.",
)
image_access_options = combine_options(image_cache_option, plain_http_option)
"""The node's cache and how the registry is reached: parameters of `hotset.group.open_image`."""

kept_limit_option = click.option(
    "--kept-limit",
    "kept_limit_bytes",
    envvar="BOOTSEER_IMAGE_KEPT_LIMIT",
    callback=sizes.parse_size,
    metavar="SIZE",
    default="16GiB",
    show_default=True,
    help="The largest size of what else is kept of images: metadata, tables, hot sets.",
)
serving_options = combine_options(
    workload_option("Whose hot set is replayed, and whose starts are recorded."),
    image_cache_option,
    click.option(
        "--cache-limit",
        "cache_limit_bytes",
        envvar="BOOTSEER_IMAGE_CACHE_LIMIT",
        callback=sizes.parse_size,
        metavar="SIZE",
        default="64GiB",
        show_default=True,
        help="The largest size of the blocks kept there.",
    ),
    kept_limit_option,
    click.option(
        "--fill/--no-fill",
        envvar="BOOTSEER_IMAGE_FILL",
        default=True,
        show_default=True,
        help="Fetch the rest of an image too, after the start or when nothing is read.",
    ),
    click.option(
        "--fill-rate",
        "fill_rate_bytes_s",
        envvar="BOOTSEER_IMAGE_FILL_RATE",
        callback=sizes.parse_size,
        metavar="SIZE",
        default="64MiB",
        show_default=True,
        help="Bytes a second that filling an image may take; 0 = any.",
    ),
    click.option(
        "--record/--no-record",
        envvar="BOOTSEER_IMAGE_MOUNT_RECORD",
        default=True,
        show_default=True,
        help="Record what starts read.",
    ),
    runtime_option,
)
"""How images are served; their names are those of the fields of `MountSettings`."""


class PodmanStyleCommand(click.Command):
    """A command line of own and podman's options, an image, and after `--` a container's command.

    For commands with `podman_arguments`. Of short options with an attached value, only `-e` may be
    one of ours. `words_after_dashes` returns what follows `--`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        # `-h` is an option of podman's.
        defaults = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
        super().__init__(*args, **{"context_settings": defaults, **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before `--`, with podman's short options kept whole."""
        if args == ["-h"]:
            args = ["--help"]
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_WORDS] = tuple(args[at + 1 :]) if at < len(args) else None
        # In podman's `-v/data:/e` click would find our `-e`, so such words are hidden from it
        # behind placeholders; but not those that are the value of one of our options.
        with_value = {
            name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts
        }
        hidden = {
            f"\0{n}": word
            for n, word in enumerate(args[:at])
            if _SHORT_OPTION_WITH_VALUE.match(word) and not (n and args[n - 1] in with_value)
        }
        visible = [f"\0{n}" if f"\0{n}" in hidden else word for n, word in enumerate(args[:at])]
        unparsed = super().parse_args(ctx, visible)
        if ctx.resilient_parsing:  # completion by a shell: parameters may be missing
            return unparsed
        ref = hidden.get(ctx.params["ref"], ctx.params["ref"])
        if ref.startswith("-"):
            raise UsageError(f"name the image before podman's options: what is {ref}?")
        ctx.params["options"] = tuple(hidden.get(word, word) for word in ctx.params["options"])
        return unparsed


def podman_platform(platform: str) -> tuple[str, ...]:
    """Return `--platform` as an option of podman, which runs the images that cannot be mounted."""
    return ("--platform", platform) if platform else ()


def podman_arguments(command: str) -> Decorator:
    """Return the arguments `ref` and `options` (podman's); help shows `command` after them."""
    return combine_options(
        click.argument("ref"),
        click.argument(
            "options",
            nargs=-1,
            type=click.UNPROCESSED,
            metavar=f"[PODMAN OPTION]... {command}",
        ),
    )


def words_after_dashes(context: click.Context) -> tuple[str, ...] | None:
    """Return the words after `--` of a `PodmanStyleCommand`; None if there is no `--`."""
    words: tuple[str, ...] | None = context.meta[_WORDS]
    return words
