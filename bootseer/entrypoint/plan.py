"""What `start` will do, decided from the settings alone: no process, no file, no clock.

Terms: a *part* makes one input of the job ready in a better way than the plain one (`REGISTRY` of
`parts` has them all). Its *plain way* is the command that a job without bootseer would run,
possibly none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bootseer.config.loading import Loaded, Problem
from bootseer.config.sections import Config

Request = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part: what to ask of it and what to do without it.

    `request` (plain JSON values) goes to the part's own process; None: the part is not tried.
    Then `reason` says why, and is empty when that was asked for. `plain` is the plain way, empty
    when there is none. `deadline_s` bounds our own work. `after` names parts to be done first.
    A part that is `beside` is begun and not waited for: it has no plain way and no deadline, and
    the module of that name runs it, by `run(request, event writer, the job's process id)`.
    """

    name: str
    phase: str
    request: Request | None
    plain: tuple[str, ...] = ()
    reason: str = ""
    deadline_s: float = 600.0
    after: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """`wrapper` holds the options for `bootseer run` when the job is to be watched, else None:
    then the job replaces this process. `environment` is added to the job's and the parts'."""

    parts: tuple[PartPlan, ...]
    job: tuple[str, ...]
    wrapper: tuple[str, ...] | None
    import_times: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class Plannable(Protocol):
    """The pure half of a part (see `part.Part`)."""

    @property
    def name(self) -> str: ...

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        """Return what to do, or None when the settings ask for nothing.

        `problem` is not empty when settings of this part could not be read: then the part must
        not be tried, because what it would do may not be what was meant.
        """


def plan(loaded: Loaded, job: Sequence[str], parts: Sequence[Plannable]) -> StartPlan:
    """Decide the whole start. A fault in a part's settings makes that part go the plain way."""
    planned = []
    for part in parts:
        problem = _problem_of(part.name, loaded.problems)
        part_plan = part.plan(loaded.config, problem)
        if part_plan is not None:
            planned.append(part_plan)
    return StartPlan(
        parts=_without_unknown_order(planned),
        job=tuple(job),
        wrapper=_wrapper(loaded.config),
        import_times=loaded.config.job.import_times,
        environment=_environment(loaded.config),
        problems=loaded.problems,
    )


def warning(problems: Sequence[Problem]) -> str:
    """One line about all faults of the configuration."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0].message}{more}"


def _problem_of(section: str, problems: Sequence[Problem]) -> str:
    for problem in problems:
        if problem.section in ("", section):
            return problem.message
    return ""


def _wrapper(config: Config) -> tuple[str, ...] | None:
    options: list[str] = []
    if config.job.phase:
        options += ["--phase", config.job.phase]
    for rules in config.job.log_rules:
        options += ["--log-rules", rules]
    if options and config.job.import_times:
        options.append("--import-times")
    return tuple(options) if options else None


def _environment(config: Config) -> dict[str, str]:
    """What the event writer of every process below must agree on."""
    out = {}
    if config.job.uid:
        out["BOOTSEER_JOB_UID"] = config.job.uid
    if config.job.attempt:
        out["BOOTSEER_ATTEMPT"] = str(config.job.attempt)
    return out


def _without_unknown_order(parts: Sequence[PartPlan]) -> tuple[PartPlan, ...]:
    """Sort parts behind those they wait for; raises ValueError when they wait in a circle."""
    names = {part.name for part in parts}
    done: dict[str, PartPlan] = {}
    waiting = list(parts)
    while waiting:
        ready = [p for p in waiting if all(n in done or n not in names for n in p.after)]
        if not ready:
            raise ValueError("parts wait for each other: " + ", ".join(p.name for p in waiting))
        done.update({part.name: part for part in ready})
        waiting = [part for part in waiting if part.name not in done]
    return tuple(done.values())
