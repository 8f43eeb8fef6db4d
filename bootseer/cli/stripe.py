"""`bootseer stripe`: checkpoints striped over many objects of a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bootseer.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from bootseer.storage.options import StoreOptions

F = TypeVar("F", bound=Callable[..., Any])

COMMANDS: dict[str, tuple[str, str]] = {
    "put": ("stripe_put", "Store a file or directory as a striped checkpoint."),
    "get": ("stripe_get", "Fetch a checkpoint, or any plain file, in parallel."),
    "cat": ("stripe_cat", "Write a file of a store to standard output."),
    "ls": ("stripe_ls", "List checkpoints, or what one holds."),
    "verify": ("stripe_verify", "Read a checkpoint whole and check every byte."),
    "rm": ("stripe_rm", "Remove a striped checkpoint."),
    "gc": ("stripe_gc", "Remove replaced versions and orphaned temporaries."),
    "mount": ("stripe_mount", "Mount checkpoints as files that any program can read."),
    "umount": ("stripe_umount", "Unmount what `mount` mounted."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Checkpoints striped over many objects, so that they arrive at the speed of many streams.

    A URL is a path, file://, hdfs://, webhdfs://, webhdfss:// or (to read) http(s)://.
    """


def store_options(function: F) -> F:
    """How the store is reached; `options_of` makes StoreOptions of what they give."""
    for option in reversed(
        (
            click.option(
                "--user",
                envvar="BOOTSEER_STORE_USER",
                default="",
                metavar="NAME",
                help="Who we are to a store that believes it (simple authentication).",
            ),
            click.option(
                "--auth",
                envvar="BOOTSEER_STORE_AUTH",
                type=click.Choice(["auto", "simple", "token", "kerberos"]),
                default="auto",
                show_default=True,
                help="How we prove it; auto takes a token where there is one.",
            ),
            click.option(
                "--token-file",
                envvar="BOOTSEER_STORE_TOKEN_FILE",
                default="",
                metavar="FILE",
                help="Holds the delegation or bearer token.",
            ),
            click.option(
                "--ca-file",
                envvar="BOOTSEER_STORE_CA_FILE",
                default="",
                metavar="FILE",
                help="The only authority whose TLS certificates are believed.",
            ),
            click.option(
                "--host",
                "hosts",
                envvar="BOOTSEER_STORE_HOSTS",
                multiple=True,
                metavar="HOST:PORT",
                help="A further NameNode of the URL's cluster; repeatable.",
            ),
            click.option(
                "--hdfs-backend",
                envvar="BOOTSEER_STORE_HDFS_BACKEND",
                type=click.Choice(["native", "arrow"]),
                default="native",
                show_default=True,
                help="What reads hdfs://: hdfs-native, or the cluster's own libhdfs by pyarrow.",
            ),
        )
    ):
        function = option(function)
    return function


def options_of(given: dict[str, Any]) -> StoreOptions:
    """Take the options of `store_options` out of a command's, as StoreOptions."""
    from bootseer.storage.options import StoreOptions

    known = {field.name for field in dataclasses.fields(StoreOptions)}
    return StoreOptions(**{name: given.pop(name) for name in list(given) if name in known})


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def jobs_option(text: str) -> Callable[[F], F]:
    """`--jobs`, with what they are."""
    return click.option("--jobs", type=click.IntRange(1, 256), default=None, metavar="N", help=text)


def resume_option(text: str) -> Callable[[F], F]:
    return click.option("--resume/--no-resume", default=True, show_default=True, help=text)


def echo_json(body: object) -> None:
    """One JSON document on standard output."""
    import json

    click.echo(json.dumps(body, indent=1))
