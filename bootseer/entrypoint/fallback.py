"""What follows the end of a part's process, decided without acting."""

from __future__ import annotations

import signal
from typing import Literal

from bootseer.entrypoint.plan import PartPlan
from bootseer.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a part's process that has ended, or of its plain command.

    `result` is the exit code that it reported itself (0, or the install command's), None if it
    reported none: it crashed, was killed or passed its deadline. `fault` is its own or
    our description of that. `command_exit` is the exit code of the install command if it is known
    to have ended, whatever happened to us afterwards.
    """

    result: int | None = None
    fault: str = ""
    command_exit: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What comes next: the part is `done`, its `plain` way follows, or the start has to `stop`.

    `exit_code` is that of a start that stops. `reason` is why the part fell back, "" if it did not.
    """

    step: Literal["done", "plain", "stop"]
    reason: str = ""
    exit_code: int = 0


def decide_after_part(plan: PartPlan, outcome: Outcome) -> Decision:
    """Decide after a part's own process.

    An install command that failed stops the start with its exit code, as `INSTALL && JOB` does.
    After a fault of ours the plain way follows, unless the command has already done its work.
    """
    if outcome.result is not None:
        return _decide_by_exit_code(outcome.result, "")
    reason = outcome.fault or "the part ended without a result"
    if outcome.command_exit is not None:
        return _decide_by_exit_code(outcome.command_exit, reason)
    return Decision("plain" if plan.plain else "done", reason)


def decide_after_plain(outcome: Outcome) -> Decision:
    """Decide after the plain command, behind which there is no further fallback."""
    return _decide_by_exit_code(outcome.result if outcome.result is not None else 1, outcome.fault)


def _decide_by_exit_code(exit_code: int, reason: str) -> Decision:
    if exit_code == 0:
        return Decision("done", reason)
    return Decision("stop", reason, exit_code)


def convert_wait_status(wait_status: int) -> int:
    """Convert a status of waitpid to an exit code as a shell has it (128 + signal)."""
    code = _decode_wait_status(wait_status)
    return code if code >= 0 else 128 - code


def describe_end(wait_status: int) -> str:
    """Describe how a process ended; `wait_status` as of waitpid."""
    code = _decode_wait_status(wait_status)
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"


def _decode_wait_status(wait_status: int) -> int:
    """The exit code, or minus the number of the signal."""
    if wait_status & 0x7F:
        return -(wait_status & 0x7F)
    return wait_status >> 8
