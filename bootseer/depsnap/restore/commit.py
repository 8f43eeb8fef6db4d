"""The commit of a restore over all its targets at once, and recovery after a kill.

The first staging holds one file whose name is the state of the whole group, changed by rename:

- none: not committed; recovery removes the staging, the targets are as they were;
- `journal.json`: committed; recovery goes forward (after a reboot backward, since staged bytes
  may never have reached the disk, while the old ones had);
- `undo.json`: going back; recovery continues to go back;
- `done.json`, `undone.json`: all targets are complete, new or old; recovery removes the stagings.

The other stagings hold `group.json`, which names the first. A kill in the instant between making
(or removing) a staging inside a target and restoring the target's own mtime leaves that mtime as
the staging made it; nothing else is ever wrong.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from bootseer.depsnap.restore import staging, switch_plan
from bootseer.depsnap.restore.staging import Stage
from bootseer.depsnap.restore.switch import Switch
from bootseer.depsnap.types import WORK_PREFIX, Recovery, Step, absolute, no_step
from bootseer.errors import BootseerError, CorruptDataError, from_os_error
from bootseer.system.atomic import replace_file, sync_folder
from bootseer.system.processes import boot_id

JOURNAL, UNDO, DONE, UNDONE = "journal.json", "undo.json", "done.json", "undone.json"
GROUP = "group.json"
_VERSION = 1


def commit(stages: Sequence[Stage], switches: Sequence[Switch], step: Step) -> None:
    """Switch all targets, or none. Signals that would end this process are blocked meanwhile.

    Raises a mapped error with every target as it was, or, where even going back failed, an error
    that says so and leaves the journal for `recover`.
    """
    first = stages[0].path
    for stage, switch in zip(stages, switches, strict=True):
        if not switch.absent:
            os.mkdir(os.path.join(stage.path, staging.OLD), 0o700)
        if stage is not stages[0]:
            _write_json(os.path.join(stage.path, GROUP), {"first": first})
    document = {
        "version": _VERSION,
        "boot": boot_id(),
        "switches": [
            {
                "target": s.target,
                "stage": s.stage,
                "absent": s.absent,
                "mtime_ns": {DONE: s.mtime_ns, UNDONE: stage.mtime_ns},
                "actions": switch_plan.to_json(list(s.actions)),
            }
            for s, stage in zip(switches, stages, strict=True)
        ],
    }
    step("before commit")
    with _signals_blocked():
        _write_journal(first, document)
        step("committed")
        try:
            for switch in switches:
                switch.forward(step)
        except OSError as error:
            _go_back(first, switches, error)
            name = error.filename or switches[0].target
            raise from_os_error(error, f"switch in the restored {name}") from error
        step("switched")
        _rename(first, JOURNAL, DONE)
        step("done")
        for stage, switch in zip(stages, switches, strict=True):
            stage.mtime_ns = switch.mtime_ns
        remove(stages, step)


def remove(stages: Sequence[Stage], step: Step = no_step) -> None:
    """Remove the stagings, the first one last, since it holds the state of all."""
    for stage in reversed(stages):
        step(f"remove {stage.path}")
        stage.remove()


def needs_recovery(first: str) -> bool:
    """Whether a switch from this staging was interrupted."""
    return any(os.path.lexists(os.path.join(first, name)) for name in (JOURNAL, UNDO))


def _go_back(first: str, switches: Sequence[Switch], cause: OSError) -> None:
    _rename(first, JOURNAL, UNDO)
    try:
        for switch in reversed(switches):
            switch.backward()
    except OSError as error:
        raise BootseerError(
            f"cannot switch in {switches[0].target} ({cause}) and cannot go back either ({error}); "
            "it is neither old nor new: repair what the error names, then restore again"
        ) from error
    _rename(first, UNDO, UNDONE)


def recover(target: str, step: Step = no_step) -> Recovery:
    """Finish, undo or remove what a killed restore left at `target` and its group.

    Raises BusyError while a restore runs there, AccessDeniedError for another user's leftovers,
    a mapped error when it can be neither finished nor undone.
    """
    target = absolute(target)
    outcome = Recovery("clean")
    for path in staging.paths_for(target):
        if os.path.lexists(path):
            try:
                outcome = _recover_stage(target, path, step)
            except OSError as error:
                raise from_os_error(error, f"recover {target}") from error
    return outcome


def _recover_stage(target: str, path: str, step: Step) -> Recovery:
    with _hold_lock(path) as present:
        if not present:
            return Recovery("clean")
        group = _read_json(os.path.join(path, GROUP))
        if group is None:
            return _recover_group(target, path, path, step)
        first = _first_of(group, path)
        with _hold_lock(first) as has_first:
            return _recover_group(target, path, first if has_first else path, step)


def _recover_group(target: str, path: str, first: str, step: Step) -> Recovery:
    """With `path` and `first` locked, complete the group that `first` describes."""
    state, document = _state(first)
    if document is None or state is None:
        staging.of_killed_restore(target, path).remove()
        return Recovery("removed", (target,))
    switches = [_read_switch(row) for row in document["switches"]]
    others = [s.stage for s in switches if s.stage not in (first, path)]
    with _all_locked(others), _signals_blocked():
        outcome, end = _complete(first, state, document, switches, step)
        for switch, row in zip(switches[::-1], document["switches"][::-1], strict=True):
            _remove_stage(switch, row["mtime_ns"][end])
    return Recovery(outcome, tuple(s.target for s in switches))


def _complete(
    first: str, state: str, document: dict[str, Any], switches: Sequence[Switch], step: Step
) -> tuple[Literal["removed", "finished", "undone"], str]:
    """Make every target complete, all new or all old, and record that: (what was done, state)."""
    if state in (DONE, UNDONE):
        return "removed", state
    if state == JOURNAL and document["boot"] == boot_id():
        try:
            for switch in switches:
                switch.forward(step)
        except OSError as error:
            _go_back(first, switches, error)
            return "undone", UNDONE
        _rename(first, JOURNAL, DONE)
        return "finished", DONE
    if state == JOURNAL:
        _rename(first, JOURNAL, UNDO)
    for switch in reversed(switches):
        switch.backward()
    _rename(first, UNDO, UNDONE)
    return "undone", UNDONE


def _remove_stage(switch: Switch, mtime_ns: int) -> None:
    """Remove one staging, if it still exists."""
    try:
        descriptor = os.open(switch.stage, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    Stage(switch.target, switch.stage, switch.absent, mtime_ns, descriptor).remove()


def _read_switch(row: dict[str, Any]) -> Switch:
    """One switch from the journal; its staging must be where its target's always is."""
    target, stage, absent = str(row["target"]), str(row["stage"]), bool(row["absent"])
    if stage != staging.path_for(target, absent=absent):
        raise CorruptDataError(f"the journal names a foreign staging place {stage}; remove it")
    return Switch(target, stage, switch_plan.from_json(row["actions"]), absent)


