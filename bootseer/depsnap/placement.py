"""From a record to files in place: as a node-shared tree, or unpacked into the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key.install_roots import Target
from bootseer.depsnap.settings import DepsSettings
from bootseer.depsnap.shared_tree import cache, forms, placement_records
from bootseer.depsnap.store import archive_access, record_file
from bootseer.depsnap.store.record_file import Record
from bootseer.depsnap.types import Placement, absolute
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    NotSupportedError,
)
from bootseer.storage.store import Store
from bootseer.system.blocking_calls import may_hang
from bootseer.system.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.types import FormChoice

_SHARE_OF_INSTALL = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """How a snapshot was placed: the form, why this one, the snapshot's bytes and entries."""

    form: str
    why: str
    raw_bytes: int
    entries: int


def read_tree_ahead(settings: DepsSettings) -> None:
    """Have the disk read the tree that will most likely be placed, while its name is computed."""
    if settings.share_trees and settings.form in ("auto", "overlay"):
        cache.read_ahead_newest(cache.folder_in(settings.cache))


def remove_read_only_placements(settings: DepsSettings, target: Target) -> bool:
    """Remove read-only placements of another snapshot, so that an install can write there.

    True when there was one. Raises BusyError while a job uses it.
    """
    trees = cache.folder_in(settings.cache)
    removed = False
    for root in target.paths:
        record = placement_records.find(trees, absolute(root))
        if record is not None and record.form in ("bind", "symlink"):
            removed |= forms.unplace(root, trees)
    return removed


def check_roots(record: Record, targets: Sequence[str]) -> None:
    """Raise CorruptDataError for a record that writes outside the roots of a command."""
    for root in record.roots:
        if not any(is_within(root, target) for target in targets):
            raise CorruptDataError(
                f"the snapshot {record.key[:12]} writes to {root}, which the command does not"
            )


def place(
    store: Store,
    settings: DepsSettings,
    record: Record,
    moved: Mapping[str, str] | None = None,
    confirm: Callable[[], None] | None = None,
    *,
    impatient: bool = False,
) -> Restored:
    """Put a snapshot in place in the requested form, or the fastest that works here.

    `moved` maps recorded roots to other targets. `confirm` is called when all is ready, before the
    target changes; what it raises ends the placing. `impatient`: the install command could run as
    well, so a slow store is not waited for. Raises CorruptDataError, NoSpaceError,
    NotSupportedError and the like, DeadlineError for a store that is too slow; the targets are then
    as they were.
    """
    limit_s = _patience_s(record, settings) if impatient else None
    with archive_access.local_archive(store, record, settings.cache, limit_s) as path:
        # How long a read of the archive may bring nothing, where it may hang at all.
        stall_s = limit_s if limit_s is not None and may_hang(path) else None
        return _place(path, settings, record, moved, confirm, stall_s)


def _patience_s(record: Record, settings: DepsSettings) -> float:
    """How long a read or copy of the archive may bring too little: the larger of the store's time
    limit and a tenth of the time that the install took."""
    return max(settings.store_timeout_s, record.install_s * _SHARE_OF_INSTALL)


def _place(
    path: str,
    settings: DepsSettings,
    record: Record,
    moved: Mapping[str, str] | None,
    confirm: Callable[[], None] | None,
    stall_s: float | None,
) -> Restored:
    """`place` for an archive at a path of this machine."""
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
        limits=record_file.limits_of(record),
        allow_setuid=settings.allow_setuid,
        owners=record.archive.owners,
        on_step=settings.on_step,
        before_switch=confirm,
        stall_s=stall_s,
    )
    return Restored("archive", why, *sizes)


def _place_tree(
    settings: DepsSettings,
    record: Record,
    path: str,
    wanted: FormChoice,
    moved: Mapping[str, str] | None,
    confirm: Callable[[], None] | None,
    stall_s: float | None,
) -> tuple[str, str]:
    trees = cache.folder_in(settings.cache)
    targets = [(moved or {}).get(root, root) for root in record.roots]
    overlaid = wanted == "overlay" or (wanted == "auto" and settings.writable)

    def attempt(packed: bool) -> tuple[Placement, ...]:
        shared = cache.ensure(
            trees,
            path,
            record.archive.index_digest,
            limits=record_file.limits_of(record),
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
        return forms.place(
            shared, moved, form=wanted, writable=settings.writable, before_switch=confirm
        )

    packed = overlaid and forms.can_overlay(targets, trees)
    try:
        placements = attempt(packed)
    except NotSupportedError:
        if not packed:
            raise
        placements = attempt(packed=False)
    return "+".join(sorted({p.form for p in placements})), "; ".join(
        dict.fromkeys(p.why for p in placements)
    )


def is_corrupt_in_store(store: Store, record: Record, cache_dir: str) -> bool:
    """Read the stored archive whole: True when it is missing or damaged there.

    Distinguishes a bad snapshot, which is condemned, from a fault on the way.
    """
    from bootseer.depsnap.format.index import read_index
    from bootseer.depsnap.format.verifier import verify

    try:
        with archive_access.local_archive(store, record, cache_dir) as path:
            index = read_index(
                path,
                expected_digest=record.archive.index_digest,
                limits=record_file.limits_of(record),
            )
            return verify(path, index) != record.archive.tree_digest
    except (CorruptDataError, NotFoundError):
        return True
