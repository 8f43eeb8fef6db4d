"""Find a snapshot in the store that fits, and restore it, or take the lease on making one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from bootseer.depsnap import lock_match, placement, run_plan
from bootseer.depsnap.run_plan import Prepared
from bootseer.depsnap.run_report import RunReport
from bootseer.depsnap.settings import DepsSettings
from bootseer.depsnap.store import record_file, records
from bootseer.depsnap.store.record_file import Record
from bootseer.depsnap.target_note import Note
from bootseer.errors import BootseerError, CorruptDataError, DeadlineError, NotFoundError
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.system.blocking_calls import TimeBudget, call_in_thread, may_hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from bootseer.storage.lease import Lease, Watch

    T = TypeVar("T")

_LEAST_S = 0.5
"""What a question to the store has, however long those before it took."""


class SnapshotSearch:
    """The search of one run, whose questions to the store have one time limit together.

    `lease` is held once `restore_or_lease` has taken it; `supersedes` is the generation, if any,
    that a new snapshot replaces since it is too old. `links`: the snapshot that fits was not
    restored because the command links the same packages faster.
    """

    def __init__(self, settings: DepsSettings, command: Sequence[str], report: RunReport) -> None:
        self.settings = settings
        self.command = command
        self.report = report
        self._budget = TimeBudget(settings.store_timeout_s, _LEAST_S)
        self._store: Store | None = None
        self._listed: tuple[list[int], set[int]] = ([], set())
        self._nearest: Record | None = None
        self._may_link = True
        self.lease: Lease | None = None
        self.supersedes: int | None = None
        self.links = False

    def close(self) -> None:
        """Release the lease."""
        if self.lease is not None:
            self.lease.close()

    @property
    def store(self) -> Store:
        """The store, once `connect` has opened it."""
        assert self._store is not None
        return self._store

    @property
    def known_generations(self) -> list[int]:
        """The generations of the key's records that were listed last."""
        return self._listed[0]

    def connect(self) -> None:
        """Open the store and check that it answers.

        Where its file system may hang, each request is made by a process of its own. Raises
        StoreUnavailableError or another store error, and DeadlineError when it hangs.
        """
        begun_s = time.monotonic()
        store = open_store(self.settings.store)
        root = store.local_path(records.FOLDER)
        if root is not None and may_hang(root):
            from bootseer.depsnap.store.isolated_store import IsolatedStore  # most stores answer

            store = IsolatedStore(os.path.dirname(root), self.settings.store_timeout_s)
        call_in_thread(lambda: _check_answer(store), self.settings.store_timeout_s, store.url)
        self._store = store
        self._budget.charge(time.monotonic() - begun_s)

    def ask(self, question: Callable[[], T]) -> T:
        """What the store answers. Raises DeadlineError where it hangs, as it may at any request."""
        return self._budget.call(question, self.store.url)

    def ask_again(self, question: Callable[[], T]) -> T:
        """As `ask`, with the whole time limit again."""
        self._budget.refill()
        return self.ask(question)

    # --- restore ------------------------------------------------------------------------------

    def restore(self, prepared: Prepared) -> bool:
        """Whether a snapshot that fits was restored."""
        key = prepared.key.digest
        self._listed = self.ask(lambda: records.list_generations(self.store, key))
        self._nearest = self.supersedes = None
        sign_key = record_file.read_sign_key(self.settings.sign_key)

        def skip(error: records.BadRecordError) -> None:
            if error.unsigned:
                self.report.add_fault(error)
            else:
                self._condemn(key, error.generation, error)

        usable = records.find_usable(self.store, key, sign_key, self._listed, skip)
        supersedes = None
        while (published := self.ask(lambda: next(usable, None))) is not None:
            record = published.record
            if prepared.damaged and not _is_same(prepared.damaged, record):
                continue  # restored over what is there, it would leave both there
            if self._would_link(prepared, record):
                self.links = True
                self.report.outcome.details["bootseer.deps.why"] = (
                    "uv links them from its own cache"
                )
                return False
            if self._place(prepared, published):
                return True
            if self._nearest is None and published.generation not in self._listed[1]:
                self._nearest = record
                unknown = prepared.matcher.resolution.lock() is None
                supersedes = published.generation if unknown else None
        self.supersedes = supersedes
        return False

    def restore_after_failed_link(self, prepared: Prepared) -> bool:
        """`restore` after the command that was to link the same packages has failed."""
        self.links, self._may_link = False, False
        self._budget.refill()
        return self.restore(prepared)

    def _would_link(self, prepared: Prepared, record: Record) -> bool:
        """Whether the command by itself is faster than unpacking this snapshot would be."""
        settings, paths = self.settings, prepared.target.paths
        if not self._may_link or settings.form != "auto" or settings.share_trees:
            return False
        if prepared.damaged:
            return False
        if len(paths) != 1 or os.path.basename(self.command[0]) != "uv":
            return False
        if not prepared.key.is_lock_of(record.packages) or not os.path.isdir(paths[0]):
            return False  # the index may decide otherwise, or uv makes the environment
        from bootseer.depsnap import uv_cache  # for uv alone, and where nothing is shared

        return uv_cache.would_link(
            self.command, settings.environ, settings.cwd, paths[0], record.packages
        )

    def _condemn(self, key: str, generation: int, error: BootseerError) -> None:
        """Skip a bad snapshot, in later starts too where the store can be written."""
        self.report.add_fault(error)
        with contextlib.suppress(BootseerError):
            self.ask(lambda: records.condemn(self.store, key, generation, str(error)))
        self._listed = self.ask(lambda: records.list_generations(self.store, key))

    def _place(self, prepared: Prepared, published: records.Published) -> bool:
        """Put one snapshot in place, while the index is asked whether it fits."""
        settings, outcome, record = self.settings, self.report.outcome, published.record
        matcher, packages, created_s = prepared.matcher, record.packages, record.created_unix_s

        def confirm() -> None:
            if not matcher.accepts(record.lock, packages, created_s):
                raise lock_match.NotFittingError

        if missing := record_file.missing_interpreter(record):
            outcome.notes.append(f"a snapshot of the same inputs needs {missing}, not here")
            return False
        if not prepared.key.is_lock_of(packages):
            matcher.resolution.begin()
        try:
            placement.check_roots(record, prepared.target.paths)
        except CorruptDataError as error:
            self._condemn(record.key, published.generation, error)
            return False
        settings.on_step("restore")
        try:
            if self._nearest is not None or not matcher.resolution.running:
                confirm()  # so that nothing is unpacked in vain, as at each look while waiting
            with self.report.part("restore"):
                restored = placement.place(
                    self.store, settings, record, confirm=confirm, impatient=True
                )
        except lock_match.NotFittingError:
            return False
        except (CorruptDataError, NotFoundError) as error:
            if not placement.is_corrupt_in_store(self.store, record, settings.cache):
                raise
            self._condemn(record.key, published.generation, error)
            return False
        outcome.result = "restored"
        outcome.details |= {
            "bootseer.deps.form": restored.form,
            "bootseer.deps.why": restored.why,
            "bootseer.bytes": restored.raw_bytes,
        }
        run_plan.write_note(settings, prepared, created_s, record.lock, packages)
        return True

    # --- the lease ----------------------------------------------------------------------------

    def restore_or_lease(self, prepared: Prepared) -> bool:
        """Look until a snapshot is restored (True), the lease is ours, or waiting ends (False)."""
        settings = self.settings
        begun, waits = time.monotonic(), False
        if self.restore(prepared) or self.links:
            return not self.links
        # A start that restores at once never pays for these.
        from bootseer.depsnap.wait_policy import keep_waiting, poll_s
        from bootseer.storage.lease import Watch

        folder = records.lease_folder(prepared.key.digest)
        watch = Watch(self.store, folder, ttl_s=settings.lease_ttl_s)
        past = self.ask(lambda: records.read_times(self.store, prepared.key.workload))
        with contextlib.ExitStack() as waiting:
            while True:
                if self._take_lease(prepared, watch):
                    return False
                held_s = self.ask(lambda: _held_s(watch))
                if held_s is not None:  # else it was released, or published, meanwhile
                    waited_s = time.monotonic() - begun
                    policy, limit_s = settings.wait, settings.wait_limit_s
                    if not keep_waiting(policy, past, held_s, waited_s, limit_s):
                        if policy == "always":
                            raise DeadlineError(f"waited {waited_s:.0f} s for another node in vain")
                        return False
                    if not waits:
                        waits = True
                        waiting.enter_context(self.report.part("wait", waits=True))
                        settings.on_step("wait")
                    time.sleep(poll_s(waited_s))
                    self._budget.refill()
                if self.restore(prepared) or self.links:
                    return not self.links

    def _take_lease(self, prepared: Prepared, watch: Watch) -> bool:
        """Whether the lease is ours and no other node has published since we looked."""
        from bootseer.storage.lease import try_acquire

        settings, key = self.settings, prepared.key.digest
        lock, given_up = threading.Lock(), False

        def acquire() -> None:
            lease = try_acquire(
                self.store,
                records.lease_folder(key),
                watch,
                beat_s=settings.lease_beat_s,
                ttl_s=settings.lease_ttl_s,
            )
            with lock:
                if not given_up:
                    self.lease = lease
                elif lease is not None:
                    lease.close()

        try:
            self.ask(acquire)
        except DeadlineError:
            with lock:
                given_up = True
            if self.lease is None:
                raise
        if self.lease is None:
            return False
        if self.ask(lambda: records.list_generations(self.store, key)) == self._listed:
            settings.on_step("lease")
            return True
        self.lease.close()
        self.lease = None
        return False

    # --- no snapshot --------------------------------------------------------------------------

    def explain_miss(self, prepared: Prepared) -> None:
        """Note why a snapshot that nearly fits does not."""
        if self.links:
            return  # it fits, and the command is faster
        outcome = self.report.outcome
        if self._nearest is not None:
            outcome.notes.append(prepared.matcher.describe_difference(self._nearest))
            return
        if self.known_generations or outcome.reasons:
            return  # the inputs are the same; the reasons say why no snapshot could be used
        latest = self.ask(lambda: records.read_latest(self.store, prepared.key.label))
        if latest is not None and latest[0] != prepared.key.digest:
            from bootseer.depsnap.store import publisher

            now = publisher.inputs_of(prepared.key)
            outcome.notes.append(lock_match.describe_input_difference(latest[1], now))


def _check_answer(store: Store) -> None:
    try:
        next(iter(store.list(records.FOLDER)), None)
    except NotFoundError:
        store.mkdir(records.FOLDER)  # a store is made by its first use


def _is_same(note: Note, record: Record) -> bool:
    """Whether a snapshot of the same key is the one of a note, by packages or else by its time."""
    if note.packages != record.packages:
        return False
    decided = bool(record.packages) or record.lock == record_file.OWN
    return decided or note.created_s == record.created_unix_s


def _held_s(watch: Watch) -> float | None:
    """How long the lease has been held; None when it is free."""
    held, free = watch.look()
    if free:
        return None
    return held.held_s if held else 0.0
