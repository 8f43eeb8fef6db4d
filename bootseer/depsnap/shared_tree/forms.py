"""Place a node-shared tree at its targets, in the fastest form that works here, and remove it.

| form | needs | the job may write | writes reach the tree |
|---|---|---|---|
| overlay | mount(2) | yes, into a private layer | never |
| bind | mount(2), absent or empty target | no (read-only) | never |
| symlink | absent or empty target | only as root | as root: yes, found at the next use |
| reflink | one file system that shares blocks | yes | never |
| hardlink | one file system | new files yes | writing *into* a file does; found by its mtime |
| copy | | yes | never |

`auto` with `writable` tries overlay, reflink, hard link, copy; without it bind, symlink, overlay,
reflink, hard link, copy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence

from bootseer.depsnap.restore import staging
from bootseer.depsnap.shared_tree import cache, packed_mount, placement_records
from bootseer.depsnap.types import Placement, SharedTree, absolute, no_step
from bootseer.errors import NotSupportedError, UsageError, from_os_error
from bootseer.system import mount_calls
from bootseer.system.mountinfo import all_mounts, is_mounted
from bootseer.system.paths import is_within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.restore.switch import Below
    from bootseer.depsnap.types import Form, FormChoice

_WRITABLE: tuple[Form, ...] = ("overlay", "reflink", "hardlink", "copy")
_READ_ONLY: tuple[Form, ...] = ("bind", "symlink", "overlay", "reflink", "hardlink", "copy")
_WHY: Mapping[Form, str] = {
    "overlay": "mounts are allowed; writes go to a private layer",
    "bind": "mounts are allowed and the job does not write there",
    "symlink": "the job does not write there",
    "reflink": "the file system shares blocks until one side writes",
    "hardlink": "cache and target lie on one file system",
    "copy": "works everywhere",
}


def place(
    shared: SharedTree,
    targets: Mapping[str, str] | None = None,
    *,
    form: FormChoice = "auto",
    writable: bool = True,
    before_switch: Callable[[], None] | None = None,
) -> tuple[Placement, ...]:
    """Place the tree's roots at `targets` (default: the recorded roots), all in one form.

    A target where this tree is placed already (mounted or linked) is left as it is. What another
    tree's overlay shows, with all that was written there, stays; this tree is put over it as files.
    `writable`: the job may write below the target. `before_switch` is called before a target
    changes, for links and copies when all of them are made; what it raises ends the placing.
    Raises NotSupportedError when the wanted form, or none, works here, naming each reason;
    BusyError where another tree's read-only mount is in use; the targets are then as they were.
    """
    places = {root: absolute((targets or {}).get(root, root)) for root in shared.roots}
    unknown = set(targets or {}) - set(shared.roots)
    if unknown:
        raise UsageError(f"the tree has no root {unknown.pop()}")
    cache_dir = os.path.dirname(os.path.dirname(shared.path))
    present = _present_placements(cache_dir, shared, places, form)
    if present is not None:
        return present
    confirm = before_switch or _nothing_to_confirm
    replaced = [target for target in places.values() if not _has_overlay(cache_dir, target)]
    if any(_is_placed(cache_dir, target) for target in replaced):
        confirm()  # before those placements are removed
    for target in replaced:
        unplace(target, cache_dir)
    for target in places.values():
        if staging.is_staged(target):
            from bootseer.depsnap.restore import commit  # a placement counts milliseconds

            commit.recover(target)
    forms = (_WRITABLE if writable else _READ_ONLY) if form == "auto" else (form,)
    if shared.packed:
        forms = tuple(name for name in forms if name == "overlay")
    tried: list[tuple[str, str]] = []
    for candidate in forms:
        try:
            _place_all(cache_dir, shared, places, candidate, confirm)
        except (OSError, NotSupportedError) as error:
            tried.append((candidate, _reason(error)))
            continue
        why = _WHY[candidate] if form == "auto" else "asked for"
        return tuple(
            Placement(target, candidate, why, shared.digest, tuple(tried))
            for target in places.values()
        )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in tried)
    raise NotSupportedError(f"cannot place the tree at {', '.join(places.values())}: {reasons}")


def _nothing_to_confirm() -> None:
    """The `before_switch` of a caller that gave none."""


def _has_overlay(cache_dir: str, target: str) -> bool:
    record = placement_records.find(cache_dir, target)
    return record is not None and record.form == "overlay" and record.alive is not False


def _is_placed(cache_dir: str, target: str) -> bool:
    record = placement_records.find(cache_dir, target)
    return record is not None and bool(record.alive)


def can_overlay(targets: Iterable[str], cache_dir: str) -> bool:
    """Whether the targets allow an overlay there, whatever the kernel and privileges do."""
    try:
        for target in map(absolute, targets):
            _check_target(target)
            if not _is_placed(cache_dir, target):
                _check_visible(cache_dir, target)
    except (OSError, NotSupportedError):
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def _present_placements(
    cache_dir: str, shared: SharedTree, places: Mapping[str, str], form: FormChoice
) -> tuple[Placement, ...] | None:
    """The placements that exist already, when they are all this tree's (and of this form)."""
    out = []
    for target in places.values():
        record = placement_records.find(cache_dir, target)
        if record is None or record.digest != shared.digest or not record.alive:
            return None
        if record.was_written:
            return None  # the caller may miss what was deleted or changed there
        if form not in ("auto", record.form):
            return None
        out.append(Placement(target, record.form, "it stands there already", shared.digest))
    return tuple(out)


