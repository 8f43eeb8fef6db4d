"""What `start` will do, decided from the settings alone: no process, no file, no clock.

Terms: a *part* makes one input of the job ready in a better way than the plain one (`all_parts` has
them all). Its *plain way* is the command that a job without bootseer would run, possibly none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from bootseer.config.loading import Loaded, Problem
from bootseer.config.sections import Config
from bootseer.light_dataclasses import dataclass, field

Request = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan for one part: its request, and its plain way.

    `request` (plain JSON values) goes to the part's own process. If it is None, the part is not
    tried, and `reason` says why ("" if the settings ask for that). `plain` is the plain way, empty
    if there is none. `deadline_s` bounds our own work. `after` names the parts to be done first.
    A part with a `detached_module` is started and not waited for: it has no plain way and no
    deadline, and is run as `run(request, event writer, the job's process id)` of that module.
    """

    name: str
    phase: str
    request: Request | None
    plain: tuple[str, ...] = ()
    reason: str = ""
    deadline_s: float = 600.0
    after: tuple[str, ...] = ()
    detached_module: str = ""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The plan of a whole start.

    `wrapper_options` are those of `bootseer run` if the job is to run under it. None: the job
    replaces this process. `environment` is added to that of the job and the parts.
    """

    parts: tuple[PartPlan, ...]
    job: tuple[str, ...]
    wrapper_options: tuple[str, ...] | None
    import_times: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class Plannable(Protocol):
    """The pure half of a part (see `part.Part`)."""

    @property
    def name(self) -> str: ...

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        """Return the plan for this part, None if the settings ask for nothing.

        `problem` says that settings of this part could not be read, "" if all could: with a problem
        the part must not be tried, because it might not do what was meant.
        """


def plan_start(loaded: Loaded, job: Sequence[str], parts: Sequence[Plannable]) -> StartPlan:
    """Plan the whole start. A part with a fault in its settings goes the plain way."""
    planned = []
    for part in parts:
        problem = _find_problem(part.name, loaded.problems)
        part_plan = part.plan(loaded.config, problem)
        if part_plan is not None:
            planned.append(part_plan)
    return StartPlan(
        parts=_sort_by_dependencies(planned),
        job=tuple(job),
        wrapper_options=_build_wrapper_options(loaded.config),
        import_times=loaded.config.job.import_times,
        environment=_build_environment(loaded.config),
        problems=loaded.problems,
    )


def format_warning(problems: Sequence[Problem]) -> str:
    """One line for all problems of the configuration."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0].message}{more}"


def _find_problem(section: str, problems: Sequence[Problem]) -> str:
    for problem in problems:
        if problem.section in ("", section):
            return problem.message
    return ""


def _build_wrapper_options(config: Config) -> tuple[str, ...] | None:
    options: list[str] = []
    if config.job.phase:
        options += ["--phase", config.job.phase]
    for rules in config.job.log_rules:
        options += ["--log-rules", rules]
    if options and config.job.import_times:
        options.append("--import-times")
    return tuple(options) if options else None


def _build_environment(config: Config) -> dict[str, str]:
    """The variables with which all processes of the start write the same trace id and attempt."""
    environment = {}
    if config.job.uid:
        environment["BOOTSEER_JOB_UID"] = config.job.uid
    if config.job.attempt:
        environment["BOOTSEER_ATTEMPT"] = str(config.job.attempt)
    return environment


def _sort_by_dependencies(parts: Sequence[PartPlan]) -> tuple[PartPlan, ...]:
    """Sort parts behind those that they wait for; raises ValueError for a circle."""
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
