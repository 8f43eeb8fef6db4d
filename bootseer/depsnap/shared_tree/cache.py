"""Node-shared trees: snapshots unpacked once a node and placed many times (see `forms`).

Layout below the cache directory: `trees/<index digest>/` with one directory a root (`0`, `1`, …),
`index` (the archive's index frame) and `tree.json`, written last and renamed with the whole into
its final name, so that a tree is complete or absent; `trees/<digest>.lock`, held by flock while
unpacking. `trees/<index digest>.packed/` is the same as two files (see `format.packed_tree`) and
`tree.json`.

Protection. Nothing writes to a tree through an overlay or a read-only bind. An unprivileged
owner's tree has no write bits at all. Root, and jobs that were given hard links, can still write
into the shared files; so each use begins with a walk that compares every entry's inode, mode, size,
mtime and ctime with the *fingerprint* taken after unpacking. A ctime cannot be set by a program, so
any change is found, and a changed tree is discarded and unpacked again. Making hard links changes
ctimes: from then on the files' own are left out of the comparison. A tree of an earlier boot is
unpacked again too, since nothing was synced. Of a packed tree only the two files are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from bootseer.depsnap.restore import staging
from bootseer.depsnap.shared_tree import packed_mount
from bootseer.depsnap.shared_tree.placement_records import in_use
from bootseer.depsnap.types import (
    DIRECTORY,
    FILE,
    Digest,
    Limits,
    SharedTree,
    Step,
    UnpackPolicy,
    no_step,
)
from bootseer.errors import (
    AccessDeniedError,
    BusyError,
    DeadlineError,
    NotFoundError,
    from_os_error,
)
from bootseer.light_dataclasses import dataclass
from bootseer.system import file_lock
from bootseer.system.blocking_calls import call_in_process
from bootseer.system.processes import boot_id
from bootseer.system.regular_files import opener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from bootseer.depsnap.format.index_records import Index

_VERSION = 1
_RECORD = "tree.json"
_INDEX = "index"
_LINKED = "hardlinked"
_PACKED = ".packed"
_RECENT_NS = 600 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class TreeStatus:
    """One tree in the cache, for `gc`: size in bytes, last use in ns since 1970."""

    digest: Digest
    path: str
    size: int
    last_used_ns: int
    in_use: bool
    packed: bool = False


def folder_in(node_cache: str) -> str:
    """The cache directory of shared trees in a node's cache."""
    return os.path.join(node_cache, "trees")


def find(cache_dir: str, digest: Digest, *, packed: bool = False) -> SharedTree | None:
    """The complete, unmodified tree of this index digest, as files or `packed`, or None.

    A tree that was modified, or that is of an earlier boot, is discarded unless it is in use.
    """
    path = _path(cache_dir, digest, packed)
    record = _read_record(path)
    if record is None:
        return None
    if record["boot"] != boot_id() or not _is_unchanged(path, record):
        _discard_quietly(cache_dir, digest, packed)
        return None
    os.utime(os.path.join(path, _RECORD))
    return _tree_of(path, record)


def read_ahead_newest(cache_dir: str) -> None:
    """Have the kernel read what a mount of the most recently used packed tree needs.

    For a start that does not know its tree yet: on most nodes it is that one. Waits for nothing.
    """
    folder = os.path.join(os.path.abspath(cache_dir), "trees")
    used: dict[str, int] = {}
    with suppress(OSError):  # no cache yet, or a tree that is being removed
        for path in (os.path.join(folder, n) for n in os.listdir(folder) if _is_packed(n)):
            with suppress(OSError):  # a tree that is being made
                used[path] = _last_used_ns(path)
        if used:
            packed_mount.read_ahead(max(used, key=lambda path: used[path]))


def _last_used_ns(path: str) -> int:
    return os.stat(os.path.join(path, _RECORD)).st_mtime_ns


def _is_unchanged(path: str, record: dict[str, Any]) -> bool:
    try:
        if _is_packed(path):
            return bool(packed_mount.compute_fingerprint(path) == record["seal"])
        loose = os.path.lexists(os.path.join(path, _LINKED))
        return bool(_compute_fingerprint(path, record)[loose] == record["seal"][loose])
    except OSError:
        return False  # a part of it was removed, or cannot be read


