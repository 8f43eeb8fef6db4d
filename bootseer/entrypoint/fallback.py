"""What becomes of a part after its process ended, decided without doing anything."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from bootseer.entrypoint.plan import PartPlan

State = Literal["ours", "command"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a part's process that ended, or of its plain command.

    `result` is the exit code that it reported itself (0, or the install command's), None when it
    never came to report: it crashed, was killed or passed its deadline. `fault` is its own or
    our account of that. `command_exit` is the exit code of the install command if that is known
    to have ended, whatever became of us afterwards.
    """

    result: int | None = None
    fault: str = ""
    command_exit: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`step`: the part is `done`, its `plain` way comes next, or the start has to `stop` with
    `exit_code`. `reason` is why it fell back; empty: it did not."""

    step: Literal["done", "plain", "stop"]
    reason: str = ""
    exit_code: int = 0


def after_part(plan: PartPlan, outcome: Outcome) -> Decision:
    """Decide after a part's own process.

    An install command that failed stops the start with its exit code, as `INSTALL && JOB` does.
    A fault of ours goes the plain way, unless the command had already done its work.
    """
    if outcome.result is not None:
        return _by_exit_code(outcome.result, "")
    reason = outcome.fault or "the part ended without a result"
    if outcome.command_exit is not None:
        return _by_exit_code(outcome.command_exit, reason)
    return Decision("plain" if plan.plain else "done", reason)


def after_plain(outcome: Outcome) -> Decision:
    """Decide after the plain command; there is nothing further to fall back to."""
    return _by_exit_code(outcome.result if outcome.result is not None else 1, outcome.fault)


def _by_exit_code(exit_code: int, reason: str) -> Decision:
    if exit_code == 0:
        return Decision("done", reason)
    return Decision("stop", reason, exit_code)


def exit_code_of(wait_status: int) -> int:
    """A process's exit code as a shell gives it (128 + signal); `wait_status` as of waitpid."""
    code = _exit_or_signal(wait_status)
    return code if code >= 0 else 128 - code


def describe_end(wait_status: int) -> str:
    """How a process ended, in words."""
    code = _exit_or_signal(wait_status)
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"


def _exit_or_signal(wait_status: int) -> int:
    if wait_status & 0x7F:
        return -(wait_status & 0x7F)
    return wait_status >> 8
