"""`bootseer report`: report where a start's time went."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from bootseer import events
from bootseer.cli.shared.outputs import resolve_output
from bootseer.errors import NotFoundError, from_os_error
from bootseer.profiler.render import json as render_json
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load, pause_garbage_collection
from bootseer.profiler.report.model import Report
from bootseer.system.atomic import replace_file

_FILE = click.Path(dir_okay=False)


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path())
@click.option(
    "--events",
    "events_path",
    envvar="BOOTSEER_EVENTS",
    type=click.Path(),
    help="Where to look when no PATH is given (default: the directory that `run` writes to).",
)
@click.option("--trace", metavar="ID", help="The start to report, by (the beginning of) its id.")
@click.option(
    "--baseline",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help="Events of starts to compare with, repeatable; three starts a side are needed.",
)
@click.option("--html", metavar="FILE", type=_FILE, help="Also write a self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead.")
@click.option("--chrome-trace", metavar="FILE", type=_FILE, help="Also write a Chrome trace.")
@click.option("--prometheus", metavar="FILE", type=_FILE, help="Also write Prometheus metrics.")
@click.option("--otlp", metavar="FILE", type=_FILE, help="Also write OTLP/JSON traces.")
def command(
    paths: Sequence[str],
    events_path: str | None,
    trace: str | None,
    baseline: Sequence[str],
    html: str | None,
    as_json: bool,
    chrome_trace: str | None,
    prometheus: str | None,
    otlp: str | None,
) -> None:
    """Report where the time of a start went.

    PATH is an event file, or a directory of them. Of several starts the newest is reported (or
    --trace), and the others are listed; with --baseline all of them are compared.
    """
    with pause_garbage_collection():
        loaded = load(paths or [_find_events(events_path)])
        before = load(baseline) if baseline else None
        report = analysis.analyse(loaded, trace_id=trace, baseline=before)
        if html:
            from bootseer.profiler.render import html as render_html

            write_atomic(html, render_html.render(report))
        if prometheus:
            from bootseer.profiler.render import prometheus as render_prometheus

            write_atomic(prometheus, render_prometheus.render(report))
        if chrome_trace or otlp:
            from bootseer.profiler.render import otlp as render_otlp
            from bootseer.profiler.render import trace as render_trace

            prepared = analysis.prepare_start(analysis.choose_start(loaded, trace))
            if chrome_trace:
                write_atomic(chrome_trace, render_trace.render(prepared))
            if otlp:
                write_atomic(otlp, render_otlp.render(prepared))
        _print_report(report, as_json)


def _find_events(events_path: str | None) -> str:
    """Return the path of the events if no PATH is given. Raises NotFoundError if there are none."""
    path = events_path or events.default_directory()
    if not os.path.exists(path):
        raise NotFoundError(
            f"no events yet at {path}; measure a job with `bootseer run`, or name a PATH"
        )
    return path


def _print_report(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(render_json.render(report), nl=False)
        return
    from rich.console import Console

    from bootseer.profiler.render import terminal as render_terminal

    render_terminal.render(report, Console())


def write_atomic(path: str, text: str) -> None:
    """Write a file, so that readers see the old content or the new, never a part.

    Characters that UTF-8 cannot encode (lone surrogates in foreign names) become `?`. Raises
    BootseerError if the file cannot be written.
    """
    try:
        path, mode = resolve_output(path)
        data = text.encode("utf-8", "replace")
        if mode is None:
            replace_file(path, data)
        else:
            replace_file(path, data, mode=mode & 0o777, exact_mode=True)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error
