"""The click group `bootseer`: each command in a module that is imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

import bootseer
from bootseer.cli.shared import failures
from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.errors import BootseerError

# command -> (module with a click command named `command`, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run a command as one measured phase."),
    "event": ("event", "Write one event from a script."),
    "sh": ("sh", "Print the path of the shell library, to be sourced."),
    "start": ("start", "Start a job through all parts of bootseer."),
    "warm": ("warm", "Make a node ready for a job, without starting it."),
    "agent": ("agent", "Stand ready on a node, so that mounts begin at once."),
    "deps": ("deps.group", "Snapshot and restore installed dependencies."),
    "snapshotter": ("snapshotter", "Serve containerd with images that are not pulled first."),
    "inject": ("kubernetes.inject", "Put bootseer into the pods of a Kubernetes manifest."),
    "uninject": ("kubernetes.uninject", "Take it out again."),
    "k8s": ("kubernetes.group", "Check manifests."),
    "stripe": ("stripe.group", "Store, fetch and mount striped checkpoints."),
    "image": ("image.group", "Start container images before they are pulled."),
    "import": ("report.import_", "Turn logs and cluster records into events."),
    "report": ("report.report", "Report where a start's time went."),
    "history": ("report.history", "Keep and report starts over many jobs."),
}


@click.group(
    cls=LazyGroup,
    commands_in=COMMANDS,
    context_settings={"auto_envvar_prefix": "BOOTSEER", "help_option_names": ["-h", "--help"]},
)
@click.version_option(bootseer.__version__, prog_name="bootseer")
def group() -> None:
    """Measure and shorten the start of large training jobs."""


def main(args: Sequence[str]) -> int:
    """Run a command line; return its exit code.

    An error of bootseer or of the operating system is printed as one line.
    """
    try:
        exit_code = _run_group(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "bootseer"
        fault = " ".join(error.format_message().split()).rstrip(".")
        return failures.print_failure(f"{fault}; see `{path} --help`", error.exit_code)
    except (BootseerError, OSError) as error:
        return failures.report_error(error)
    return exit_code


def _run_group(args: Sequence[str]) -> int:
    try:
        result = group.main(args=list(args), prog_name="bootseer", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    return result if isinstance(result, int) else 0
