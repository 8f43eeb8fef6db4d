"""The interface of a part, by which new ones join.

A part has a pure half (`plan`), and two halves that run in a process of its own, which `start`
watches: `run` does the work, `repair` undoes or finishes what a killed `run` may have left.
Importing a part's module must stay cheap: it imports its machinery when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from bootseer.entrypoint.plan import Plannable, Request
from bootseer.events.writer import NullWriter

_Section = TypeVar("_Section")


class Progress(Protocol):
    """How a part reports to `start` what its time is spent on."""

    def command_began(self) -> None:
        """The plain command runs under this part: our deadline is suspended."""

    def command_ended(self, exit_code: int) -> None:
        """The command ended; our deadline runs on. With 0, the input is ready in any case."""


class Part(Plannable, Protocol):
    """One input of a job that can be made ready in a better way than the plain one.

    `name` is its section in `bootseer.toml`.
    """

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        """Make the input ready; return 0, or the exit code of a plain command that failed.

        Runs in its own process and process group. Any exception that it raises is a fault of ours.
        """

    def repair(self, request: Request) -> None:
        """Undo or finish what a killed `run` left, before the plain way is taken."""


def decode_section(record: Callable[..., _Section], request: Request) -> _Section:
    """Make a section's record from a request in which JSON has turned its tuples into lists."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in request.items()}
    return record(**values)
