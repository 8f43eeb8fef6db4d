"""Options that several commands have, and the settings made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from bootseer.storage.options import StoreOptions

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """A decorator as `click.option` returns it."""

    def __call__(self, function: F, /) -> F: ...


def combine_options(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options, in the order in which help shows them."""

    def decorate(function: F, /) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


store_options = combine_options(
    click.option(
        "--user",
        envvar="BOOTSEER_STORE_USER",
        default="",
        metavar="NAME",
        help="The user name for a store that trusts it (simple authentication).",
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
    click.option(
        "--redirects",
        envvar="BOOTSEER_STORE_REDIRECTS",
        type=click.Choice(["same-host", "outward", "any"]),
        default="outward",
        show_default=True,
        help="Where an http(s) store may redirect to; outward: to no more private an address.",
    ),
)
"""How the store is reached; `take_store_options` turns their values into StoreOptions."""


def take_store_options(parameters: dict[str, Any]) -> StoreOptions:
    """Remove the values of `store_options` from a command's parameters; return StoreOptions."""
    from bootseer.storage.options import StoreOptions

    names = {field.name for field in dataclasses.fields(StoreOptions)}
    values = {name: parameters.pop(name) for name in list(parameters) if name in names}
    return StoreOptions(**values)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def echo_json(body: object) -> None:
    """Print one JSON document on standard output."""
    import json

    click.echo(json.dumps(body, indent=1))
