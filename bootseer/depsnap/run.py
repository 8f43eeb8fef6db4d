"""`deps run`: restore the result of an install, or run the install once and publish its result.

Whatever fails on our side, the install command runs plainly and its exit code is ours. The order:
lock the target, finish what a killed restore left, compute the key, restore when it is known, else
take the lease, or wait for its holder as the policy says, or install plainly.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from bootseer.depsnap import install_process, placement, run_plan, target_note
from bootseer.depsnap.restore import staging
from bootseer.depsnap.run_plan import Prepared
from bootseer.depsnap.run_report import BeginOnly, NoProgress, Outcome, Progress, RunReport
from bootseer.depsnap.settings import DAY_S, DepsSettings
from bootseer.depsnap.snapshot_search import SnapshotSearch
from bootseer.depsnap.types import absolute
from bootseer.errors import DeadlineError
from bootseer.events.writer import NullWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.capture.changes import Scans

_INSIDE = "BOOTSEER_DEPS_INSIDE"
"""Set for the install command, so that an install within it is not one of its own."""
_CLOCK_STEP_NS = 20 * 10**6
"""File times are behind by up to a tick of the kernel's clock."""


def execute(
    settings: DepsSettings,
    command: Sequence[str],
    writer: NullWriter,
    progress: Progress | None = None,
) -> Outcome:
    """Bring about what `command` would, up to what `follow` does. Raises nothing of ours.

    The outcome's code is 0, the command's own exit code, or 128+N after a signal that ended us.
    """
    sync = _sync_within(settings, command)
    progress = progress or NoProgress()
    report = RunReport(writer)
    outcome = report.outcome
    outcome.follows = command if sync else ()
    run = _Run(settings, sync or command, report, BeginOnly(progress) if sync else progress)
    report.begin()
    try:
        with install_process.ending_signals():
            run.go()
    except install_process.TerminatedError as error:
        outcome.code = 128 + error.number
        outcome.result = "ended by a signal"
    finally:
        report.end()
    return outcome


def follow(settings: DepsSettings, outcome: Outcome, progress: Progress | None = None) -> int:
    """Run what is left of the user's command, under no lock and no lease; return the exit code.

    Nothing runs after a signal. An install that failed reports that itself when it runs again in
    the command.
    """
    if not outcome.follows or outcome.code > 128:
        return outcome.code
    progress = progress or NoProgress()
    progress.command_began()
    code = install_process.run(outcome.follows, settings.environ)
    progress.command_ended(code)
    return code


def repair(settings: DepsSettings, command: Sequence[str]) -> None:
    """Finish or undo what a killed run left at the command's target."""
    command = _sync_within(settings, command) or command
    for root in run_plan.find_target(settings, command, even_late=True).paths:
        _recover(root)


def is_in_place(settings: DepsSettings, command: Sequence[str]) -> bool:
    """Whether a run would find its result in place, on this node as it is.

    Raises UsageError for a command that installs nothing to be kept, DeadlineError where its
    interpreter does not answer, NotFoundError for a missing key file.
    """
    command = _sync_within(settings, command) or command
    target = run_plan.find_target(settings, command)
    if not target.roots:
        return True
    with contextlib.closing(run_plan.new_resolution(settings, target)) as resolution:
        return run_plan.prepare(settings, command, target, resolution).in_place


def _sync_within(settings: DepsSettings, command: Sequence[str]) -> list[str] | None:
    """The `uv sync` that a `uv run` begins with."""
    if not command or os.path.basename(command[0]) != "uv":
        return None
    from bootseer.depsnap.key import uv_run  # for uv alone

    return uv_run.sync_of(command, settings.environ, settings.cwd)


