"""`bootseer image files record`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.files.group import (
    check_trace_options,
    open_trace_store,
    paths_option,
    resolve_image_name,
    trace_options,
    write_trace_file,
)
from bootseer.cli.shared import sizes

if TYPE_CHECKING:
    from bootseer.imageprefetch.filemode.file_trace import FileTrace


@click.command(
    "record",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@trace_options
@paths_option
@click.option(
    "--method",
    envvar="BOOTSEER_IMAGE_METHOD",
    type=click.Choice(["auto", "tracefs", "residency", "opens"]),
    default="auto",
    show_default=True,
    help="By what: the kernel's tracing (root), what is in memory afterwards (files of one's "
    "own), or which files are opened.",
)
@click.option(
    "--record-window",
    "window_s",
    envvar="BOOTSEER_IMAGE_WINDOW_S",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Record no longer than that, whatever the command does.",
)
@click.option(
    "--events",
    "events_dir",
    envvar="BOOTSEER_EVENTS",
    default="",
    metavar="DIR",
    help="Where the command's events go: its first_step ends the recording.",
)
@click.option(
    "--evict/--no-evict",
    default=False,
    help="First take the files out of memory, as far as no process uses them: a start from warm "
    "files shows little.",
)
@click.argument("words", metavar="CMD", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    file: str,
    traces: str,
    image: str,
    workload: str,
    paths: tuple[str, ...],
    method: Any,
    window_s: float,
    events_dir: str,
    evict: bool,
    words: tuple[str, ...],
    **store_parameters: Any,
) -> int:
    """Run CMD and record which ranges of files it makes the kernel read, until its first step.

    The trace is merged with that of earlier starts where it is kept by --traces; --file is
    overwritten. The exit code is CMD's own.
    """
    from bootseer.entrypoint import job_process
    from bootseer.imageprefetch.filemode import roots
    from bootseer.imageprefetch.filemode.recorder import (
        CommandRecording,
        FileRecordSettings,
        Recording,
    )
    from bootseer.imageprefetch.workloads import check_workload

    check_trace_options(file, traces)
    settings = FileRecordSettings(
        roots=paths or roots.DEFAULT_ROOTS, workload=check_workload(workload), method=method
    )
    with Recording(settings, os.getpid()) as recording:
        click.echo(f"bootseer: recording by {recording.method}: {recording.why}", err=True)
        recording.survey(evict=evict)
        with CommandRecording(recording, window_s=window_s, events_dir=events_dir) as watched:
            try:
                child = job_process.start(words, job_process.original_environment(), {})
            except OSError as error:
                return job_process.mirror_result(job_process.make_failure(words, error))
            result = child.wait()
            child.release()
        trace = watched.trace(succeeded=result.code == 0)
    if file:
        write_trace_file(file, trace)
    else:
        _add_to_store(trace, traces, image, store_parameters)
    click.echo(f"bootseer: {_describe_trace(trace, watched.ended_by)}", err=True)
    return job_process.mirror_result(result)


def _add_to_store(
    trace: FileTrace, traces: str, image: str, store_parameters: dict[str, Any]
) -> None:
    with open_trace_store(traces, store_parameters) as trace_store:
        merged = trace_store.add(resolve_image_name(image), trace)
        click.echo(f"bootseer: merged with {merged.recordings - 1} recordings", err=True)


def _describe_trace(trace: FileTrace, ended_by: str) -> str:
    start = "a cold start" if trace.trace.starts else "not a whole cold start, so it adds only"
    size = sizes.format_size(trace.trace.touched_bytes())
    return f"{len(trace.files)} files, {size}, ended by the {ended_by}; {start}"
