"""`bootseer image files`: file mode, for any runtime and without privilege."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.options import workload_option
from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.cli.shared.options import combine_options, store_options, take_store_options

if TYPE_CHECKING:
    from bootseer.imageprefetch.filemode.file_trace import FileTrace
    from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore

COMMANDS: dict[str, tuple[str, str]] = {
    "record": ("image.files.record", "Run a command and record which files its start reads."),
    "replay": ("image.files.replay", "Read ahead what earlier starts read."),
    "show": ("image.files.show", "Show what starts read, by directory."),
    "merge": ("image.files.merge", "Merge traces of several starts into one."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def command() -> None:
    """Record which ranges of files a start reads, and read them ahead in the next one.

    Works inside any container, whatever its runtime and file system. A trace lies in a file
    (--file), or in a directory or store shared by the nodes (--traces), by image and workload.
    """


trace_options = combine_options(
    store_options,
    click.option(
        "-f",
        "--file",
        "file",
        envvar="BOOTSEER_IMAGE_FILE",
        default="",
        metavar="FILE",
        help="The trace's own file.",
    ),
    click.option(
        "--traces",
        envvar="BOOTSEER_IMAGE_TRACES",
        default="",
        metavar="URL",
        help="Directory or store that holds traces by image and workload.",
    ),
    click.option(
        "--image",
        envvar="BOOTSEER_IMAGE_IMAGE",
        default="",
        metavar="NAME",
        help="The image's name there, best its digest; default: derived from its directories.",
    ),
    workload_option("What runs, where several kinds of jobs share an image."),
)
"""Which trace is used; parameters of `load_trace` and `open_trace_store`."""


paths_option = click.option(
    "--path",
    "paths",
    envvar="BOOTSEER_IMAGE_PATHS",
    multiple=True,
    metavar="DIR",
    help="Directory whose files count, without what is mounted below it; repeatable. Default: /.",
)


def check_trace_options(file: str, traces: str) -> None:
    """Raise click.UsageError unless either a file is given, by --file, or --traces."""
    if bool(file) == bool(traces):
        raise click.UsageError("name the trace by either --file or --traces")
    _check_is_path(file)


def open_trace_store(traces: str, parameters: dict[str, Any]) -> FileTraceStore:
    """Open the directory or store of traces; removes the store's options from `parameters`."""
    from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore

    return FileTraceStore.open(traces, take_store_options(parameters))


def resolve_image_name(image: str) -> str:
    """Return the name of the image in a store of traces; "" is the image of this container."""
    from bootseer.imageprefetch.filemode.trace_names import image_here

    return image or image_here()


def load_trace(file: str, traces: str, image: str, workload: str, **parameters: Any) -> FileTrace:
    """Load the trace that `trace_options` name. Raises NotFoundError if there is none."""
    from bootseer.errors import NotFoundError

    check_trace_options(file, traces)
    if file:
        return read_trace_file(file)
    with open_trace_store(traces, parameters) as trace_store:
        trace = trace_store.load(resolve_image_name(image), workload)
    if trace is None:
        raise NotFoundError(
            f"{trace_store.url} has no trace of image {resolve_image_name(image)}, "
            f"workload {workload!r}; record one with `bootseer image files record`"
        )
    return trace


def read_trace_file(path: str) -> FileTrace:
    """Read a trace from a file. Raises BootseerError if it is unreadable or damaged."""
    from bootseer.errors import from_os_error
    from bootseer.imageprefetch.filemode import file_trace

    _check_is_path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(file_trace.MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"read the trace {path}") from error
    return file_trace.parse(data, name=f"the trace {path}")


def write_trace_file(path: str, trace: FileTrace) -> None:
    """Write a trace to a file, which appears whole or not at all."""
    from bootseer.errors import from_os_error
    from bootseer.imageprefetch.filemode import file_trace
    from bootseer.system.atomic import replace_file

    _check_is_path(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        replace_file(path, file_trace.serialise(trace))
    except OSError as error:
        raise from_os_error(error, f"write the trace {path}") from error


def _check_is_path(path: str) -> None:
    if "://" in path:
        raise click.UsageError(
            f"{path} is an address; name a file, or a store by --traces where that is an option"
        )
