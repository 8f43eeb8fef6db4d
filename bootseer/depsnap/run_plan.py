"""From a command to its key, and from a record to files in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap import target_note
from bootseer.depsnap.key import install_roots, requirements, snapshot_key
from bootseer.depsnap.key.resolver import Resolution
from bootseer.depsnap.lock_match import Judge
from bootseer.depsnap.settings import DepsSettings
from bootseer.depsnap.shared_tree import placement_records, tree
from bootseer.depsnap.store import archive_access, records
from bootseer.depsnap.target_note import Note
from bootseer.depsnap.time_limit import may_hang, within
from bootseer.depsnap.types import Placement, absolute
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.system.paths import is_within
from bootseer.system.processes import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.types import FormChoice
    from bootseer.storage.download import Patience

_SHARE_OF_PLAIN = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A command's target and key; `in_place` when this node already has it there.

    `state` is what the roots held before the install that the key stands for; `judge` knows
    which of the key's snapshots is what the index decides. `damaged` is the note of what stands
    there since before a reboot: it alone is to be put there anew, or `on_what_stands` holds.
    """

    target: install_roots.Target
    key: snapshot_key.Key
    state: str
    in_place: bool
    judge: Judge
    damaged: Note | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """How a snapshot came to its place: a form, why this one, bytes and entries of it."""

    form: str
    why: str
    raw_bytes: int
    entries: int


def find_target(
    settings: DepsSettings, command: Sequence[str], *, though_late: bool = False
) -> install_roots.Target:
    """The roots and Python of a command. Raises UsageError when there is nothing to keep.

    DeadlineError where its interpreter did not answer in time; `though_late` gives the roots that
    it seems to have, for clearing up alone.
    """
    found = install_roots.find(command, settings.environ, settings.cwd, settings.also)
    if found.late and not (though_late and found.roots):
        raise DeadlineError(found.late)
    if not found.roots and not found.folders:
        if not found.installs:
            raise UsageError(
                "the command installs nothing that could be kept; name what with --also"
            )
        raise UsageError("cannot tell where the command installs; name the place with --also")
    return found


def resolution_of(settings: DepsSettings, found: install_roots.Target) -> Resolution:
    """The resolver of a command's requirements, not started yet."""
    return Resolution(
        found.installs,
        found.python.executable if found.python else None,
        settings.environ,
        settings.cwd,
        settings.resolve_timeout_s,
    )


def prepare(
    settings: DepsSettings,
    command: Sequence[str],
    found: install_roots.Target,
    resolution: Resolution,
) -> Prepared:
    """Compute the key of a command for a target as it stands.

    Starts the resolver where an index surely has a say. Raises NotFoundError for a missing key
    file and UsageError for one that is too large.
    """
    exclude = _passed_over(settings, found)
    note = target_note.read(settings.cache, found.paths)
    if note is not None and note.fingerprint != snapshot_key.fingerprint(found, exclude):
        note = None
    state = snapshot_key.base_state(found, exclude) if note is None else note.state
    made = snapshot_key.make(
        snapshot_key.Question(
            command=command,
            key_files=settings.key_files,
            target=found,
            state=state,
            environ=settings.environ,
            cwd=settings.cwd,
            image_digest=settings.image_digest,
            signer=records.signer(records.read_sign_key(settings.sign_key)),
            key_env=settings.key_env,
            exclude=settings.exclude,
        )
    )
    if not (made.closed or made.all_exact):
        resolution.begin()
    present = snapshot_key.packages(found)
    brought = note.packages if note is not None else {}
    before = {name: version for name, version in present.items() if name not in brought}
    judge = Judge(made, before, resolution, settings.max_age_s)
    if note is None:
        return Prepared(found, made, state, False, judge)
    fits = note.key == made.digest and judge.accepts(note.lock, note.packages, note.created_s)
    ready = Prepared(found, made, state, fits and note.boot == boot_id(), judge)
    if not fits:
        # What stands there is another command's, lock's or time's work, on which this one builds:
        # the command would bring a part of its result alone, and a restore would merge two.
        return on_what_stands(settings, ready)
    # Nothing was synced: after a reboot the files may be damaged.
    return ready if ready.in_place else dataclasses.replace(ready, damaged=note)


def on_what_stands(settings: DepsSettings, prepared: Prepared) -> Prepared:
    """The same command's key for an install on top of what the roots hold now."""
    found = prepared.target
    state = snapshot_key.base_state(found, _passed_over(settings, found))
    made = prepared.key.at(state)
    judge = Judge(made, snapshot_key.packages(found), prepared.judge.resolution, settings.max_age_s)
    return Prepared(found, made, state, False, judge)