class _Run:
    """The state of one run; `go` is its whole course."""

    def __init__(
        self,
        settings: DepsSettings,
        command: Sequence[str],
        report: RunReport,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._command = command
        self._report = report
        self._outcome = report.outcome
        self._progress = progress
        self._search = SnapshotSearch(settings, command, report)
        self._prepared: Prepared | None = None
        self._ended_by: list[int] = []

    def go(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._search.close)
            try:
                if self._restore(stack):
                    self._make_folders()
                    return
            except Exception as error:
                # The border: no fault of ours, of whatever kind, may keep the install from running.
                self._report.add_fault(error)
                if self._outcome.follows:
                    return  # what follows installs for itself
            if not self._outcome.follows or self._prepared is not None:
                self._install()

    # --- before the install -------------------------------------------------------------------

    def _restore(self, stack: contextlib.ExitStack) -> bool:
        """Whether the target is ready; else the command is to install, under a lease if we have it.

        What is to be undone at the end of the run is pushed on `stack`.
        """
        settings = self._settings
        if settings.environ.get(_INSIDE):
            return False  # an install within an install: the outer one captures all
        placement.read_tree_ahead(settings)
        target = run_plan.find_target(settings, self._command, even_late=True)
        if not target.roots:
            return False  # it only makes directories
        limit_s = 0.0 if settings.wait == "never" else settings.wait_limit_s
        stack.enter_context(target_note.acquire_lock(settings.cache, target.paths, limit_s=limit_s))
        for root in target.paths:
            _recover(root)
        if target.late:
            raise DeadlineError(target.late)
        resolution = run_plan.new_resolution(settings, target)
        stack.callback(resolution.close)
        with self._report.part("key"):
            prepared = run_plan.prepare(settings, self._command, target, resolution)
            if not prepared.in_place and placement.remove_read_only_placements(settings, target):
                prepared = run_plan.prepare(settings, self._command, target, resolution)
        self._use(prepared)
        settings.on_step("key")
        if prepared.in_place:
            self._outcome.result = "in place"
            self._note_unresolved(prepared)
            return True
        self._search.connect()
        if prepared.damaged is not None:
            if self._search.restore(prepared):
                self._note_unresolved(prepared)
                return True
            prepared = run_plan.prepare_on_present(settings, prepared)
            self._use(prepared)
        if self._search.restore_or_lease(prepared):
            self._note_unresolved(prepared)
            return True
        self._search.explain_miss(prepared)
        return False

    def _use(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._outcome.key = prepared.key.digest
        self._outcome.details["bootseer.deps.key"] = prepared.key.digest

    def _make_folders(self) -> None:
        """After a restore, make the directories that the command makes outside of its roots."""
        assert self._prepared is not None
        for folder in self._prepared.target.folders:
            os.makedirs(folder, exist_ok=True)

    def _note_unresolved(self, prepared: Prepared) -> None:
        matcher = prepared.matcher
        if matcher.unresolved:
            self._outcome.details["bootseer.deps.lock"] = "unresolved"
            self._outcome.notes.append(
                f"the newest snapshot of these requirements serves, for up to "
                f"{matcher.max_age_s / DAY_S:g} days; whether newer packages are out is not known: "
                f"{matcher.unresolved}"
            )

    # --- the install and after ----------------------------------------------------------------

    def _install(self) -> None:
        prepared = self._prepared
        scans = self._scan(prepared) if prepared and self._search.lease else None
        begun_ns = time.time_ns()
        code, install_s = self._run_command()
        self._outcome.code = code
        if code != 0:
            if self._search.links and prepared is not None:
                self._restore_after_failed_link(prepared, begun_ns)
            return
        ended_s = time.time()
        try:
            if prepared is not None:
                prepared.matcher.resolution.settle()
                if not self._note_install(prepared, ended_s):
                    return
        except Exception as error:
            # The border: without a note the next start looks again; this one has what it needs.
            self._report.add_fault(error)
        if scans is not None and prepared is not None:
            self._capture(prepared, scans, install_s, ended_s)

    def _scan(self, prepared: Prepared) -> Scans | None:
        """What the target holds before the install; None where it cannot be scanned."""
        try:
            from bootseer.depsnap.capture import changes  # a start that restores never pays for it

            exclude = run_plan.list_exclusions(self._settings, prepared.target)
            with self._report.part("scan"):
                scans = changes.scan_roots(prepared.target.paths, exclude)
            self._settings.on_step("scanned before")
        except Exception as error:
            # The border: without a scan there is nothing to publish, but the job starts.
            self._report.add_fault(error)
            return None
        return scans

    def _capture(self, prepared: Prepared, scans: Scans, install_s: float, ended_s: float) -> None:
        """Find what the install changed, and publish it."""
        try:
            from bootseer.depsnap import publication
            from bootseer.depsnap.capture import changes

            with self._report.part("scan"):
                changed = changes.find_changes(scans)
            self._settings.on_step("scanned after")
            if not changed.empty:
                publication.publish_install(self._search, prepared, changed, install_s, ended_s)
        except Exception as error:
            # The border: the install was good; a fault in keeping it must not fail the job.
            self._report.add_fault(error)

    def _restore_after_failed_link(self, prepared: Prepared, begun_ns: int) -> None:
        """Restore where the command was to link its packages, but failed and changed nothing."""
        code, (root,) = self._outcome.code, prepared.target.paths
        del self._outcome.details["bootseer.deps.why"]
        try:
            if code > 128 or self._ended_by or _has_changed(root, begun_ns):
                return
            if self._search.restore_after_failed_link(prepared):
                self._make_folders()
                self._outcome.code = 0
                self._outcome.notes.append(
                    f"the command ended with exit code {code} and left the environment as it was; "
                    "the snapshot of the same inputs was restored"
                )
                self._note_unresolved(prepared)
        except Exception as error:
            # The border: the command has failed by itself, and so does the start.
            self._report.add_fault(error)

    def _note_install(self, prepared: Prepared, ended_s: float) -> bool:
        """Note what the target holds after the install, without waiting for the index.

        False where something that is not known here decided the install, or its place.
        """
        settings, notes = self._settings, self._outcome.notes
        if run_plan.has_new_lock(settings, prepared):
            notes.append(
                "no snapshot kept: the install made uv.lock anew; keep that file, or use --frozen"
            )
            return False
        packages = run_plan.added_packages(prepared)
        if not packages and not run_plan.has_wanted_packages(prepared, settings.environ):
            notes.append(
                "no snapshot kept: a setting led the install elsewhere than its words say; name "
                "its directories with --also"
            )
            return False
        known = prepared.key.is_lock_of(packages) or prepared.matcher.resolution.ended
        lock = prepared.matcher.lock_for(packages) if known else ""
        run_plan.write_note(settings, prepared, ended_s, lock, packages)
        return True

    def _run_command(self) -> tuple[int, float]:
        """The exit code of the command, and how long it ran."""
        from bootseer.depsnap import pip_phases  # a start that restores never pays for it

        report, environ = self._report, {**self._settings.environ, _INSIDE: "1"}
        begun = time.monotonic()
        self._progress.command_began()
        with pip_phases.record_phases(self._command, environ, report.writer, report.span):
            code = install_process.run(self._command, environ, self._ended_by)
        self._progress.command_ended(code)
        self._settings.on_step("installed")
        return code, time.monotonic() - begun


def _recover(root: str) -> None:
    """Finish or undo a killed restore, where there are signs of one."""
    if staging.is_staged(absolute(root)):
        from bootseer.depsnap.restore import commit  # restores are seldom killed

        commit.recover(root)


def _has_changed(root: str, since_ns: int) -> bool:
    """Whether anything below `root` changed since then, except uv's lock, a file of its own.

    By the kernel's change times, which no program sets; what was removed changed its directory.
    """
    from bootseer.depsnap.capture.scan import scan  # after a failed command alone

    return any(
        entry.ctime_ns >= since_ns - _CLOCK_STEP_NS
        for path, entry in scan(root).entries.items()
        if path not in ("", ".lock")
    )
