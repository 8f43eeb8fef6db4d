"""Restore an archive: unpack it into a staging directory, verify it all, then switch it in."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from bootseer.depsnap.format.index import read_index
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.restore import commit, staging, switch_plan
from bootseer.depsnap.restore.staging import Stage
from bootseer.depsnap.restore.switch import Below, Switch
from bootseer.depsnap.restore.unpack import default_jobs, unpack
from bootseer.depsnap.types import (
    Digest,
    Limits,
    RestoreResult,
    Step,
    UnpackPolicy,
    absolute,
    no_step,
)
from bootseer.errors import UsageError, from_os_error


def restore(
    path: str,
    expected_digest: Digest,
    targets: Mapping[str, str] | None = None,
    *,
    limits: Limits | None = None,
    jobs: int | None = None,
    allow_setuid: bool = False,
    owners: Collection[tuple[int, int]] | None = None,
    on_step: Step = no_step,
    before_switch: Callable[[], None] | None = None,
    stall_s: float | None = None,
) -> RestoreResult:
    """Unpack into staging, verify every byte, then switch in; all roots or none.

    `targets` maps recorded roots to where they are to be now (default: where they were). What
    an earlier killed restore left there is finished or undone first. `owners` are the (uid, gid)
    pairs that root may give files to (pass `ArchiveInfo.owners` from the record; default: the
    caller, root and the target's owner); an unprivileged caller owns everything itself. Without
    `allow_setuid`, setuid and setgid bits of files and capabilities are left out and counted.
    `before_switch` is called when all is staged and verified; what it raises leaves the targets as
    they were. SIGTERM in the main thread cleans up and raises SystemExit(143). `stall_s`: the
    archive's file system may hang; the restore is given up once it has brought nothing for so long.
    Nothing is synced: after a power cut a target may be damaged.

    Raises CorruptDataError, NoSpaceError, AccessDeniedError, BusyError, NotSupportedError,
    NotFoundError, UsageError, DeadlineError after `stall_s`; the targets are then as they were.
    """
    bounds = limits or Limits()
    index = read_index(path, expected_digest=expected_digest, limits=bounds, stall_s=stall_s)
    places = _places_of(index, targets)
    for place in places:
        commit.recover(place)
    allowed = _default_owners(places) if owners is None else frozenset(owners)
    policy = UnpackPolicy(jobs or default_jobs(), allow_setuid, allowed)
    stages: list[Stage] = []
    with _terminable():
        try:
            stages.extend(map(staging.make, places))
            on_step("staging made")
            omissions = unpack(
                path,
                index,
                [stage.tree for stage in stages],
                policy,
                limits=bounds,
                keep_open=[stage.descriptor for stage in stages],
                stall_s=stall_s,
            )
            on_step("staged")
            if before_switch is not None:
                before_switch()
            switches = plan_switches(index, stages)
            commit.commit(stages, switches, on_step)
        except OSError as error:
            raise from_os_error(error, f"restore into {places[0]}") from error
        finally:
            remove_stages(stages)
    return RestoreResult(
        targets=tuple(places),
        entries=index.entries,
        raw_bytes=index.raw_bytes,
        deleted=sum(len(root.deleted) for root in index.roots),
        dropped_privileges=omissions.dropped_privileges,
        lost_xattrs=omissions.lost_xattrs,
        kept=tuple(os.path.join(s.target, p) for s in switches for p in s.kept),
        jobs=policy.jobs,
    )


def _places_of(index: Index, targets: Mapping[str, str] | None) -> list[str]:
    """The actual target of each root; UsageError where they overlap."""
    wanted = dict(targets or {})
    places = [absolute(wanted.pop(root.root, root.root)) for root in index.roots]
    if wanted:
        known = ", ".join(root.root for root in index.roots)
        raise UsageError(f"the archive has no root {next(iter(wanted))}; it has {known}")
    ordered = sorted(f"{place.rstrip('/')}/" for place in places)
    for before, place in itertools.pairwise(ordered):
        if place.startswith(before):
            raise UsageError(f"targets {before} and {place} overlap; choose separate ones")
    return places


def _default_owners(places: Sequence[str]) -> frozenset[tuple[int, int]]:
    """Owners that no record needs to name: the caller, root, and the targets' present owners."""
    out = {(os.geteuid(), os.getegid()), (0, 0)}
    for place in places:
        nearest = place
        while not os.path.isdir(nearest):
            nearest = os.path.dirname(nearest)
        status = os.stat(nearest)
        out.add((status.st_uid, status.st_gid))
    return frozenset(out)


def plan_switches(index: Index, stages: Sequence[Stage]) -> list[Switch]:
    """The switch of each staged root; raises NotSupportedError (see `switch_plan.plan`)."""
    out = []
    for stage, root in zip(stages, index.roots, strict=True):
        if stage.absent:
            out.append(Switch(stage.target, stage.path, (), absent=True))
            continue
        with Below(stage.target) as below:
            device = os.fstat(below.root).st_dev
            listing = _lister_of(stage.target)
            actions = switch_plan.plan(index, root, below.status, listing, below.attributes, device)
        implied = root.first in index.implied
        mtime_ns = stage.mtime_ns if implied else index.mtime_ns[root.first]
        out.append(Switch(stage.target, stage.path, actions, mtime_ns=mtime_ns))
    return out


def _lister_of(target: str) -> switch_plan.Listing:
    def list_below(path: str) -> Iterator[str]:
        for folder, folders, files in os.walk(os.path.join(target, path), topdown=False):
            prefix = os.path.relpath(folder, target)
            for name in [*files, *folders]:
                yield f"{prefix}/{name}"

    return list_below


def remove_stages(stages: Sequence[Stage]) -> None:
    """Remove stagings, unless a journal there is still needed for recovery."""
    if stages and commit.needs_recovery(stages[0].path):
        for stage in stages:
            stage.close()
        return
    commit.remove(stages)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that workers end and stagings are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