def _place_all(
    cache_dir: str,
    shared: SharedTree,
    places: Mapping[str, str],
    form: Form,
    confirm: Callable[[], None],
) -> None:
    if form in ("reflink", "hardlink", "copy"):
        _place_files(shared, places, form, confirm)
        return
    confirm()
    done: list[str] = []
    try:
        for root, target in places.items():
            _place_one(cache_dir, shared, root, target, form)
            done.append(target)
    except BaseException:  # a signal too: all of them or none
        for target in reversed(done):
            unplace(target, cache_dir)
        raise


def _place_files(
    shared: SharedTree, places: Mapping[str, str], form: Form, confirm: Callable[[], None]
) -> None:
    """Stage links or copies of the tree and switch them in as a restore does."""
    from bootseer.depsnap.restore import archive_restore, commit
    from bootseer.depsnap.shared_tree import link_farm

    assert form in ("reflink", "hardlink", "copy")
    index = cache.index_of(shared)
    if form == "hardlink":
        cache.mark_hardlinked(shared)
    stages: list[staging.Stage] = []
    try:
        for root in index.roots:
            stages.append(staging.make(places[root.root]))  # noqa: PERF401 - each is to be removed
        for root, stage in zip(index.roots, stages, strict=True):
            link_farm.fill(index, root, shared.roots[root.root], stage.tree, form)
        confirm()
        commit.commit(stages, archive_restore.plan_switches(index, stages), no_step)
    finally:
        archive_restore.remove_stages(stages)


def _place_one(cache_dir: str, shared: SharedTree, root: str, target: str, form: Form) -> None:
    empty = _check_target(target)
    _check_visible(cache_dir, target)
    if form in ("bind", "symlink"):
        if not empty:
            raise NotSupportedError(f"{target} holds other things, which a {form} would hide")
        if shared.deleted[root] and os.path.lexists(target):
            raise NotSupportedError(f"what the install deleted in {target} needs an overlay")
    folder = placement_records.folder_of(cache_dir, target)
    placement_records.forget(folder)
    os.makedirs(folder, mode=0o700)
    created = not os.path.lexists(target)
    source = shared.roots[root]
    try:
        placement_records.write(folder, target, form, shared.digest, source, created)
        if form == "symlink":
            if not created:
                os.rmdir(target)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(source, target)
            return
        if created:
            os.makedirs(target)
        if form == "bind":
            _bind(source, target)
        else:
            _overlay(shared, root, target, folder, empty)
    except BaseException:  # a signal too: no half-made placement stays
        _undo(folder, target, form, created)
        raise


