"""`deps run`: restore what an install would make, or run it once and publish what it made.

Whatever goes wrong on our side, the install command runs plainly and its exit code is ours. The
order: lock the target, finish what a killed restore left, compute the key, restore when it is
known, else take the lease, or wait for its holder as the policy says, or install plainly.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap import install_process, lock_match, run_plan
from bootseer.depsnap import target_note as targets
from bootseer.depsnap.restore import staging
from bootseer.depsnap.settings import DAY_S, DepsSettings
from bootseer.depsnap.store import records
from bootseer.depsnap.time_limit import within
from bootseer.depsnap.types import absolute
from bootseer.depsnap.wait_policy import keep_waiting, poll_s
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    describe,
)
from bootseer.events.writer import NullWriter
from bootseer.storage.open import open_store
from bootseer.storage.store import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, TypeVar

    from bootseer.depsnap.capture import exclusions
    from bootseer.depsnap.store import publisher
    from bootseer.storage.lease import Lease, Watch

    T = TypeVar("T")
else:
    Protocol = object

_CLOCK_STEP_NS = 20 * 10**6  # file times are behind by up to a tick of the kernel's
_LEAST_S = 0.5
"""What a question to the store has, however long those before it took."""
PHASE = "deps.install"
INSIDE = "BOOTSEER_DEPS_INSIDE"
PATIENT_RESOLVE_S = 60.0
"""How long a publication, which keeps nobody waiting, asks the index."""


class Progress(Protocol):
    """Told when the install command itself runs, whose time is not ours."""

    def command_began(self) -> None:
        """The command is about to run."""

    def command_ended(self, exit_code: int) -> None:
        """It ended."""


class _NoProgress:
    def command_began(self) -> None:
        """Nobody listens."""

    def command_ended(self, exit_code: int) -> None:
        """Nobody listens."""


class _Begin:
    """Passes on that a command began; it ends when what follows has ended."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def command_began(self) -> None:
        """The install within the command runs."""
        self._progress.command_began()

    def command_ended(self, exit_code: int) -> None:
        """Only a part has ended."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a run did. `result` is restored, in place, installed or published; `reasons` say
    why the plain way was taken or why nothing was published, `notes` what else a user should
    know: that newer packages may be out, or why there was no snapshot. `follows` is the user's
    own command where only a part of it was an install: `follow` runs it."""

    result: str = "installed"
    code: int = 0
    key: str = ""
    reasons: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    details: dict[str, object] = dataclasses.field(default_factory=dict)
    follows: Sequence[str] = ()


@dataclasses.dataclass(slots=True)
class _Plan:
    """What is known when the install command has to run."""

    prepared: run_plan.Prepared | None = None
    store: Store | None = None
    lease: Lease | None = None
    supersedes: int | None = None


def run(
    settings: DepsSettings,
    command: Sequence[str],
    writer: NullWriter,
    progress: Progress | None = None,
) -> int:
    """Bring about what `command` would; return 0 or its own exit code.

    128+N after a signal that ended us. Raises nothing of ours.
    """
    return follow(settings, execute(settings, command, writer, progress), progress)


def follow(settings: DepsSettings, outcome: Outcome, progress: Progress | None = None) -> int:
    """Run what is left of the user's command, under no lock and no lease; return the exit code.

    Nothing runs after a signal. An install that failed says so itself in the command.
    """
    if not outcome.follows or outcome.code > 128:
        return outcome.code
    told = progress or _NoProgress()
    told.command_began()
    code = install_process.run(outcome.follows, settings.environ)
    told.command_ended(code)
    return code


def execute(
    settings: DepsSettings,
    command: Sequence[str],
    writer: NullWriter,
    progress: Progress | None = None,
) -> Outcome:
    """As `run`, with all that happened, and without what `follow` does."""
    from bootseer.depsnap.key import uv_run

    sync = uv_run.sync_of(command, settings.environ, settings.cwd)
    told = progress or _NoProgress()
    begun = _Run(settings, sync or command, writer, _Begin(told) if sync else told)
    begun.outcome.follows = command if sync else ()
    span = writer.begin(PHASE, {"bootseer.source": "deps"})
    begun.span = span
    outcome = begun.outcome
    try:
        with install_process.ending_signals():
            begun.go()
    except install_process.TerminatedError as error:
        outcome.code = 128 + error.number
        outcome.result = "ended by a signal"
    finally:
        attributes: dict[str, object] = {"bootseer.deps.result": outcome.result, **outcome.details}
        if outcome.reasons:
            attributes["bootseer.reason"] = "; ".join(outcome.reasons)
        if outcome.notes:
            attributes["bootseer.deps.notes"] = "; ".join(outcome.notes)
        if outcome.code:
            attributes["process.exit.code"] = outcome.code
        status = "error" if outcome.code else "fallback" if outcome.reasons else "ok"
        writer.end(span, PHASE, status, attributes)
    return outcome