def _passed_over(settings: DepsSettings, found: install_roots.Target) -> list[str]:
    """What a key's scans do not look at; only roots that the user named are scanned for it."""
    if not any(root.why == install_roots.ALSO for root in found.roots):
        return []
    return excludes(settings, found)


def excludes(settings: DepsSettings, found: install_roots.Target) -> list[str]:
    """What no scan of this target looks at."""
    ours = [settings.cache]
    with contextlib.suppress(BootseerError):  # a store that cannot be opened lies in no root
        ours.append(open_store(settings.store).url.removeprefix("file://"))
    from bootseer.depsnap.capture import (
        exclusions,  # which scans: most starts that restore never do
    )

    return exclusions.excludes(found.paths, ours, settings.exclude)


def make_way(settings: DepsSettings, found: install_roots.Target) -> bool:
    """Take a read-only placement of another snapshot away, so that an install can write there.

    True when there was one. Raises BusyError while a job uses it.
    """
    cache = target_note.trees_of(settings.cache)
    gone = False
    for root in found.paths:
        record = placement_records.find(cache, absolute(root))
        if record is not None and record.form in ("bind", "symlink"):
            gone |= tree.unplace(root, cache)
    return gone


def has_new_lock(settings: DepsSettings, prepared: Prepared) -> bool:
    """Whether the install wrote another `uv.lock` than the key was made from."""
    if not prepared.key.closed:
        return False  # there was none, or it was to be made anew
    read = {i.name: i.value for i in prepared.key.ingredients}
    now = requirements.locks_of(prepared.target.installs, settings.cwd, settings.environ)
    return any(read.get(label) != digest for label, digest in now.items())


def brought(prepared: Prepared) -> dict[str, str]:
    """Name -> version of the packages that stand in the roots now and did not before."""
    before = prepared.judge.before
    return {n: v for n, v in snapshot_key.packages(prepared.target).items() if before.get(n) != v}


def stands(prepared: Prepared, environ: Mapping[str, str]) -> bool:
    """Whether what the inputs name stands in the roots or below them, as far as they name packages.

    In directories that the user names, packages may lie deeper than is looked.
    """
    found, wanted = prepared.target, prepared.key.wanted
    if any(root.why in (install_roots.ALSO, install_roots.NAMED) for root in found.roots):
        return True
    missing = wanted - snapshot_key.packages(found).keys()
    return not missing or missing <= snapshot_key.seen_outside(found, environ)


