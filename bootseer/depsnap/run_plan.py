"""From an install command to its target and its key, and what the target holds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap import target_note
from bootseer.depsnap.key import install_roots, requirements, roots_state, snapshot_key
from bootseer.depsnap.key.install_roots import Target
from bootseer.depsnap.key.resolver import Resolution
from bootseer.depsnap.lock_match import LockMatcher
from bootseer.depsnap.settings import DepsSettings
from bootseer.depsnap.store import record_file
from bootseer.depsnap.target_note import Note
from bootseer.errors import BootseerError, DeadlineError, UsageError
from bootseer.storage.open import open_store
from bootseer.system.processes import boot_id


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A command's target and key; `in_place` when this node already has it there.

    `state` is what the roots held before the install that the key stands for; `matcher` knows
    which of the key's snapshots is what the index decides. `damaged` is the note of an install of
    before a reboot, whose files may be damaged: the same snapshot is restored over them, or
    `prepare_on_present` is what is installed.
    """

    target: Target
    key: snapshot_key.Key
    state: str
    in_place: bool
    matcher: LockMatcher
    damaged: Note | None = None


def find_target(
    settings: DepsSettings, command: Sequence[str], *, even_late: bool = False
) -> Target:
    """The roots and Python of a command. Raises UsageError when there is nothing to capture.

    DeadlineError where its interpreter did not answer in time; `even_late` gives the roots that
    it seems to have, only for cleaning up.
    """
    target = install_roots.find(command, settings.environ, settings.cwd, settings.also)
    if target.late and not (even_late and target.roots):
        raise DeadlineError(target.late)
    if not target.roots and not target.folders:
        if not target.installs:
            raise UsageError(
                "the command installs nothing that could be kept; name what with --also"
            )
        raise UsageError("cannot tell where the command installs; name the place with --also")
    return target


def new_resolution(settings: DepsSettings, target: Target) -> Resolution:
    """A resolver of a command's requirements, not started yet."""
    return Resolution(
        target.installs,
        target.python.executable if target.python else None,
        settings.environ,
        settings.cwd,
        settings.resolve_timeout_s,
    )


def prepare(
    settings: DepsSettings, command: Sequence[str], target: Target, resolution: Resolution
) -> Prepared:
    """Compute the key of a command for a target as it is now.

    Starts the resolver where an index certainly decides too. Raises NotFoundError for a missing key
    file and UsageError for one that is too large.
    """
    exclude = _key_exclusions(settings, target)
    note = target_note.read(settings.cache, target.paths)
    if note is not None and note.fingerprint != roots_state.fingerprint(target, exclude):
        note = None
    state = roots_state.base_state(target, exclude) if note is None else note.state
    key = snapshot_key.make(
        snapshot_key.Question(
            command=command,
            key_files=settings.key_files,
            target=target,
            state=state,
            environ=settings.environ,
            cwd=settings.cwd,
            image_digest=settings.image_digest,
            signer=record_file.signer(record_file.read_sign_key(settings.sign_key)),
            key_env=settings.key_env,
            exclude=settings.exclude,
        )
    )
    if not (key.closed or key.all_exact):
        resolution.begin()
    present = roots_state.packages(target)
    added = note.packages if note is not None else {}
    before = {name: version for name, version in present.items() if name not in added}
    matcher = LockMatcher(key, before, resolution, settings.max_age_s)
    if note is None:
        return Prepared(target, key, state, False, matcher)
    fits = note.key == key.digest and matcher.accepts(note.lock, note.packages, note.created_s)
    prepared = Prepared(target, key, state, fits and note.boot == boot_id(), matcher)
    if not fits:
        # What the target holds is the work of another command, lock or time, and this one builds on
        # it: the command would add only a part of its result, and a restore would mix two.
        return prepare_on_present(settings, prepared)
    # Nothing was synced: after a reboot the files may be damaged.
    return prepared if prepared.in_place else dataclasses.replace(prepared, damaged=note)


def prepare_on_present(settings: DepsSettings, prepared: Prepared) -> Prepared:
    """The same command's key for an install on top of what the roots hold now."""
    target = prepared.target
    state = roots_state.base_state(target, _key_exclusions(settings, target))
    key = prepared.key.at(state)
    resolution = prepared.matcher.resolution
    matcher = LockMatcher(key, roots_state.packages(target), resolution, settings.max_age_s)
    return Prepared(target, key, state, False, matcher)


def _key_exclusions(settings: DepsSettings, target: Target) -> list[str]:
    """What a key's scans leave out; only roots that the user named are scanned for a key."""
    if not any(root.why == install_roots.ALSO for root in target.roots):
        return []
    return list_exclusions(settings, target)


def list_exclusions(settings: DepsSettings, target: Target) -> list[str]:
    """What every scan of this target leaves out."""
    from bootseer.depsnap.capture import exclusions  # most starts that restore scan nothing

    ours = [settings.cache]
    with contextlib.suppress(BootseerError):  # a store that cannot be opened is in no root
        ours.append(open_store(settings.store).url.removeprefix("file://"))
    return exclusions.list_exclusions(target.paths, ours, settings.exclude)


def has_new_lock(settings: DepsSettings, prepared: Prepared) -> bool:
    """Whether the install wrote another `uv.lock` than the key was made from."""
    if not prepared.key.closed:
        return False  # there was none, or the command makes a new one
    before = {i.name: i.value for i in prepared.key.ingredients}
    now = requirements.read_uv_locks(prepared.target.installs, settings.cwd, settings.environ)
    return any(before.get(label) != digest for label, digest in now.items())


def added_packages(prepared: Prepared) -> dict[str, str]:
    """Name -> version of the packages that are in the roots now and were not before."""
    before = prepared.matcher.before
    present = roots_state.packages(prepared.target)
    return {name: version for name, version in present.items() if before.get(name) != version}


def has_wanted_packages(prepared: Prepared, environ: Mapping[str, str]) -> bool:
    """Whether the packages that the inputs name are in the roots, or in an installer's reach.

    In directories that the user names, packages may be deeper than is searched.
    """
    target, wanted = prepared.target, prepared.key.wanted
    if any(root.why in (install_roots.ALSO, install_roots.NAMED) for root in target.roots):
        return True
    missing = wanted - roots_state.packages(target).keys()
    return not missing or missing <= roots_state.packages_outside(target, environ)


def write_note(
    settings: DepsSettings,
    prepared: Prepared,
    created_s: float,
    lock: str,
    packages: Mapping[str, str],
) -> None:
    """Note what the target holds now; a cache that cannot be written is no fault."""
    exclude = _key_exclusions(settings, prepared.target)
    fingerprint = roots_state.fingerprint(prepared.target, exclude)
    if fingerprint is None:
        return
    note = Note(
        key=prepared.key.digest,
        state=prepared.state,
        fingerprint=fingerprint,
        created_s=created_s,
        boot=boot_id(),
        lock=lock,
        packages=dict(packages),
    )
    try:
        target_note.write(settings.cache, prepared.target.paths, note)
    except BootseerError:
        return  # without the note, the next start restores once more
