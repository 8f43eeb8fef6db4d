"""Read a directory tree's metadata fast, and compare two readings of it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence

from bootseer.depsnap.capture.entries import Change, Delta, Entry, Tree
from bootseer.depsnap.types import DIRECTORY, FILE, HOST_XATTRS, OTHER, SYMLINK, WORK_PREFIX, XAttrs
from bootseer.errors import from_os_error

_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: SYMLINK}


def scan(root: str, *, exclude: Sequence[str] = ()) -> Tree:
    """Read everything below `root`; a root that does not exist gives an empty tree.

    `exclude` holds absolute paths (left out with all below them) and, without a slash, shell
    patterns for names (`*.tmp`, `__pycache__`). Entries that vanish meanwhile are counted, not
    errors. Raises AccessDeniedError or another mapped error when the root itself cannot be read.
    """
    root = os.path.abspath(root)
    try:
        top = os.lstat(root)
    except FileNotFoundError:
        return Tree(root, {})
    except OSError as error:
        raise from_os_error(error, f"scan {root}") from error
    if not stat.S_ISDIR(top.st_mode):
        raise from_os_error(NotADirectoryError(20, "not a directory"), f"scan {root}")
    walker = _Walker(root, _excluded_by(exclude))
    with _collector_paused():
        walker.add("", root, top)
        walker.walk()
    return Tree(root, walker.entries, walker.vanished)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection, which would walk the growing records again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _excluded_by(exclude: Sequence[str]) -> Callable[[str, str], bool]:
    """A test of (absolute path, name); it excludes our own staging directories as well."""
    paths = frozenset(os.path.abspath(p) for p in exclude if "/" in p)
    patterns = [p for p in exclude if "/" not in p]
    if not patterns:
        return lambda path, name: path in paths or name.startswith(WORK_PREFIX)
    import fnmatch

    alternatives = [re.escape(WORK_PREFIX), *(fnmatch.translate(p) for p in patterns)]
    match = re.compile("|".join(alternatives)).match
    return lambda path, name: path in paths or match(name) is not None


class _Walker:
    """State of one scan; depth first, names sorted, so that the order is the archive's."""

    def __init__(self, root: str, excluded: Callable[[str, str], bool]) -> None:
        self.root = root
        self.excluded = excluded
        self.entries: dict[str, Entry] = {}
        self.vanished = 0

    def walk(self) -> None:
        pending = [("", self.root)]
        while pending:
            relative, path = pending.pop()
            below = self._add_entries_of(relative, path)
            below.reverse()
            pending += below

    def _add_entries_of(self, relative: str, path: str) -> list[tuple[str, str]]:
        """Add one directory's entries and return its sub-directories."""
        try:
            with os.scandir(path) as listing:
                items = sorted(listing, key=_name_of)
        except (FileNotFoundError, NotADirectoryError):
            self.vanished += 1
            return []
        except PermissionError:
            return []
        prefix = f"{relative}/" if relative else ""
        below = []
        for item in items:
            if self.excluded(item.path, item.name):
                continue
            try:
                status = item.stat(follow_symlinks=False)
                entry = self.add(prefix + item.name, item.path, status)
            except (FileNotFoundError, NotADirectoryError):
                self.vanished += 1
                continue
            if entry.kind == DIRECTORY:
                below.append((entry.path, item.path))
        return below

    def add(self, relative: str, path: str, status: os.stat_result) -> Entry:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), OTHER)
        is_file = kind == FILE
        entry = Entry(
            relative,
            kind,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            status.st_size if is_file else 0,
            os.readlink(path) if kind == SYMLINK else "",
            _read_xattrs(path) if kind in (FILE, DIRECTORY) else (),
            status.st_dev,
            status.st_ino,
            status.st_nlink if is_file else 1,
            status.st_ctime_ns,
            status.st_blocks if is_file else 0,
        )
        self.entries[relative] = entry
        return entry


def _name_of(item: os.DirEntry[str]) -> str:
    return item.name


def _read_xattrs(path: str) -> XAttrs:
    try:
        names = os.listxattr(path, follow_symlinks=False)
        if not names:
            return ()
        kept = sorted(n for n in names if not n.startswith(HOST_XATTRS))
        return tuple((n, os.getxattr(path, n, follow_symlinks=False)) for n in kept)
    except FileNotFoundError:
        raise
    except OSError:
        return ()  # a file system without xattrs, or one that vanished between the two calls


def diff(before: Tree, after: Tree) -> Delta:
    """The changes from `before` to `after`, in `after`'s order.

    A file's content counts as changed when its mtime, size or inode differs, or when its ctime
    does and nothing visible in its metadata explains that: so a write is found even where the
    mtime was set back. Directories differ by metadata only.
    """
    added, changed = [], []
    old, new = before.entries, after.entries
    for path, entry in new.items():
        previous = old.get(path)
        if previous is None:
            added.append(entry)
        elif previous != entry:
            change = _compare(previous, entry)
            if change is not None:
                changed.append(change)
    deleted = tuple(path for path in old if path not in new)
    parents = _parents_of(after, [e.path for e in added] + [c.entry.path for c in changed])
    return Delta(after.root, tuple(added), tuple(changed), deleted, parents)


def _compare(old: Entry, new: Entry) -> Change | None:
    metadata = _metadata_of(old) != _metadata_of(new)
    if old.kind != new.kind or old.target != new.target:
        return Change(new, content=True)
    if new.kind == DIRECTORY:
        return Change(new, content=False) if metadata or old.mtime_ns != new.mtime_ns else None
    if (old.mtime_ns, old.size, old.ino, old.dev) != (new.mtime_ns, new.size, new.ino, new.dev):
        return Change(new, content=True)
    if metadata:
        return Change(new, content=False)
    if new.kind == FILE and old.ctime_ns != new.ctime_ns:
        # A changed number of links explains a ctime; this entry itself did not change then.
        return None if old.nlink != new.nlink else Change(new, content=True)
    return None


def _metadata_of(entry: Entry) -> tuple[int, int, int, XAttrs]:
    return entry.mode, entry.uid, entry.gid, entry.xattrs


def _parents_of(tree: Tree, paths: Sequence[str]) -> tuple[Entry, ...]:
    """The directories above `paths` that are not among them, outermost first."""
    have = set(paths)
    missing: set[str] = set()
    for path in paths:
        parent = path
        while parent:
            parent = parent.rpartition("/")[0]
            if parent in have or parent in missing:
                break
            missing.add(parent)
    return tuple(tree.entries[p] for p in sorted(missing) if p in tree.entries)
