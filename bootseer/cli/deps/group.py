"""`bootseer deps`: snapshots of installed dependencies."""

from __future__ import annotations

from typing import Any

import click

from bootseer.cli.deps import direct
from bootseer.cli.deps.direct import make_settings
from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.cli.shared.options import combine_options, echo_json, json_option

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("deps.group", "Restore what a command would install, or run it and keep the result."),
    "key": ("deps.group", "Print the key of an install command."),
    "restore": ("deps.store", "Put a snapshot in place by its key."),
    "ls": ("deps.store", "List the snapshots of a store."),
    "inspect": ("deps.store", "Show what a snapshot holds."),
    "verify": ("deps.store", "Read snapshots whole and check every byte."),
    "gc": ("deps.store", "Remove old, unreferenced and temporary files."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS, attribute="{}_command")
def command() -> None:
    """Snapshot and restore installed dependencies."""


store_option = click.option(
    "--store",
    envvar="BOOTSEER_STORE",
    metavar="URL",
    help="Where snapshots are kept: a directory that the nodes share, or file:///DIR. "
    "Default: the user's data directory.",
)


cache_option = click.option(
    "--cache",
    envvar="BOOTSEER_CACHE",
    metavar="DIR",
    help="This node's directory, kept between starts; unpacked snapshots are shared there.",
)


sign_option = click.option(
    "--sign-key",
    envvar="BOOTSEER_SIGN_KEY",
    metavar="FILE",
    help="Sign and check records with the secret in FILE (HMAC-SHA256).",
)


key_options = combine_options(
    click.option(
        "--key-file",
        "key_files",
        multiple=True,
        metavar="FILE",
        help="Its contents decide what is installed; repeatable. Files named by -r or -c "
        "are found without it.",
    ),
    click.option(
        "--key-env",
        multiple=True,
        metavar="NAME",
        help="A variable that decides what is installed; repeatable. Those of pip, uv "
        "and compilers are known.",
    ),
    click.option(
        "--also",
        multiple=True,
        metavar="DIR",
        help="Capture this directory too; repeatable. `/` is the whole root.",
    ),
    click.option("--image-digest", default="", metavar="DIGEST", help="Digest of the base image."),
)
"""What goes into the key besides the command."""


@click.command("run", context_settings={"allow_interspersed_args": False})
@key_options
@store_option
@cache_option
@sign_option
@click.option(
    "--wait",
    type=click.Choice(direct.CHOICES["wait"]),
    default="auto",
    show_default=True,
    help="While another node installs the same: wait only where that is not slower, always, never.",
)
@click.option(
    "--wait-limit",
    type=click.FloatRange(min=0),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait of all.",
)
@click.option(
    "--store-timeout",
    type=click.FloatRange(min=0),
    default=4.0,
    show_default=True,
    metavar="SECONDS",
    help="Bound for all questions to the store; then INSTALL runs plainly.",
)
@click.option(
    "--form",
    type=click.Choice(direct.CHOICES["form"]),
    default="auto",
    show_default=True,
    help="How a snapshot is put in place.",
)
@click.option("--read-only", is_flag=True, help="The job never writes there: allows faster forms.")
@click.option(
    "--publish",
    type=click.Choice(direct.CHOICES["publish"]),
    default="background",
    show_default=True,
    help="Pack and store while the job starts, or before it does.",
)
@click.option(
    "--max-age",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="For requirements that could not be resolved.",
)
@click.option(
    "--resolve-timeout",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Bound for resolving unpinned requirements; 0 leaves them to --max-age.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out a name or a path.")
@click.option("--allow-setuid", is_flag=True, help="Keep setuid and setgid bits.")
@click.option("--events", envvar="BOOTSEER_EVENTS", metavar="PATH", help="Where events go.")
@click.argument("install", nargs=-1, type=click.UNPROCESSED, required=True)
def run_command(**parameters: Any) -> int:
    """Bring about what INSTALL would, from a snapshot where there is one.

    The exit code is INSTALL's own. On any fault of ours INSTALL runs plainly, and one line on
    standard error says why.
    """
    return direct.run(**parameters)


@click.command("key", context_settings={"allow_interspersed_args": False})
@key_options
@sign_option
@cache_option
@click.option("--explain", is_flag=True, help="List everything that the key depends on.")
@json_option
@click.argument("install", nargs=-1, type=click.UNPROCESSED, required=True)
def key_command(
    install: tuple[str, ...],
    cache: str | None,
    explain: bool,
    as_json: bool,
    **rest: Any,
) -> int:
    """Print the key that `deps run` would use for INSTALL now."""
    from bootseer.depsnap import run_plan
    from bootseer.depsnap.key import uv_run

    settings = make_settings(None, cache, resolve_timeout_s=0.0, **rest)
    words = list(install)
    words = uv_run.sync_of(words, settings.environ, settings.cwd) or words
    target = run_plan.find_target(settings, words)
    resolution = run_plan.new_resolution(settings, target)
    key = run_plan.prepare(settings, words, target, resolution).key
    if as_json:
        body: dict[str, object] = {"key": key.digest}
        body["decided_by"] = "inputs" if key.closed else "pins" if key.all_exact else "index"
        body["ingredients"] = key.explain()
        body["roots"] = [{"path": r.path, "why": r.why} for r in target.roots]
        echo_json(body)
        return 0
    click.echo(key.digest)
    if explain:
        width = max(len(i.name) for i in key.ingredients)
        for ingredient in key.ingredients:
            click.echo(f"{ingredient.name:<{width}}  {ingredient.value}")
        for root in target.roots:
            click.echo(f"{'root':<{width}}  {root.path} ({root.why})")
    return 0
