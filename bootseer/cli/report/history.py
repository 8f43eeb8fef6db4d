"""`bootseer history`: keep starts of many jobs, and report over them."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bootseer.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from bootseer.profiler.history.model import StartRecord

_AGE = re.compile(r"(\d+)([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_store_option = click.option(
    "--store",
    envvar="BOOTSEER_STORE",
    metavar="DIR",
    help="Where the history lives (in DIR/history); default: beside the events, in "
    "~/.local/state/bootseer.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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
@_json_option
def add(paths: tuple[str, ...], events: str | None, store: str | None, as_json: bool) -> None:
    """Add every start found in event files or directories; what is there already stays."""
    from bootseer.events.writer import default_directory
    from bootseer.profiler.history import collect as history_collect
    from bootseer.profiler.history import store as history_store
    from bootseer.profiler.report.load import load

    wanted: Sequence[str] = paths or (events or default_directory(),)
    directory = _store(store)
    loaded = load.load(wanted)
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
        document = {
            "store": history_store.directory_of(directory),
            "starts": [{"trace_id": trace, "result": result} for trace, result in results],
        }
        click.echo(json.dumps(document, indent=1))
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
@_json_option
def report(store: str | None, since: str | None, as_json: bool) -> None:
    """Report over all starts kept: GPU time lost, kinds, scale, and slow nodes."""
    from bootseer.profiler.history import analysis as history_analysis
    from bootseer.profiler.history import store as history_store

    directory = _store(store)
    if store is not None and not os.path.isdir(directory):
        raise NotFoundError(f"no store at {directory}; check --store or BOOTSEER_STORE")
    after_ns = _since(since)
    records, problems = history_store.read_all(directory)
    kept: list[StartRecord] = [r for r in records if r.begin_unix_nano >= after_ns]
    result = history_analysis.analyse(kept, problems)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1))
        return
    from rich.console import Console

    from bootseer.profiler.history import render as history_render

    history_render.render(result, Console())


def _store(store: str | None) -> str:
    from bootseer.events.writer import default_directory

    return store or os.path.dirname(default_directory())


def _since(text: str | None) -> int:
    """The moment that `--since` names, in nanoseconds; 0 without it. Raises UsageError."""
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
