"""What a run of `deps run` reports: its outcome, its events, and when the command itself runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.lock_match import NotFittingError
from bootseer.errors import describe
from bootseer.events.writer import NullWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

PHASE = "deps.install"


class Progress(Protocol):
    """Is called when the install command itself runs, whose time is not ours."""

    def command_began(self) -> None:
        """The command is about to run."""

    def command_ended(self, exit_code: int) -> None:
        """It ended."""


class NoProgress:
    """A `Progress` for callers that give none."""

    def command_began(self) -> None:
        """Does nothing."""

    def command_ended(self, exit_code: int) -> None:
        """Does nothing."""


class BeginOnly:
    """Passes on that a command began; what follows it reports the end."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def command_began(self) -> None:
        """The install within the command runs."""
        self._progress.command_began()

    def command_ended(self, exit_code: int) -> None:
        """Only a part of the command has ended."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a run did.

    `result` is restored, in place, installed, published or publishing; `reasons` say why the plain
    way was taken or why nothing was published, `notes` what else a user should know: that newer
    packages may be out, or why there was no snapshot. `follows` is the user's own command where
    only a part of it was an install: `run.follow` runs it.
    """

    result: str = "installed"
    code: int = 0
    key: str = ""
    reasons: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    details: dict[str, object] = dataclasses.field(default_factory=dict)
    follows: Sequence[str] = ()


class RunReport:
    """The outcome of a run while it goes on, and its span with those below it."""

    def __init__(self, writer: NullWriter) -> None:
        self.writer = writer
        self.outcome = Outcome()
        self.span = ""

    def begin(self) -> None:
        """Begin the span of the whole run."""
        self.span = self.writer.begin(PHASE, {"bootseer.source": "deps"})

    def end(self) -> None:
        """End the span of the whole run with its outcome."""
        outcome = self.outcome
        attributes: dict[str, object] = {"bootseer.deps.result": outcome.result, **outcome.details}
        if outcome.reasons:
            attributes["bootseer.reason"] = "; ".join(outcome.reasons)
        if outcome.notes:
            attributes["bootseer.deps.notes"] = "; ".join(outcome.notes)
        if outcome.code:
            attributes["process.exit.code"] = outcome.code
        status = "error" if outcome.code else "fallback" if outcome.reasons else "ok"
        self.writer.end(self.span, PHASE, status, attributes)

    @contextlib.contextmanager
    def part(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """A span below the whole one; `waits` marks one spent waiting for other nodes."""
        name = f"{PHASE}.{name}"
        attributes: dict[str, object] | None = {"bootseer.wait": True} if waits else None
        span = self.writer.begin(name, attributes, self.span)
        status = "error"
        try:
            yield
            status = "ok"
        except NotFittingError:
            status, attributes = "ok", {"bootseer.deps.fits": False}
            raise
        finally:
            self.writer.end(span, name, status, attributes, parent=self.span)

    def add_fault(self, error: BaseException) -> None:
        """Report a fault of ours as a reason, once: a start that waits looks again and again."""
        text = describe(error)
        if text not in self.outcome.reasons:
            self.outcome.reasons.append(text)