def ensure(
    cache_dir: str,
    archive: str,
    digest: Digest,
    *,
    limits: Limits | None = None,
    jobs: int | None = None,
    allow_setuid: bool = False,
    owners: Collection[tuple[int, int]] | None = None,
    on_step: Step = no_step,
    packed: bool = False,
    stall_s: float | None = None,
) -> SharedTree:
    """`find`, else unpack `archive` once, under a lock per digest, while other processes wait.

    With `packed` an existing tree of files serves as well; else a packed one is made where this
    process can mount it, or one of files. Parameters as in `archive_restore.restore`. Raises
    CorruptDataError, NoSpaceError, AccessDeniedError, BusyError (a modified tree that is in use
    cannot be replaced), DeadlineError after `stall_s`.
    """
    tree = find(cache_dir, digest, packed=packed)
    if tree is None and packed:
        tree = find(cache_dir, digest)
    if tree is not None:
        return tree
    # A start that finds its tree never pays for these.
    from bootseer.depsnap.format.index import read_index
    from bootseer.depsnap.restore.unpack import default_jobs

    bounds = limits or Limits()
    folder = os.path.join(cache_dir, "trees")
    try:
        os.makedirs(folder, exist_ok=True)
        packed = packed and packed_mount.works_in(folder)
        path = _path(cache_dir, digest, packed)
        with _lock(path) as lock:
            tree = find(cache_dir, digest, packed=packed)
            if tree is not None:
                return tree
            if os.path.lexists(path):
                discard(cache_dir, digest, packed=packed)
            index = read_index(archive, expected_digest=digest, limits=bounds, stall_s=stall_s)
            allowed = frozenset(owners) if owners is not None else _default_owners()
            policy = UnpackPolicy(jobs or default_jobs(), allow_setuid, allowed)
            _unpack(archive, index, path, policy, bounds, lock, on_step, stall_s)
    except OSError as error:
        raise from_os_error(error, f"unpack into the cache {folder}") from error
    record = _read_record(path)
    if record is None:
        raise BusyError(f"the tree {path} went away at once; try again")
    return _tree_of(path, record, fresh=True)


def _default_owners() -> frozenset[tuple[int, int]]:
    return frozenset({(os.geteuid(), os.getegid()), (0, 0)})


def _unpack(
    archive: str,
    index: Index,
    path: str,
    policy: UnpackPolicy,
    limits: Limits,
    lock: int,
    step: Step,
    stall_s: float | None,
) -> None:
    from bootseer.depsnap.restore.unpack import unpack

    folder, name = os.path.split(path)
    new = os.path.join(folder, f".{name}.new")
    staging.remove_tree(new)
    os.mkdir(new, 0o755)
    packed = _is_packed(path)
    try:
        places = [new]
        if not packed:
            places = [os.path.join(new, str(number)) for number in range(len(index.roots))]
            for place in places:
                os.mkdir(place, 0o700)
        step("made")
        unpack(
            archive,
            index,
            places,
            policy,
            limits=limits,
            keep_open=[lock],
            packed=packed,
            stall_s=stall_s,
        )
        step("unpacked")
        if not packed:
            if os.geteuid() != 0:
                _remove_write_bits(index, places)
            _copy_index(archive, index, os.path.join(new, _INDEX), stall_s)
        _write_record(new, index, packed)
        step("fingerprinted")
        os.rename(new, path)
        step("published")
    except BaseException:  # a signal too: half a tree is of no use
        staging.remove_tree(new)
        raise


def _remove_write_bits(index: Index, places: list[str]) -> None:
    for root, place in zip(index.roots, places, strict=True):
        for number in range(root.first, root.first + root.count):
            if index.kind[number] in (FILE, DIRECTORY) and index.mode[number] & 0o222:
                path = os.path.join(place, index.path[number])
                os.chmod(path, os.lstat(path).st_mode & 0o7555)


def _copy_index(archive: str, index: Index, path: str, stall_s: float | None) -> None:
    def read() -> bytes:
        try:
            with open(archive, "rb", opener=opener) as source:
                source.seek(index.stored_bytes)
                return source.read()
        except OSError as error:
            raise from_os_error(error, f"read the archive {archive}") from error

    data = read() if stall_s is None else call_in_process(read, stall_s, archive)
    with open(path, "wb") as target:
        target.write(data)


def index_of(tree: SharedTree) -> Index:
    """The index that a tree was unpacked from; its frames are not there to be checked."""
    from bootseer.depsnap.format.index import read_detached_index  # a mount needs none

    return read_detached_index(
        os.path.join(tree.path, _INDEX), expected_digest=tree.digest, limits=Limits()
    )


