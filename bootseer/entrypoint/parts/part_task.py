"""The progress of one part: its own process, then perhaps repair and the plain command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Literal

from bootseer import events
from bootseer.entrypoint import fallback, job_process, process_groups
from bootseer.entrypoint.fallback import Decision, Outcome
from bootseer.entrypoint.plan import PartPlan

REPAIR_DEADLINE_S = 30.0
LEAVE_S = 5.0
"""Seconds that a part's process may take to end after its last message."""

Stage = Literal["part", "repair", "plain"]
Spawn = Callable[[Mapping[str, object], Mapping[str, str]], process_groups.ProcessGroup]
"""Starts the process of a part: `spawn_part` of `process_groups`, or what does as it does."""


class Task:
    """Moves one part through its stages; `advance` blocks no longer than killing takes."""

    def __init__(
        self,
        plan: PartPlan,
        writer: events.NullWriter,
        environ: Mapping[str, str],
        spawn: Spawn = process_groups.spawn_part,
    ) -> None:
        self.plan, self._spawn = plan, spawn
        self.group: process_groups.ProcessGroup | None = None
        self.deadline: float | None = None
        self._writer = writer
        self._environ = environ
        self._reason = plan.reason
        self._stage: Stage = "part"
        self._span = ""
        self._buffer = b""
        self._allowed_s = self._left_s = plan.deadline_s
        self._result: int | None = None
        self._fault = ""
        self._command_exit: int | None = None
        self._spawn_error: Outcome | None = None
        self._plain_begun_s = 0.0
        if plan.request is None:
            self._begin_plain()
        else:
            self._begin_part("run")

    def descriptors(self) -> list[int]:
        """The descriptors that become readable when `advance` has something to do."""
        if self.group is None or self.group.wait_status is not None:
            return []
        link = self.group.link
        return [fd for fd in (self.group.pidfd, link.fileno() if link else -1) if fd >= 0]

    @property
    def has_brought(self) -> bool:
        """Whether the part has done its work, although its process may yet have to end."""
        return self._stage == "part" and self._result == 0

    def advance(self) -> Decision | None:
        """Handle what has happened; return the last decision if this part is finished."""
        if self._spawn_error is None:
            assert self.group is not None
            self._read_messages()
            is_expired = self.deadline is not None and time.monotonic() >= self.deadline
            if self.group.reap():
                is_expired = False
            elif is_expired and (self._result is not None or self._fault):
                self.group.kill_leader()  # it sent its last message, but does not end
                is_expired = False
            elif is_expired:
                process_groups.end_groups([self.group])
            else:
                return None
            self._read_messages()
            outcome = self._make_outcome(is_expired)
            if outcome.result is None:
                self.group.kill()  # what it left running would disturb the plain way
            self.group.close()
            self.group = None
        else:
            outcome, self._spawn_error = self._spawn_error, None
        return self._begin_next_stage(outcome)

    def forward_signal(self, number: int) -> None:
        """Forward a signal to the part's process group."""
        if self.group is not None:
            self.group.signal(number)

    def abandon(self, exit_code: int) -> None:
        """End the part's span, as the whole start ends."""
        if self._span:
            attributes = {"process.exit.code": exit_code, "error.type": "signal"}
            self._writer.end(self._span, self.plan.phase, "error", attributes)
            self._span = ""

    def close(self) -> None:
        """Leave no process and no descriptor; calling it twice is safe."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def _begin_part(self, action: Literal["run", "repair"]) -> None:
        self._stage = "part" if action == "run" else "repair"
        message = {"part": self.plan.name, "action": action, "request": self.plan.request}
        # What hangs may hang again: a repair never gets more time than the work itself.
        longest_s = self.plan.deadline_s if action == "run" else REPAIR_DEADLINE_S
        self._allowed_s = min(self.plan.deadline_s, longest_s)
        try:
            self.group = self._spawn(message, self._environ)
            self.deadline = time.monotonic() + self._allowed_s
        except OSError as error:
            self._record_spawn_error(f"bootseer's own process cannot be started: {error}")

    def _begin_plain(self) -> None:
        self._stage = "plain"
        self._plain_begun_s = time.monotonic()
        self.deadline = None
        self._result, self._command_exit = None, None
        attributes = {
            "bootseer.command": events.redact(self.plan.plain),
            "bootseer.source": "run",
        }
        self._span = self._writer.begin(self.plan.phase, attributes)
        environ = {
            **self._environ,
            **events.child_environment(self._writer, self._span, self._environ),
        }
        try:
            self.group = process_groups.spawn_plain(self.plan.plain, environ)
        except OSError as error:
            failure = job_process.make_failure(self.plan.plain, error)
            self._record_spawn_error(failure.error, job_process.mirror_result(failure))

    def _record_spawn_error(self, fault: str, exit_code: int | None = None) -> None:
        self._spawn_error = Outcome(result=exit_code, fault=fault)
        self.deadline = 0.0  # so that the loop returns at once

    def _begin_next_stage(self, outcome: Outcome) -> Decision | None:
        if self._stage == "plain":
            return self._finish_plain(outcome)
        if self._stage == "repair":
            if outcome.result is None:
                self._reason += f"; and the repair failed: {outcome.fault}"
            self._begin_plain()
            return None
        decision = fallback.decide_after_part(self.plan, outcome)
        if decision.step != "plain":
            if decision.reason:
                self._report_fallback(decision.reason)
                attributes = {"bootseer.reason": decision.reason}
                self._writer.point(self.plan.phase, "fallback", attributes)
            return decision
        self._reason = decision.reason
        self._report_fallback(decision.reason)
        self._fault, self._buffer = "", b""
        self._begin_part("repair")
        return None

    def _report_fallback(self, reason: str) -> None:
        job_process.say(f"{self.plan.name}: {reason}; going on the plain way")

    def _finish_plain(self, outcome: Outcome) -> Decision:
        decision = fallback.decide_after_plain(outcome)
        if decision.step != "stop" and self.plan.plain:
            from bootseer.entrypoint import plain_times  # a start that goes well never pays for it

            plain_times.note_duration(self.plan.plain, time.monotonic() - self._plain_begun_s)
        attributes: dict[str, object] = {"process.exit.code": outcome.result}
        status = "error" if decision.step == "stop" else "ok"
        if self._reason:
            attributes["bootseer.reason"] = self._reason
            status = "fallback" if status == "ok" else status
        self._writer.end(self._span, self.plan.phase, status, attributes)
        self._span = ""
        return decision

    def _make_outcome(self, is_expired: bool) -> Outcome:
        assert self.group is not None
        status = self.group.wait_status
        assert status is not None
        if self._stage == "plain":
            return Outcome(result=fallback.convert_wait_status(status))
        if is_expired:
            fault = f"not done after its deadline of {self._allowed_s:g} s"
            return Outcome(None, fault, self._command_exit)
        fault = self._fault
        if not fault and self._result is None:
            fault = fallback.describe_end(status)
        return Outcome(self._result, fault, self._command_exit)

    def _read_messages(self) -> None:
        link = self.group.link if self.group is not None else None
        if link is None:
            return
        assert self.group is not None
        try:
            while chunk := link.recv(65536):
                self._buffer += chunk
            self.group.close_link()  # end of file would wake the loop again and again
        except BlockingIOError:
            pass
        except OSError:
            self.group.close_link()  # reset: the process has ended, which `reap` reports
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._handle_message(json.loads(line))

    def _handle_message(self, message: Mapping[str, object]) -> None:
        match message:
            case {"began": True} if self.deadline is not None:
                self._left_s = self.deadline - time.monotonic()
                self.deadline = None
            case {"ended": int(code)}:
                self._command_exit = code
                if self.deadline is None:
                    self.deadline = time.monotonic() + self._left_s
            case {"result": int(code)}:
                self._result = code
                self.deadline = time.monotonic() + LEAVE_S
            case {"fault": str(text)}:
                self._fault = " ".join(text.split())
                self.deadline = time.monotonic() + LEAVE_S