def _first_of(group: dict[str, Any], path: str) -> str:
    first = str(group.get("first", ""))
    if not os.path.basename(first).startswith(WORK_PREFIX):
        raise CorruptDataError(f"{path} names a foreign staging place {first}; remove it")
    return first


def _state(first: str) -> tuple[str | None, dict[str, Any] | None]:
    for name in (JOURNAL, UNDO, DONE, UNDONE):
        document = _read_json(os.path.join(first, name))
        if document is not None:
            if document.get("version") != _VERSION:
                raise CorruptDataError(f"{first} holds a journal of an unknown version")
            return name, document
    return None, None


@contextmanager
def _hold_lock(path: str) -> Iterator[bool]:
    """Hold a staging's lock; gives False when there is no staging."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        yield False
        return
    try:
        staging.check_own(descriptor, path)
        staging.lock(descriptor, path)
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def _all_locked(paths: Sequence[str]) -> Iterator[None]:
    if not paths:
        yield
        return
    with _hold_lock(paths[0]), _all_locked(paths[1:]):
        yield


@contextmanager
def _signals_blocked() -> Iterator[None]:
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rename(folder: str, old: str, new: str) -> None:
    os.rename(os.path.join(folder, old), os.path.join(folder, new))


def _write_journal(first: str, document: object) -> None:
    """Commit; after an error there is no journal, so that recovery leaves the targets alone."""
    path = os.path.join(first, JOURNAL)
    try:
        _write_json(path, document)
    except OSError:
        with suppress(OSError):
            os.unlink(path)  # it has its name where only the folder's sync failed
            sync_folder(first)
        raise


def _write_json(path: str, document: object) -> None:
    replace_file(path, json.dumps(document).encode("ascii"), mode=0o600)


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="ascii") as file:
            document = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptDataError(f"{path} is damaged; remove its directory") from error
    if not isinstance(document, dict):
        raise CorruptDataError(f"{path} is damaged; remove its directory")
    return document
