"""The parts there are, and the interface by which more of them join.

A part has a pure half (`plan`), and two halves that run in a process of its own, which `start`
watches: `run` does the work, `repair` makes good what a killed `run` may have left half done.
Importing this module must stay cheap: a part imports its machinery when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bootseer.config import Config
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.profiler.events import NullWriter


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


class DepsPart:
    """Dependencies: restore a snapshot, or run the install command and take one."""

    name = "deps"
    phase = "deps.install"

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        deps = config.deps
        if not deps.install:
            return None
        if problem or not deps.enabled:
            return PartPlan(self.name, self.phase, None, plain=deps.install, reason=problem)
        request: Request = {
            "install": list(deps.install),
            "key_files": list(deps.key_files),
            "also": list(deps.also),
            "store": deps.store or None,
            "cache": deps.cache or None,
            "wait": deps.wait,
            "form": deps.form,
            "max_age_days": deps.max_age_days,
        }
        return PartPlan(
            self.name, self.phase, request, plain=deps.install, deadline_s=deps.deadline_s
        )

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        raise NotImplementedError

    def repair(self, request: Request) -> None:
        raise NotImplementedError


REGISTRY: Sequence[Part] = (DepsPart(),)


def by_name(name: str) -> Part:
    """The registered part of that name; KeyError when there is none."""
    return {part.name: part for part in REGISTRY}[name]
