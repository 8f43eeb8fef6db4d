"""Read a directory tree's metadata fast, and tell what changed between two readings."""

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


def scan(root: str, *, exclude: Sequence[str] = (), one_file_system: bool = False) -> Tree:
    """Read everything below `root`; a root that does not exist gives an empty tree.

    `exclude` holds absolute paths (pruned with all below them) and, without a slash, shell
    patterns for names (`*.tmp`, `__pycache__`). Entries that vanish meanwhile are counted, not
    errors. With `one_file_system`, mount points are entered no further than their own directory.
    Raises AccessDeniedError or another mapped error when the root itself cannot be read.
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
    walker = _Walker(root, _excluder(exclude), top.st_dev if one_file_system else None)
    with _collector_paused():
        walker.add("", root, top)
        walker.walk()
    return Tree(root, walker.entries, walker.vanished, tuple(walker.unreadable))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: it would walk the growing records again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _excluder(exclude: Sequence[str]) -> Callable[[str, str], bool]:
    """A test of (absolute path, name); our own staging places are always out."""
    paths = frozenset(os.path.abspath(p) for p in exclude if "/" in p)
    patterns = [p for p in exclude if "/" not in p]
    if not patterns:
        return lambda path, name: path in paths or name.startswith(WORK_PREFIX)
    import fnmatch

    alike = [re.escape(WORK_PREFIX), *(fnmatch.translate(p) for p in patterns)]
    names = re.compile("|".join(alike)).match
    return lambda path, name: path in paths or names(name) is not None


class _Walker:
    """State of one scan; depth first, names sorted, so that the order is the archive's."""

    def __init__(self, root: str, excluded: Callable[[str, str], bool], device: int | None) -> None:
        self.root = root
        self.excluded = excluded
        self.device = device
        self.entries: dict[str, Entry] = {}
        self.vanished = 0
        self.unreadable: list[str] = []

    def walk(self) -> None:
        pending = [("", self.root)]
        while pending:
            relative, path = pending.pop()
            below = self.directory(relative, path)
            below.reverse()
            pending += below

    def directory(self, relative: str, path: str) -> list[tuple[str, str]]:
        """Add one directory's entries and return its sub-directories."""
        try:
            with os.scandir(path) as listing:
                found = sorted(listing, key=_name)
        except (FileNotFoundError, NotADirectoryError):
            self.vanished += 1
            return []
        except PermissionError:
            self.unreadable.append(path)
            return []
        prefix = f"{relative}/" if relative else ""
        below = []
        for item in found:
            if self.excluded(item.path, item.name):
                continue
            try:
                status = item.stat(follow_symlinks=False)
                entry = self.add(prefix + item.name, item.path, status)
            except (FileNotFoundError, NotADirectoryError):
                self.vanished += 1
                continue
            if entry.kind == DIRECTORY and (self.device is None or entry.dev == self.device):
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
            _xattrs(path) if kind in (FILE, DIRECTORY) else (),
            status.st_dev,
            status.st_ino,
            status.st_nlink if is_file else 1,
            status.st_ctime_ns,
            status.st_blocks if is_file else 0,
        )
        self.entries[relative] = entry
        return entry


def _name(item: os.DirEntry[str]) -> str:
    return item.name


def _xattrs(path: str) -> XAttrs:
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
    """What turned `before` into `after`, in `after`'s order.

    A file's content counts as changed when its mtime, size or inode differs, or when its ctime
    does and nothing visible in its metadata explains that: whoever writes and then puts the
    mtime back is still found. Directories differ by metadata only.
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
    gone = tuple(path for path in old if path not in new)
    parents = _parents(after, [e.path for e in added] + [c.entry.path for c in changed])
    return Delta(after.root, tuple(added), tuple(changed), gone, parents)


def _compare(old: Entry, new: Entry) -> Change | None:
    metadata = _visible(old) != _visible(new)
    if old.kind != new.kind or old.target != new.target:
        return Change(new, content=True)
    if new.kind == DIRECTORY:
        return Change(new, content=False) if metadata or old.mtime_ns != new.mtime_ns else None
    if (old.mtime_ns, old.size, old.ino, old.dev) != (new.mtime_ns, new.size, new.ino, new.dev):
        return Change(new, content=True)
    if metadata:
        return Change(new, content=False)
    if new.kind == FILE and old.ctime_ns != new.ctime_ns:
        # A changed number of links explains a ctime; nothing of this entry itself changed then.
        return None if old.nlink != new.nlink else Change(new, content=True)
    return None


def _visible(entry: Entry) -> tuple[int, int, int, XAttrs]:
    return entry.mode, entry.uid, entry.gid, entry.xattrs


def _parents(tree: Tree, paths: Sequence[str]) -> tuple[Entry, ...]:
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