def note_in_place(
    settings: DepsSettings,
    prepared: Prepared,
    created_s: float,
    lock: str,
    packages: Mapping[str, str],
) -> None:
    """Remember what stands at the target now; a cache that cannot be written is no fault."""
    exclude = _passed_over(settings, prepared.target)
    fingerprint = snapshot_key.fingerprint(prepared.target, exclude)
    if fingerprint is None:
        return
    note = target_note.Note(
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


def reachable_store(settings: DepsSettings) -> Store:
    """Open the store and see that it answers at all.

    Where its file system may hang, each request is made by a process apart. Raises
    StoreUnavailableError or another store error, and DeadlineError when it hangs.
    """
    store = open_store(settings.store)
    root = store.local_path(records.FOLDER)
    if root is not None and may_hang(root):
        from bootseer.depsnap.store.isolated_store import StoreApart  # most stores answer

        store = StoreApart(os.path.dirname(root), settings.store_timeout_s)
    within(lambda: _answers(store), settings.store_timeout_s, store.url)
    return store


def _answers(store: Store) -> None:
    try:
        next(iter(store.list(records.FOLDER)), None)
    except NotFoundError:
        store.mkdir(records.FOLDER)  # a store is made by its first use


def check_belongs(record: records.Record, targets: Sequence[str]) -> None:
    """Raise CorruptDataError for a record that writes outside the roots of a command."""
    for root in record.roots:
        if not any(is_within(root, target) for target in targets):
            raise CorruptDataError(
                f"the snapshot {record.key[:12]} writes to {root}, which the command does not"
            )


def _nothing() -> None:
    """All is known already."""


def place(
    store: Store,
    settings: DepsSettings,
    record: records.Record,
    moved: Mapping[str, str] | None = None,
    confirm: Callable[[], None] = _nothing,
    *,
    beside_plain: bool = False,
) -> Restored:
    """Put a snapshot in place by the asked form, or the fastest that works here.

    `moved` maps recorded roots to where they shall stand instead. `confirm` is called when all is
    ready, before the target changes; what it raises ends the placing. `beside_plain`: the install
    command could run as well, so a slow store is not waited for (`patience_of`). Raises
    CorruptDataError, NoSpaceError, NotSupportedError and the like, DeadlineError for a store that
    is too slow; the targets are then as they were.
    """
    patience = patience_of(record, settings) if beside_plain else None
    with archive_access.archive_path(store, record, settings.cache, patience) as path:
        # How long a read of the archive may bring nothing, where it may hang at all.
        stall_s = patience.limit_s if patience is not None and may_hang(path) else None
        return _place(path, settings, record, moved, confirm, stall_s)


def read_tree_ahead(settings: DepsSettings) -> None:
    """Ask the disk for the tree that will most likely be placed, while its name is worked out."""
    if settings.share_trees and settings.form in ("auto", "overlay"):
        tree.read_ahead_newest(target_note.trees_of(settings.cache))


def patience_of(record: records.Record, settings: DepsSettings) -> Patience:
    """How long a fetch of the archive may bring too little: the larger of the store's time limit
    and a tenth of what the plain install took."""
    from bootseer.storage.download import Patience

    limit_s = max(settings.store_timeout_s, record.install_s * _SHARE_OF_PLAIN)
    return Patience(limit_s=limit_s, worth_s=record.install_s)


def _place(
    path: str,
    settings: DepsSettings,
    record: records.Record,
    moved: Mapping[str, str] | None,
    confirm: Callable[[], None],
    stall_s: float | None,
) -> Restored:
    """`place` with the archive at a path of this machine."""
    sizes = record.archive.raw_bytes, record.archive.entries
    wanted = settings.form
    if wanted == "auto" and not settings.share_trees:
        wanted = "archive"
    if wanted != "archive":
        try:
            form, why = _place_tree(settings, record, path, wanted, moved, confirm, stall_s)
            return Restored(form, why, *sizes)
        except BootseerError as error:
            if wanted != "auto" or isinstance(error, (CorruptDataError, DeadlineError)):
                raise
            why = f"no shared tree: {error}"
    else:
        why = "asked for" if settings.form == "archive" else "no cache shared by starts is given"
    from bootseer.depsnap.restore import archive_restore  # a shared tree needs none of it

    archive_restore.restore(
        path,
        record.archive.index_digest,
        moved,
        limits=records.limits_of(record),
        allow_setuid=settings.allow_setuid,
        owners=record.archive.owners,
        on_step=settings.on_step,
        before_switch=confirm,
        stall_s=stall_s,
    )
    return Restored("archive", why, *sizes)


def _place_tree(
    settings: DepsSettings,
    record: records.Record,
    path: str,
    wanted: FormChoice,
    moved: Mapping[str, str] | None,
    confirm: Callable[[], None],
    stall_s: float | None,
) -> tuple[str, str]:
    cache = target_note.trees_of(settings.cache)
    places = [(moved or {}).get(root, root) for root in record.roots]
    overlaid = wanted == "overlay" or (wanted == "auto" and settings.writable)

    def attempt(packed: bool) -> tuple[Placement, ...]:
        shared = tree.ensure(
            cache,
            path,
            record.archive.index_digest,
            limits=records.limits_of(record),
            allow_setuid=settings.allow_setuid,
            owners=record.archive.owners,
            on_step=settings.on_step,
            packed=packed,
            stall_s=stall_s,
        )
        if set(shared.roots) != set(record.roots):
            raise CorruptDataError(
                f"the record of {record.key[:12]} does not name the roots of its archive"
            )
        return tree.place(
            shared, moved, form=wanted, writable=settings.writable, before_switch=confirm
        )

    packed = overlaid and tree.can_overlay(places, cache)
    try:
        placed = attempt(packed)
    except NotSupportedError:
        if not packed:
            raise
        placed = attempt(packed=False)
    return "+".join(sorted({p.form for p in placed})), "; ".join(
        dict.fromkeys(p.why for p in placed)
    )


def corrupt_in_store(store: Store, record: records.Record, cache: str) -> bool:
    """Read the stored archive whole: True when it is missing or damaged there.

    Tells a bad snapshot from a fault on the way, before anybody condemns it.
    """
    from bootseer.depsnap.format import archive

    try:
        with archive_access.archive_path(store, record, cache) as path:
            index = archive.read_index(
                path,
                expected_digest=record.archive.index_digest,
                limits=records.limits_of(record),
            )
            return archive.verify(path, index) != record.archive.tree_digest
    except (CorruptDataError, NotFoundError):
        return True