def _check_target(target: str) -> bool:
    """Whether the target is absent or empty. Raises NotSupportedError for what is no directory."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return True
    if not stat.S_ISDIR(status.st_mode):
        raise NotSupportedError(f"{target} is no directory")
    with os.scandir(target) as listing:
        return next(listing, None) is None


def _check_visible(cache_dir: str, target: str) -> None:
    """Raise NotSupportedError where a mount over a target would hide what processes use, or where
    they would not see it."""
    if target == "/":
        raise NotSupportedError("running processes keep their root directory")
    if _has_overlay(cache_dir, target):
        raise NotSupportedError("an overlay that is not this snapshot alone stands there")
    if is_within(os.getcwd(), target):
        raise NotSupportedError(f"the working directory lies in {target} and would stay beneath")
    if is_within(cache_dir, target):
        raise NotSupportedError(f"the cache lies in {target} and would be hidden")
    for mounted in all_mounts():
        if mounted.target != target and is_within(mounted.target, target):
            hidden = f"{mounted.target} is mounted below {target} and would be hidden"
            raise NotSupportedError(hidden)


def _bind(source: str, target: str) -> None:
    mount_calls.mount(source, target, "none", mount_calls.MS_BIND)
    try:
        flags = mount_calls.MS_BIND | mount_calls.MS_REMOUNT | mount_calls.MS_RDONLY
        mount_calls.mount("none", target, "none", flags)
    except BaseException:  # a tree mounted writable must not stay
        mount_calls.unmount(target)
        raise


def _overlay(shared: SharedTree, root: str, target: str, folder: str, empty: bool) -> None:
    """Mount the tree over what is there, and a private writable layer over both.

    The private layer is in the cache; where that file system cannot hold one (it is an overlay
    itself, or a network's), on a tmpfs of its own.
    """
    if shared.packed:
        image = os.path.join(folder, placement_records.IMAGE)
        os.mkdir(image, 0o700)
        packed_mount.mount(shared.path, image)
        try:
            lower = os.path.join(image, os.path.basename(shared.roots[root]))
            _overlay_over(lower, shared, root, target, folder, empty)
        finally:
            mount_calls.unmount(image)  # an overlay keeps its layers by itself
        return
    _overlay_over(shared.roots[root], shared, root, target, folder, empty)


def _overlay_over(
    lower: str, shared: SharedTree, root: str, target: str, folder: str, empty: bool
) -> None:
    layers = [lower]
    if not empty:
        if shared.deleted[root]:
            layers.append(_whiteouts(shared.deleted[root], target, os.path.join(folder, "gone")))
        layers.append(target)
    if any(c in path for path in (*layers, folder) for c in ",:\\"):
        raise NotSupportedError("a path holds a comma, colon or backslash, which mount(2) cannot")
    try:
        _mount_overlay(layers, target, folder)
    except OSError:
        private = os.path.join(folder, placement_records.PRIVATE)
        os.mkdir(private, 0o700)
        mount_calls.mount("tmpfs", private, "tmpfs", mount_calls.MS_NODEV, "mode=0700")
        try:
            _mount_overlay(layers, target, private)
        except BaseException:  # nothing else unmounts this one
            mount_calls.unmount(private)
            raise


def _mount_overlay(layers: Sequence[str], target: str, folder: str) -> None:
    upper, work = os.path.join(folder, placement_records.UPPER), os.path.join(folder, "work")
    for path in (upper, work):
        os.makedirs(path, mode=0o755, exist_ok=True)
    # The topmost layer gives the mounted root's own mode, owner and time.
    status = os.stat(layers[0])
    os.chown(upper, status.st_uid, status.st_gid)
    os.chmod(upper, stat.S_IMODE(status.st_mode))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
    options = f"lowerdir={':'.join(layers)},upperdir={upper},workdir={work}"
    mount_calls.mount("overlay", target, "overlay", 0, options)


def _whiteouts(deleted: Sequence[str], target: str, folder: str) -> str:
    """A layer that hides `deleted`: devices 0/0, as overlayfs defines whiteouts."""
    from bootseer.depsnap.restore.switch import Below

    os.mkdir(folder, 0o755)
    with Below(target) as below:
        for path in sorted(deleted):
            if below.status(path) is None or not _make_parents(below, folder, path):
                continue
            os.mknod(os.path.join(folder, path), stat.S_IFCHR | 0o600, os.makedev(0, 0))
    return folder


def _make_parents(below: Below, folder: str, path: str) -> bool:
    """Directories down to `path` with the target's metadata; False below a whiteout."""
    parts = path.split("/")[:-1]
    for number in range(len(parts)):
        part = "/".join(parts[: number + 1])
        full = os.path.join(folder, part)
        if os.path.lexists(full):
            if not os.path.isdir(full):
                return False
            continue
        status = below.status(part)
        assert status is not None
        os.mkdir(full)
        os.chown(full, status.uid, status.gid)
        os.chmod(full, stat.S_IMODE(status.mode))
        os.utime(full, ns=(status.mtime_ns, status.mtime_ns))
    return True


def unplace(target: str, cache_dir: str) -> bool:
    """Remove a mount or symlink of ours; True when there was one.

    What the job wrote into an overlay's private layer is removed with it. Links and copies of files
    are the target's own and stay, and so do mounts and links that others made since a reboot.
    Raises BusyError while something uses the mount.
    """
    target = absolute(target)
    record = placement_records.find(cache_dir, target)
    if record is None or record.target != target:
        return False
    alive = bool(record.alive)
    try:
        if alive:
            _undo(record.folder, target, record.form, record.created)
        else:
            placement_records.forget(record.folder)
            _remove_empty(target, record.created)
    except OSError as error:
        raise from_os_error(error, f"take away the {record.form} at {target}") from error
    return alive


def _undo(folder: str, target: str, form: Form, created: bool) -> None:
    if form == "symlink":
        if os.path.islink(target):
            os.unlink(target)
            if not created:
                os.mkdir(target)
    elif is_mounted(target):
        mount_calls.unmount(target)
    _remove_empty(target, created and form != "symlink")
    placement_records.forget(folder)


def _remove_empty(target: str, created: bool) -> None:
    if created:
        try:
            os.rmdir(target)
        except OSError:
            pass  # not there, or used by others since