def _write_record(path: str, index: Index, packed: bool) -> None:
    record: dict[str, Any] = {
        "version": _VERSION,
        "digest": index.digest,
        "boot": boot_id(),
        "roots": [[root.root, str(n), root.deleted] for n, root in enumerate(index.roots)],
        "size": index.raw_bytes,
    }
    record["seal"] = (
        packed_mount.compute_fingerprint(path) if packed else _compute_fingerprint(path, record)
    )
    with open(os.path.join(path, _RECORD), "w", encoding="ascii") as file:
        json.dump(record, file)


def _compute_fingerprint(path: str, record: dict[str, Any]) -> list[str]:
    from bootseer.depsnap.shared_tree.fingerprint import compute_fingerprint  # packed: not needed

    return compute_fingerprint([os.path.join(path, name) for _, name, _ in record["roots"]])


def _path(cache_dir: str, digest: Digest, packed: bool = False) -> str:
    return os.path.join(os.path.abspath(cache_dir), "trees", digest + _PACKED * packed)


def _is_packed(path: str) -> bool:
    return path.endswith(_PACKED)


def _read_record(path: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(path, _RECORD), "rb") as file:
            status = os.fstat(file.fileno())
            record = json.loads(file.read().decode("ascii"))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise AccessDeniedError(
            f"the tree {path} belongs to user {status.st_uid}; use a cache of your own"
        )
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        return None
    return record


def _tree_of(path: str, record: dict[str, Any], *, fresh: bool = False) -> SharedTree:
    return SharedTree(
        digest=Digest(record["digest"]),
        path=path,
        roots={root: os.path.join(path, name) for root, name, _ in record["roots"]},
        deleted={root: tuple(deleted) for root, _, deleted in record["roots"]},
        size=record["size"],
        fresh=fresh,
        packed=_is_packed(path),
    )


def mark_hardlinked(tree: SharedTree) -> None:
    """Record, before the first hard link is made, that files' ctimes mean nothing from now on."""
    with open(os.path.join(tree.path, _LINKED), "w", encoding="ascii"):
        pass


@contextmanager
def _lock(path: str) -> Iterator[int]:
    with file_lock.acquire(f"{path}.lock") as lock:
        try:
            yield lock.descriptor
        except DeadlineError:
            # A killed process that hangs shares this lock until it ends, and does nothing more.
            lock.release()
            raise


def list_trees(cache_dir: str) -> tuple[TreeStatus, ...]:
    """All complete trees in the cache, the least recently used first."""
    out = []
    folder = os.path.join(os.path.abspath(cache_dir), "trees")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return ()
    for name in names:
        path = os.path.join(folder, name)
        is_tree = not name.startswith(".") and os.path.isdir(path)
        record = _read_record(path) if is_tree else None
        if record is None:
            continue
        used = _last_used_ns(path)
        digest = Digest(name.removesuffix(_PACKED))
        use = in_use(cache_dir, digest)
        out.append(TreeStatus(digest, path, record["size"], used, use, _is_packed(path)))
    return tuple(sorted(out, key=lambda t: t.last_used_ns))


def discard(cache_dir: str, digest: Digest, *, packed: bool = False) -> int:
    """Remove a tree and return the bytes of its files.

    Raises BusyError while it is placed, NotFoundError when there is none. A tree
    that was found a moment ago may be about to be placed: `gc` keeps trees that were used in the
    last ten minutes (`recently_used`).
    """
    path = _path(cache_dir, digest, packed)
    if not os.path.lexists(path):
        raise NotFoundError(f"no tree {digest} in {cache_dir}")
    if in_use(cache_dir, digest):
        raise BusyError(f"the tree {path} is in use; end the jobs that use it first")
    record = _read_record(path)
    removed = f"{os.path.dirname(path)}/.{os.path.basename(path)}.gone-{os.getpid()}"
    try:
        os.rename(path, removed)
        staging.remove_tree(removed)
    except OSError as error:
        raise from_os_error(error, f"remove the tree {path}") from error
    return int(record["size"]) if record else 0


def recently_used(status: TreeStatus, now_ns: int) -> bool:
    """Whether a tree was found or placed in the last ten minutes."""
    return now_ns - status.last_used_ns < _RECENT_NS


def _discard_quietly(cache_dir: str, digest: Digest, packed: bool) -> None:
    try:
        discard(cache_dir, digest, packed=packed)
    except (BusyError, NotFoundError):
        pass  # in use, or another process was faster; in both cases it is not ours to remove
