"""The interface of a part, by which new ones join.

A part has a pure half (`plan`), and two halves that run in a process of its own, which `start`
watches: `run` does the work, `repair` makes good what a killed `run` may have left half done.
Importing a part's module must stay cheap: it imports its machinery when it runs.
"""

from __future__ import annotations

from typing import Protocol

from bootseer.config.sections import Config
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.events.writer import NullWriter


class Progress(Protocol):
    """How a part tells `start` whose time is running."""

    def command_began(self) -> None:
        """The plain command runs under this part: our deadline stands still."""

    def command_ended(self, exit_code: int) -> None:
        """It ended; our deadline runs on. With 0, the input is ready whatever comes now."""


class Part(Protocol):
    """One input of a job that can be made ready in a better way than the plain one."""

    @property
    def name(self) -> str:
        """Its section in `bootseer.toml`."""

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        """See `plan.Plannable`."""

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        """Make the input ready; return 0, or the exit code of a plain command that failed.

        Runs in its own process and process group. Whatever it raises is a fault of ours.
        """

    def repair(self, request: Request) -> None:
        """Undo or finish what a killed `run` left, before the plain way is taken."""