class _Run:
    """One run's state; `go` is its whole course."""

    def __init__(
        self,
        settings: DepsSettings,
        command: Sequence[str],
        writer: NullWriter,
        progress: Progress,
    ) -> None:
        self.settings = settings
        self.command = command
        self.writer = writer
        self.progress = progress
        self.outcome = Outcome()
        self.span = ""
        self._seen: tuple[list[int], set[int]] = ([], set())
        self._nearest: records.Record | None = None
        self._asked_s = 0.0
        self._links, self._may_link = False, True
        self._ended_by: list[int] = []

    def go(self) -> None:
        with contextlib.ExitStack() as held:
            plan = _Plan()
            held.callback(lambda: plan.lease.close() if plan.lease else None)
            try:
                if self._prepare(plan, held) and self._finish(plan):
                    return
            except Exception as error:
                # The border: no fault of ours, of whatever kind, may keep the install from running.
                self._fault(error)
                if self.outcome.follows:
                    return  # what follows installs for itself
            if not self.outcome.follows or plan.prepared is not None:
                self._install(plan)

    # --- before the install -------------------------------------------------------------------

    def _prepare(self, plan: _Plan, held: contextlib.ExitStack) -> bool:
        """True when the target is ready; else the plan says how to install."""
        settings = self.settings
        if settings.environ.get(INSIDE):
            return False  # an install within an install: the outer one captures all
        run_plan.read_tree_ahead(settings)
        found = run_plan.find_target(settings, self.command, though_late=True)
        if not found.roots:
            return False  # it makes directories alone
        held.enter_context(
            targets.locked(settings.cache, found.paths, limit_s=self._lock_limit_s())
        )
        for root in found.paths:
            _recover(root)
        if found.late:
            raise DeadlineError(found.late)
        resolution = run_plan.resolution_of(settings, found)
        held.callback(resolution.close)
        with self._part(f"{PHASE}.key"):
            prepared = run_plan.prepare(settings, self.command, found, resolution)
            if not prepared.in_place and run_plan.make_way(settings, found):
                prepared = run_plan.prepare(settings, self.command, found, resolution)
        self._plan_with(plan, prepared)
        settings.on_step("key")
        if prepared.in_place:
            self.outcome.result = "in place"
            self._say_unresolved(prepared)
            return True
        begun_s = time.monotonic()
        plan.store = run_plan.reachable_store(settings)
        self._asked_s = time.monotonic() - begun_s
        if prepared.damaged is not None:
            if self._try_restore(plan.store, prepared)[0]:
                self._say_unresolved(prepared)
                return True
            prepared = run_plan.on_what_stands(settings, prepared)
            self._plan_with(plan, prepared)
        if self._restore_or_lease(plan, prepared, plan.store):
            self._say_unresolved(prepared)
            return True
        self._say_what_differs(prepared, plan.store)
        return False

    def _plan_with(self, plan: _Plan, prepared: run_plan.Prepared) -> None:
        plan.prepared = prepared
        self.outcome.key = prepared.key.digest
        self.outcome.details["bootseer.deps.key"] = prepared.key.digest

    def _finish(self, plan: _Plan) -> bool:
        """After a restore: what of the command is not files in its roots."""
        assert plan.prepared is not None
        for folder in plan.prepared.target.folders:
            os.makedirs(folder, exist_ok=True)
        return True

    def _say_unresolved(self, prepared: run_plan.Prepared) -> None:
        judge = prepared.judge
        if judge.unresolved:
            self.outcome.details["bootseer.deps.lock"] = "unresolved"
            self.outcome.notes.append(
                f"the newest snapshot of these requirements serves, for up to "
                f"{judge.max_age_s / DAY_S:g} days; whether newer packages are out is not known: "
                f"{judge.unresolved}"
            )

    def _say_what_differs(self, prepared: run_plan.Prepared, store: Store) -> None:
        """Beside a near snapshot: why it is not this one."""
        if self._links:
            return  # it is, and could be had faster
        if self._nearest is not None:
            self.outcome.notes.append(prepared.judge.differs_from(self._nearest))
            return
        if self._seen[0] or self.outcome.reasons:
            return  # the inputs were met; what was found could not be used, as the reasons say
        latest = self._asked(store, lambda: records.latest(store, prepared.key.label))
        if latest is not None and latest[0] != prepared.key.digest:
            from bootseer.depsnap.store import publisher

            now = publisher.inputs_of(prepared.key)
            self.outcome.notes.append(lock_match.inputs_differ(latest[1], now))

    def _lock_limit_s(self) -> float:
        return 0.0 if self.settings.wait == "never" else self.settings.wait_limit_s

    def _restore_or_lease(self, plan: _Plan, prepared: run_plan.Prepared, store: Store) -> bool:
        """Go round until restored (True), the lease is ours, or waiting is over (False)."""
        settings = self.settings
        begun, waits = time.monotonic(), False
        restored, plan.supersedes = self._try_restore(store, prepared)
        if restored or self._links:
            return restored
        from bootseer.storage.lease import Watch  # a start that restores at once never pays for it

        watch = Watch(store, _lease_folder(prepared), ttl_s=settings.lease_ttl_s)
        past = self._asked(store, lambda: records.times(store, prepared.key.workload))
        with contextlib.ExitStack() as waiting:
            while True:
                if self._take_lease(plan, prepared, store, watch):
                    return False
                held_s = self._asked(store, lambda: _held_s(watch))
                if held_s is not None:  # else it became free, or was published, while we looked
                    waited_s = time.monotonic() - begun
                    policy, limit_s = settings.wait, settings.wait_limit_s
                    if not keep_waiting(policy, past, held_s, waited_s, limit_s):
                        if policy == "always":
                            raise DeadlineError(f"waited {waited_s:.0f} s for another node in vain")
                        return False
                    if not waits:
                        waits = True
                        waiting.enter_context(self._part(f"{PHASE}.wait", waits=True))
                        settings.on_step("wait")
                    time.sleep(poll_s(waited_s))
                    self._asked_s = 0.0
                restored, plan.supersedes = self._try_restore(store, prepared)
                if restored or self._links:
                    return restored

    def _take_lease(
        self, plan: _Plan, prepared: run_plan.Prepared, store: Store, watch: Watch
    ) -> bool:
        """Whether the lease is ours and still nobody has published since we looked."""
        settings, key = self.settings, prepared.key.digest
        from bootseer.storage.lease import try_acquire

        lock, given_up = threading.Lock(), False

        def acquire() -> None:
            lease = try_acquire(
                store,
                _lease_folder(prepared),
                watch,
                beat_s=settings.lease_beat_s,
                ttl_s=settings.lease_ttl_s,
            )
            with lock:
                if not given_up:
                    plan.lease = lease
                elif lease is not None:
                    lease.close()

        try:
            self._asked(store, acquire)
        except DeadlineError:
            with lock:
                given_up = True
            if plan.lease is None:
                raise
        if plan.lease is None:
            return False
        if self._asked(store, lambda: records.generations(store, key)) == self._seen:
            settings.on_step("lease")
            return True
        plan.lease.close()
        plan.lease = None
        return False

    def _try_restore(self, store: Store, prepared: run_plan.Prepared) -> tuple[bool, int | None]:
        """Whether a fitting snapshot now stands in place, and a generation found too old."""
        key = prepared.key.digest
        self._seen = self._asked(store, lambda: records.generations(store, key))
        self._nearest = None
        sign_key = records.read_sign_key(self.settings.sign_key)
        supersedes = None

        def pass_over(error: records.BadRecordError) -> None:
            if error.unsigned:
                self._fault(error)
            else:
                self._condemn(store, key, error.generation, error)

        usable = records.usable(store, key, sign_key, self._seen, pass_over)
        while (found := self._asked(store, lambda: next(usable, None))) is not None:
            if prepared.damaged and not _is_same(prepared.damaged, found.record):
                continue  # put over what stands, it would leave both there
            if self._would_link(prepared, found.record):
                self._links = True
                self.outcome.details["bootseer.deps.why"] = "uv links them from its own cache"
                return False, None
            if self._place(store, prepared, found):
                return True, None
            if self._nearest is None and found.generation not in self._seen[1]:
                self._nearest = found.record
                unknown = prepared.judge.resolution.lock() is None
                supersedes = found.generation if unknown else None
        return False, supersedes

    def _would_link(self, prepared: run_plan.Prepared, record: records.Record) -> bool:
        """Whether the command by itself is faster than unpacking this snapshot would be."""
        settings, paths = self.settings, prepared.target.paths
        if not self._may_link or settings.form != "auto" or settings.share_trees:
            return False
        if prepared.damaged:
            return False
        if len(paths) != 1 or os.path.basename(self.command[0]) != "uv":
            return False
        if not prepared.key.owns(record.packages) or not os.path.isdir(paths[0]):
            return False  # what another release would be published anew of, or is made by uv
        from bootseer.depsnap import uv_cache  # for uv alone, and where nothing is shared

        return uv_cache.would_link(
            self.command, settings.environ, settings.cwd, paths[0], record.packages
        )

    def _asked(self, store: Store, action: Callable[[], T]) -> T:
        """What the store answers. Raises DeadlineError where it hangs, as it may at any request.

        All questions of a start have the time limit together; each look while it waits for
        another node has it again.
        """
        left_s = max(_LEAST_S, self.settings.store_timeout_s - self._asked_s)
        begun_s = time.monotonic()
        try:
            return within(action, round(left_s, 1), store.url)
        finally:
            self._asked_s += time.monotonic() - begun_s

    def _condemn(self, store: Store, key: str, generation: int, error: BootseerError) -> None:
        """Pass over a bad snapshot, in later starts too where the store can be written."""
        self._fault(error)
        with contextlib.suppress(BootseerError):
            self._asked(store, lambda: records.condemn(store, key, generation, str(error)))
        self._seen = self._asked(store, lambda: records.generations(store, key))

    def _place(self, store: Store, prepared: run_plan.Prepared, found: records.Found) -> bool:
        """Put one snapshot in place, asking the index meanwhile whether it fits."""
        record = found.record
        packages, created_s = record.packages, record.created_unix_s

        def confirm() -> None:
            if not prepared.judge.accepts(record.lock, packages, created_s):
                raise lock_match.NotFittingError

        if missing := records.absent(record):
            self.outcome.notes.append(f"a snapshot of the same inputs needs {missing}, not here")
            return False
        if not prepared.key.owns(packages):
            prepared.judge.resolution.begin()
        try:
            run_plan.check_belongs(record, prepared.target.paths)
        except CorruptDataError as error:
            self._condemn(store, record.key, found.generation, error)
            return False
        self.settings.on_step("restore")
        try:
            if self._nearest is not None or not prepared.judge.resolution.at_work:
                confirm()  # nothing is unpacked on trust, or at each look while waiting
            with self._part(f"{PHASE}.restore"):
                done = run_plan.place(
                    store, self.settings, record, confirm=confirm, beside_plain=True
                )
        except lock_match.NotFittingError:
            return False
        except (CorruptDataError, NotFoundError) as error:
            if not run_plan.corrupt_in_store(store, record, self.settings.cache):
                raise
            self._condemn(store, record.key, found.generation, error)
            return False
        self.outcome.result = "restored"
        self.outcome.details |= {
            "bootseer.deps.form": done.form,
            "bootseer.deps.why": done.why,
            "bootseer.bytes": done.raw_bytes,
        }
        run_plan.note_in_place(self.settings, prepared, created_s, record.lock, packages)
        return True

    # --- the install and after ----------------------------------------------------------------

    def _install(self, plan: _Plan) -> None:
        settings = self.settings
        from bootseer.depsnap.capture import exclusions  # a start that restores never pays for it

        trees, exclude = None, []
        if plan.lease is not None and plan.prepared is not None:
            try:
                exclude = run_plan.excludes(settings, plan.prepared.target)
                with self._part(f"{PHASE}.scan"):
                    trees = exclusions.before(plan.prepared.target.paths, exclude)
                settings.on_step("scanned before")
            except Exception as error:
                # The border: without a scan there is nothing to publish, but the job starts.
                self._fault(error)
        begun_ns = time.time_ns()
        code, install_s = self._command()
        self.outcome.code = code
        if code != 0:
            if self._links:
                self._restore_instead(plan, begun_ns)
            return
        ended_s = time.time()
        try:
            if plan.prepared is not None:
                plan.prepared.judge.resolution.settle()
                if not self._note_now(plan.prepared, ended_s):
                    return
        except Exception as error:
            # The border: without a note the next start looks again; this one has what it needs.
            self._fault(error)
        if trees is None or plan.lease is None:
            return
        try:
            with self._part(f"{PHASE}.scan"):
                captured = exclusions.after(trees, exclude)
            settings.on_step("scanned after")
            if not captured.empty:
                self._publish(plan, captured, install_s, ended_s)
        except Exception as error:
            # The border: the install was good; a fault in keeping it must not fail the job.
            self._fault(error)

    def _restore_instead(self, plan: _Plan, begun_ns: int) -> None:
        """Where the command was to link what it has, but failed and left all as it was."""
        assert plan.store is not None
        assert plan.prepared is not None
        code, (root,) = self.outcome.code, plan.prepared.target.paths
        del self.outcome.details["bootseer.deps.why"]
        try:
            if code > 128 or self._ended_by or _has_changed(root, begun_ns):
                return
            self._links, self._may_link, self._asked_s = False, False, 0.0
            if self._try_restore(plan.store, plan.prepared)[0] and self._finish(plan):
                self.outcome.code = 0
                self.outcome.notes.append(
                    f"the command ended with exit code {code} and left the environment as it was; "
                    "the snapshot of the same inputs was restored"
                )
                self._say_unresolved(plan.prepared)
        except Exception as error:
            # The border: the command has failed by itself, and so does the start.
            self._fault(error)

    def _note_now(self, prepared: run_plan.Prepared, ended_s: float) -> bool:
        """Remember what the command has just left; nothing of it waits for the index.

        False where it went by something that we do not know of, and installed elsewhere.
        """
        if run_plan.has_new_lock(self.settings, prepared):
            self.outcome.notes.append(
                "no snapshot kept: the install made uv.lock anew; keep that file, or use --frozen"
            )
            return False
        packages = run_plan.brought(prepared)
        if not packages and not run_plan.stands(prepared, self.settings.environ):
            self.outcome.notes.append(
                "no snapshot kept: a setting led the install elsewhere than its words say; name "
                "its directories with --also"
            )
            return False
        known = prepared.key.owns(packages) or prepared.judge.resolution.ended
        lock = prepared.judge.lock_of(packages) if known else ""
        run_plan.note_in_place(self.settings, prepared, ended_s, lock, packages)
        return True

    def _command(self) -> tuple[int, float]:
        from bootseer.depsnap import pip_phases

        environ = {**self.settings.environ, INSIDE: "1"}
        begun = time.monotonic()
        self.progress.command_began()
        with pip_phases.watching(self.command, environ, self.writer, self.span):
            code = install_process.run(self.command, environ, self._ended_by)
        self.progress.command_ended(code)
        self.settings.on_step("installed")
        return code, time.monotonic() - begun

    def _publish(
        self, plan: _Plan, captured: exclusions.Captured, install_s: float, ended_s: float
    ) -> None:
        from bootseer.depsnap.store import detached_publish, publisher

        assert plan.prepared is not None
        assert plan.store is not None
        assert plan.lease is not None
        lease, store, prepared = plan.lease, plan.store, plan.prepared
        self._asked_s = 0.0
        self._asked(store, lambda: records.generations(store, prepared.key.digest))  # it may hang
        packages = run_plan.brought(prepared)
        # hdfs-native's threads are gone in a forked child, and it cannot make new ones there.
        forkable = not store.url.startswith("hdfs:")
        background_mode = self.settings.publish == "background" and forkable
        cpus = os.cpu_count() or 1
        job = publisher.Publication(
            key=plan.prepared.key,
            command=self.command,
            captured=captured,
            install_s=install_s,
            created_unix_s=ended_s,
            packages=packages,
            lock=lambda: self._lock_to_publish(prepared, packages, background_mode),
            known=self._seen[0],
            supersedes=plan.supersedes,
            sign_key=records.read_sign_key(self.settings.sign_key),
            threads=max(1, cpus // 2) if background_mode else None,
            cache=self.settings.cache,
        )
        if background_mode:
            detached_publish.detach(
                lease,
                lambda: open_store(self.settings.store),
                lambda own: self._pack(own, job, background_mode=True),
            )
            self.outcome.result = "publishing"
        else:
            self._pack(store, job, background_mode=False)
            self.outcome.result = "published"

    def _publish_apart(self, store: Store, job: publisher.Publication) -> int | None:
        """`publish.publish` to a store that may hang, by a process that can be left behind.

        Returns the archive's size, None where another node's came first.
        """
        from dataclasses import replace  # a publication is of these

        from bootseer.depsnap.restore.isolated_work import read_apart
        from bootseer.depsnap.store import publisher

        lock = job.lock()  # asks a resolver, which is none of that process's business
        job = replace(job, lock=lambda: lock)
        plain = open_store(self.settings.store)

        def work() -> bytes:
            record = publisher.publish(plain, job, self.settings.on_step)
            return b"" if record is None else str(record.archive.size).encode()

        limit_s = self.settings.publish_stall_s
        size = read_apart(work, limit_s, store.url, while_at_work=True)
        return int(size) if size else None

    def _lock_to_publish(
        self, prepared: run_plan.Prepared, packages: Mapping[str, str], background_mode: bool
    ) -> str:
        """What the index decides, asked once more where a start had not the time to wait for it."""
        judge, limit_s = prepared.judge, self.settings.resolve_timeout_s
        if background_mode and limit_s > 0:
            limit_s = max(limit_s, PATIENT_RESOLVE_S)
        if judge.resolution.ended or prepared.key.owns(packages):
            return judge.lock_of(packages)
        settings = dataclasses.replace(self.settings, resolve_timeout_s=limit_s)
        resolution = run_plan.resolution_of(settings, prepared.target)
        judge = dataclasses.replace(judge, resolution=resolution)
        # The index may have changed since the install.
        return judge.lock_of(packages) if judge.covers(packages) else ""

    def _pack(self, store: Store, job: publisher.Publication, *, background_mode: bool) -> None:
        from bootseer.depsnap.store import publisher
        from bootseer.depsnap.store.isolated_store import StoreApart

        span = self.writer.begin("deps.publish", {"bootseer.background": background_mode})
        attributes: dict[str, object] = {}
        status = "ok"
        try:
            if isinstance(store, StoreApart):
                size = self._publish_apart(store, job)
            else:
                record = publisher.publish(store, job, self.settings.on_step)
                size = record.archive.size if record is not None else None
            if size is not None:
                attributes["bootseer.bytes"] = size
        except BaseException as error:  # told in the event, whatever it is
            status = "fallback"
            attributes |= {"bootseer.reason": str(error), "error.type": type(error).__name__}
            raise
        finally:
            self.writer.end(span, "deps.publish", status, attributes)

    @contextlib.contextmanager
    def _part(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """A span below the whole one; `waits` marks one spent waiting for others."""
        attributes: dict[str, object] | None = {"bootseer.wait": True} if waits else None
        span = self.writer.begin(name, attributes, self.span)
        status = "error"
        try:
            yield
            status = "ok"
        except lock_match.NotFittingError:
            status, attributes = "ok", {"bootseer.deps.fits": False}
            raise
        finally:
            self.writer.end(span, name, status, attributes, parent=self.span)

    def _fault(self, error: BaseException) -> None:
        text = describe(error)
        if text not in self.outcome.reasons:  # a start that waits looks again and again
            self.outcome.reasons.append(text)


def _recover(root: str) -> None:
    """Finish or undo a killed restore, where there are signs of one."""
    place = absolute(root)
    if any(map(os.path.lexists, (staging.beside(place), staging.inside(place)))):
        from bootseer.depsnap.restore import commit

        commit.recover(root)


def _is_same(standing: targets.Note, record: records.Record) -> bool:
    """Whether a snapshot of the same key is what stands: of what no package tells, by its time."""
    if standing.packages != record.packages:
        return False
    decided = bool(record.packages) or record.lock == records.OWN
    return decided or standing.created_s == record.created_unix_s


def _lease_folder(prepared: run_plan.Prepared) -> str:
    return f"{records.folder(prepared.key.digest)}/lease"


def _has_changed(root: str, since_ns: int) -> bool:
    """Whether anything below `root` changed since then, but for uv's lock, a file of its own.

    By the kernel's change times, which no program sets. What was removed changed its folder.
    """
    from bootseer.depsnap.capture import scan

    tree = scan.scan(root)
    return any(
        entry.ctime_ns >= since_ns - _CLOCK_STEP_NS
        for path, entry in tree.entries.items()
        if path not in ("", ".lock")
    )


def _held_s(watch: Watch) -> float | None:
    """How long the lease has been held; None when it is free."""
    held, free = watch.look()
    if free:
        return None
    return held.held_s if held else 0.0


def repair(settings: DepsSettings, command: Sequence[str]) -> None:
    """Finish or undo what a killed `run` left at the command's target."""
    from bootseer.depsnap.key import uv_run

    command = uv_run.sync_of(command, settings.environ, settings.cwd) or command
    for root in run_plan.find_target(settings, command, though_late=True).paths:
        _recover(root)
