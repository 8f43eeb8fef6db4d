"""`bootseer image files`: file mode, for any runtime and without privilege."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.image.options import workload_option
from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.cli.shared.options import options_of, store_options, together

if TYPE_CHECKING:
    from bootseer.imageprefetch.filemode.file_trace import FileTrace
    from bootseer.imageprefetch.filemode.file_trace_store import Keeper

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


place_options = together(
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
        help="The image's name there, best its digest; default: told from its directories.",
    ),
    workload_option("What runs, where several kinds of jobs share an image."),
)
"""Which trace is meant; `trace_of` and `keeper_of` take what they give."""


paths_option = click.option(
    "--path",
    "paths",
    envvar="BOOTSEER_IMAGE_PATHS",
    multiple=True,
    metavar="DIR",
    help="Directory whose files count, without what is mounted below it; repeatable. Default: /.",
)


def check_place(file: str, traces: str) -> None:
    """Exactly one place must be named."""
    if bool(file) == bool(traces):
        raise click.UsageError("name the trace by either --file or --traces")


def keeper_of(traces: str, given: dict[str, Any]) -> Keeper:
    """The place of traces, by the store's options in `given`, which are taken out."""
    from bootseer.imageprefetch.filemode.file_trace_store import Keeper

    return Keeper(traces, options_of(given))


def image_name(image: str) -> str:
    """The image's name among the traces."""
    from bootseer.imageprefetch.filemode.file_trace_store import image_here

    return image or image_here()


def trace_of(file: str, traces: str, image: str, workload: str, **given: Any) -> FileTrace:
    """The trace that the options name; NotFoundError when there is none."""
    from bootseer.errors import NotFoundError

    check_place(file, traces)
    if file:
        return read_file(file)
    with keeper_of(traces, given) as keeper:
        found = keeper.load(image_name(image), workload)
    if found is None:
        raise NotFoundError(
            f"{keeper.url} has no trace of image {image_name(image)}, workload {workload!r}; "
            "record one with `bootseer image files record`"
        )
    return found


def read_file(path: str) -> FileTrace:
    """A trace from its own file."""
    from bootseer.errors import from_os_error
    from bootseer.imageprefetch.filemode import file_trace as filetraces

    try:
        with open(path, "rb") as file:
            data = file.read(filetraces.MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"read the trace {path}") from error
    return filetraces.parse(data, name=f"the trace {path}")


def write_file(path: str, trace: FileTrace) -> None:
    """Put a trace into its own file, in one step."""
    from bootseer.imageprefetch.filemode import file_trace as filetraces
    from bootseer.storage.open import open_object

    store, name = open_object(path if "/" in path else f"./{path}")
    try:
        store.replace(name, filetraces.serialise(trace))
    finally:
        store.close()
