"""Options that several commands about images have."""

from __future__ import annotations

import re
from typing import Any

import click

from bootseer.cli.shared import sizes
from bootseer.cli.shared.options import Decorator, together
from bootseer.errors import UsageError

_WORDS = "bootseer.words"
_PODMANS = re.compile("-[^-e].")
WINDOW_S = click.FloatRange(0.1, 86_400)


def workload_option(text: str) -> Decorator:
    """`--workload`, with what it decides."""
    return click.option(
        "--workload", envvar="BOOTSEER_IMAGE_WORKLOAD", default="", metavar="NAME", help=text
    )


def cache_option(text: str) -> Decorator:
    """`--cache`, with what lies there."""
    return click.option("--cache", envvar="BOOTSEER_CACHE", default="", metavar="PATH", help=text)


def share_option(text: str) -> Decorator:
    """`--share` of the starts, with what is done with what they touched."""
    return click.option(
        "--share",
        envvar="BOOTSEER_IMAGE_HOTSET_SHARE",
        type=click.FloatRange(0, 1),
        default=0.5,
        show_default=True,
        metavar="SHARE",
        help=text,
    )


kept_option = cache_option("This node's directory for what is kept of images.")
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
place_options = together(kept_option, plain_http_option)
"""How an image is reached, and where this node keeps things; `image_hotset.opened` takes them."""

serving_options = together(
    workload_option("Whose hot set is replayed, and whose starts are recorded."),
    kept_option,
    click.option(
        "--cache-limit",
        "cache_limit_bytes",
        envvar="BOOTSEER_IMAGE_CACHE_LIMIT",
        callback=sizes.parsed,
        metavar="SIZE",
        default="64GiB",
        show_default=True,
        help="The largest size of the blocks kept there.",
    ),
    click.option(
        "--kept-limit",
        "kept_limit_bytes",
        envvar="BOOTSEER_IMAGE_KEPT_LIMIT",
        callback=sizes.parsed,
        metavar="SIZE",
        default="16GiB",
        show_default=True,
        help="The largest size of what else is kept of images: metadata, tables, hot sets.",
    ),
    click.option(
        "--fill/--no-fill",
        envvar="BOOTSEER_IMAGE_FILL",
        default=True,
        show_default=True,
        help="Fetch the rest of an image too, after the start or when nobody reads.",
    ),
    click.option(
        "--fill-rate",
        "fill_rate_bytes_s",
        envvar="BOOTSEER_IMAGE_FILL_RATE",
        callback=sizes.parsed,
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
"""How images are served; named as the fields of `MountSettings`."""


class BeforeDashes(click.Command):
    """What stands behind -- is the command's; of what stands before, we know our options.

    For commands with `podman_arguments`. Of short options with something attached only `-e` may
    be ours. The words behind are kept for `words_behind`, which has None where there is no --.
    """

    def __init__(self, *words: Any, **settings: Any) -> None:
        # Podman has an -h of its own.
        ours = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
        super().__init__(*words, **{"context_settings": ours, **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the command's words alone, and podman's short options whole."""
        if args == ["-h"]:
            args = ["--help"]
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_WORDS] = tuple(args[at + 1 :]) if at < len(args) else None
        # In `-v/data:/e` click would find a short option of ours.
        takers = {name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts}
        podmans = {
            f"\0{n}": word
            for n, word in enumerate(args[:at])
            if _PODMANS.match(word) and not (n and args[n - 1] in takers)
        }
        shown = [f"\0{n}" if f"\0{n}" in podmans else word for n, word in enumerate(args[:at])]
        left = super().parse_args(ctx, shown)
        if ctx.resilient_parsing:  # completion by a shell: nothing need be there
            return left
        ref = podmans.get(ctx.params["ref"], ctx.params["ref"])
        if ref.startswith("-"):
            raise UsageError(f"name the image before podman's options: what is {ref}?")
        ctx.params["options"] = tuple(podmans.get(word, word) for word in ctx.params["options"])
        return left


def of_platform(platform: str) -> tuple[str, ...]:
    """`--platform` as podman's option, which it is as well: it runs what we cannot mount."""
    return ("--platform", platform) if platform else ()


def podman_arguments(command: str) -> Decorator:
    """`ref` and podman's `options` behind it; `command` is how help shows what follows."""
    return together(
        click.argument("ref"),
        click.argument(
            "options",
            nargs=-1,
            type=click.UNPROCESSED,
            metavar=f"[PODMAN OPTION]... {command}",
        ),
    )


def words_behind(context: click.Context) -> tuple[str, ...] | None:
    """The words behind --."""
    found: tuple[str, ...] | None = context.meta[_WORDS]
    return found
