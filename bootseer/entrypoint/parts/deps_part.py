"""The dependencies as a part of a start: a snapshot restored, or installed and a snapshot taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_cache, default_store
from bootseer.config.sections import Config, DepsSettings
from bootseer.entrypoint import job_process
from bootseer.entrypoint.parts.part import Progress, decode_section
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.errors import BusyError
from bootseer.events.writer import NullWriter

if TYPE_CHECKING:
    from bootseer.depsnap import settings

ENDED_BY_SIGNAL = "ended by a signal"
"""The result of `depsnap.run` if a signal ended it early."""


class DepsPart:
    """Restores a snapshot, or runs the command `install`, its plain way, and takes one."""

    name = "deps"
    phase = "deps.install"

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        deps = config.deps
        if not deps.install:
            return None
        if problem or not deps.enabled:
            return PartPlan(self.name, self.phase, None, plain=deps.install, reason=problem)
        # Waiting for another node has a limit of its own if the settings ask for it.
        waiting_s = deps.wait_limit_s if deps.wait == "always" else 0.0
        return PartPlan(
            self.name,
            self.phase,
            dataclasses.asdict(deps),
            plain=deps.install,
            deadline_s=deps.deadline_s + waiting_s,
        )

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        from bootseer.depsnap import run

        deps = decode_section(DepsSettings, request)
        settings = self.build_settings(deps)
        outcome = run.execute(settings, deps.install, writer, progress)
        if outcome.result == ENDED_BY_SIGNAL:
            raise BusyError("the part was told to end by a signal")
        if outcome.reasons:
            job_process.say(f"deps: {'; '.join(outcome.reasons)}")
        for note in outcome.notes:
            job_process.say(f"deps: {note}")
        return run.follow(settings, outcome, progress)

    def repair(self, request: Request) -> None:
        from bootseer.depsnap import run

        deps = decode_section(DepsSettings, request)
        run.repair(self.build_settings(deps), deps.install)

    def build_settings(self, deps: DepsSettings) -> settings.DepsSettings:
        """The settings of `depsnap.run` for the section of a job's settings."""
        from bootseer.depsnap import settings

        return settings.DepsSettings(
            store=deps.store or default_store(),
            cache=os.path.abspath(deps.cache or default_cache()),
            share_trees=bool(deps.cache),
            environ=dict(os.environ),
            cwd=os.getcwd(),
            key_files=deps.key_files,
            key_env=deps.key_env,
            also=deps.also,
            exclude=deps.exclude,
            wait=deps.wait,
            wait_limit_s=deps.wait_limit_s,
            store_timeout_s=deps.store_timeout_s,
            form=deps.form,
            publish=deps.publish,
            max_age_s=deps.max_age_days * settings.DAY_S,
            sign_key=deps.sign_key or None,
            allow_setuid=deps.allow_setuid,
        )
