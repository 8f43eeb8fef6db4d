"""`bootseer history`: keep starts of many jobs, and report over them."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bootseer.cli.shared.options import echo_json, json_option
from bootseer.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.profiler.history.model import StartRecord

_AGE = re.compile(r"(\d+)([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_store_option = click.option(
    "--store",
    envvar="BOOTSEER_STORE",
    metavar="DIR",
    help="Where the history lives (in DIR/history); default: next to the events, in "
    "~/.local/state/bootseer.",
)


@click.group()
def command() -> None:
    """Keep starts over many jobs and say what they cost."""


@command.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--events",
    envvar="BOOTSEER_EVENTS",
    metavar="DIR",
    help="Events to read when no PATH is given; default: where `run` writes them.",
)
@_store_option
@json_option
def add(paths: tuple[str, ...], events: str | None, store: str | None, as_json: bool) -> None:
    """Add every start found in event files or directories; what is there already stays."""
    from bootseer.events.writer import default_directory
    from bootseer.profiler.history import collect as history_collect
    from bootseer.profiler.history import store as history_store
    from bootseer.profiler.report.load import load

    sources: Sequence[str] = paths or (events or default_directory(),)
    directory = _store_directory(store)
    loaded = load.load(sources)
    results = []
    newer: history_store.NewerRecordError | None = None
    for start in loaded.starts:
        try:
            result = history_store.add(directory, history_collect.record_of(start))
        except history_store.NewerRecordError as error:
            newer = error
        else:
            results.append((start.trace_id, result))
    for problem in loaded.problems:
        click.echo(f"bootseer: {problem.file}: {problem.kind}: {problem.detail}", err=True)
    if as_json:
        echo_json(
            {
                "store": history_store.directory_of(directory),
                "starts": [{"trace_id": trace, "result": result} for trace, result in results],
            }
        )
    else:
        for trace, result in results:
            click.echo(f"{trace} {result}")
    if newer is not None:  # the others are added all the same
        raise newer


@command.command()
@_store_option
@click.option(
    "--since",
    metavar="WHEN",
    help="Only starts from then on: an age (30d, 12h, 2w) or a date (2026-03-01, UTC).",
)
@json_option
def report(store: str | None, since: str | None, as_json: bool) -> None:
    """Report over all starts kept: GPU time lost, kinds, scale, and slow nodes."""
    from bootseer.profiler.history import analysis as history_analysis
    from bootseer.profiler.history import store as history_store

    directory = _store_directory(store)
    if store is not None and not os.path.isdir(directory):
        raise NotFoundError(f"no store at {directory}; check --store or BOOTSEER_STORE")
    since_ns = _parse_since(since)
    records, problems = history_store.read_all(directory)
    recent: list[StartRecord] = [r for r in records if r.begin_unix_nano >= since_ns]
    result = history_analysis.analyse(recent, problems)
    if as_json:
        echo_json(result.to_json())
        return
    from rich.console import Console

    from bootseer.profiler.history import render as history_render

    history_render.render(result, Console())


def _store_directory(store: str | None) -> str:
    """Return the directory of `--store`, or without it the one that holds the default events."""
    from bootseer.events.writer import default_directory

    return store or os.path.dirname(default_directory())


def _parse_since(text: str | None) -> int:
    """Return the time of `--since` in nanoseconds since the epoch; 0 without it.

    Raises UsageError.
    """
    if text is None:
        return 0
    age = _AGE.fullmatch(text.strip())
    now = datetime.datetime.now(datetime.UTC)
    try:
        if age:
            moment = now - datetime.timedelta(seconds=int(age[1]) * _UNIT_S[age[2]])
        else:
            moment = datetime.datetime.fromisoformat(text.strip())
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text}: neither an age such as 30d nor a date such as 2026-03-01"
        ) from None
    return int(moment.timestamp()) * 10**9
