"""Carry out, finish or undo a switch: the part of a restore that a kill may interrupt anywhere.

The disk alone shows of every action whether it is already done: what is still in the staging has
not been moved; a backup that exists was made. So the whole list can be run again forwards, or
backwards, after a kill at any point.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bootseer.depsnap.restore.staging import OLD, TREE
from bootseer.depsnap.restore.switch_plan import (
    DELETE,
    METADATA,
    MOVE,
    REMOVE_DIRECTORY,
    SWAP,
    Action,
    Status,
)
from bootseer.depsnap.restore.unpack_worker import set_xattrs
from bootseer.depsnap.types import HOST_XATTRS, Step, XAttrs

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Below:
    """Descriptors of directories below a root, each part opened without following links.

    A context manager; the directory opened last is remembered.
    """

    def __init__(self, root: str) -> None:
        self._root_path = root
        self._root = self._descriptor = -1
        self._path = ""

    def __enter__(self) -> Below:
        self._root = self._descriptor = os.open(self._root_path, _FOLDER)
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        os.close(self._root)

    @property
    def root(self) -> int:
        """The root's own descriptor."""
        return self._root

    def parent(self, path: str) -> tuple[int, str]:
        """(descriptor of the path's directory, its last part); valid until the next call.

        Raises FileNotFoundError, NotADirectoryError, or OSError(ELOOP) where a link is on the path.
        """
        folder, _, name = path.rpartition("/")
        if folder != self._path:
            self._leave()
            current = self._root
            for part in folder.split("/") if folder else ():
                try:
                    following = os.open(part, _FOLDER, dir_fd=current)
                finally:
                    if current != self._root:
                        os.close(current)
                current = following
            self._path, self._descriptor = folder, current
        return self._descriptor, name or "."

    def _leave(self) -> None:
        if self._descriptor != self._root:
            os.close(self._descriptor)
        self._path, self._descriptor = "", self._root

    def status(self, path: str) -> Status | None:
        """The status of a path, None when absent or not below real directories."""
        try:
            descriptor, name = self.parent(path)
            now = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link where a directory should be
                return None
            raise
        return Status(now.st_mode, now.st_uid, now.st_gid, now.st_mtime_ns, now.st_dev)

    def attributes(self, path: str) -> XAttrs:
        """The extended attributes of a directory; as in a scan, none where they are unreadable."""
        try:
            with self.open_directory(path) as descriptor:
                names = [n for n in os.listxattr(descriptor) if not n.startswith(HOST_XATTRS)]
                return tuple((n, os.getxattr(descriptor, n)) for n in sorted(names))
        except OSError:
            return ()

    @contextmanager
    def open_directory(self, path: str) -> Iterator[int]:
        """Open a directory itself; gives its descriptor."""
        folder, name = self.parent(path)
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class Switch:
    """One root's actions between its staging and its target.

    `kept` names directories that could not be removed because they hold something else;
    `mtime_ns` is the mtime that an existing target is to have at the end (the staging inside it
    changes that).
    """

    target: str
    stage: str
    actions: Sequence[Action]
    absent: bool = False
    mtime_ns: int = 0
    kept: list[str] = field(default_factory=list)

    def forward(self, step: Step) -> None:
        """Do all that is not done. Raises OSError, with part of it done."""
        if self.absent:
            step(f"appear {self.target}")
            _rename_tree(os.path.join(self.stage, TREE), self.target)
            return
        with Below(self.target) as target, Below(os.path.join(self.stage, TREE)) as staged:
            for number, action in enumerate(self.actions):
                step(f"{action.what} {action.path}")
                self._do(action, number, target, staged)

    def backward(self) -> None:
        """Undo all that is done, last first. Raises OSError."""
        if self.absent:
            tree = os.path.join(self.stage, TREE)
            if not os.path.lexists(tree):
                _rename_tree(self.target, tree)
            return
        with Below(self.target) as target, Below(os.path.join(self.stage, TREE)) as staged:
            for number in range(len(self.actions) - 1, -1, -1):
                self._undo(self.actions[number], number, target, staged)
            for action in self.actions:  # moving things back changed their directories' times
                if action.old is not None:
                    _set_metadata(target, action.path, action.old)

    def _backup(self, number: int) -> str:
        return os.path.join(self.stage, OLD, str(number))

    def _do(self, action: Action, number: int, target: Below, staged: Below) -> None:
        backup = self._backup(number)
        if action.what == DELETE:
            if not os.path.lexists(backup):
                _move_to_backup(target, action.path, backup)
        elif action.what == REMOVE_DIRECTORY:
            self._remove_directory(action.path, target)
        elif action.what == METADATA:
            assert action.new is not None
            _set_xattrs(target, action.path, action.new_xattrs)
            _set_metadata(target, action.path, action.new)
        elif staged.status(action.path) is not None:
            source, name = staged.parent(action.path)
            into, _ = target.parent(action.path)
            if action.what == SWAP:
                _link_backup(into, name, backup)
            _move(source, name, into, name)

    def _undo(self, action: Action, number: int, target: Below, staged: Below) -> None:
        backup = self._backup(number)
        if action.what in (DELETE, SWAP):
            if os.path.lexists(backup):
                into, name = target.parent(action.path)
                os.rename(backup, name, dst_dir_fd=into)
                _remove_backup(backup)
        elif action.what == MOVE:
            if staged.status(action.path) is None and target.status(action.path) is not None:
                back, name = staged.parent(action.path)
                source, _ = target.parent(action.path)
                _move(source, name, back, name)
        elif action.what == REMOVE_DIRECTORY:
            assert action.old is not None
            if target.status(action.path) is None:
                into, name = target.parent(action.path)
                os.mkdir(name, 0o700, dir_fd=into)
            _set_metadata(target, action.path, action.old)
        elif action.what == METADATA:
            assert action.old is not None
            _set_xattrs(target, action.path, action.old_xattrs)
            _set_metadata(target, action.path, action.old)

    def _remove_directory(self, path: str, target: Below) -> None:
        try:
            source, name = target.parent(path)
            os.rmdir(name, dir_fd=source)
        except (FileNotFoundError, NotADirectoryError):
            pass  # removed before, and perhaps replaced since
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self.kept.append(path)


def _rename_tree(source: str, target: str) -> None:
    """Rename a whole tree unless that is done; raises FileExistsError for a target that exists."""
    if not os.path.lexists(source):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "appeared meanwhile", target)
    source_fd = os.open(os.path.dirname(source), _FOLDER)
    try:
        target_fd = os.open(os.path.dirname(target), _FOLDER)
        try:
            _move(source_fd, os.path.basename(source), target_fd, os.path.basename(target))
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def _move(source: int, name: str, into: int, new_name: str) -> None:
    """Rename; a directory is made writable meanwhile where it must be to change its parent."""
    try:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=into)
    except PermissionError:
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode) or mode & 0o200:
            raise
        os.chmod(name, stat.S_IMODE(mode) | 0o200, dir_fd=source)
        try:
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=into)
        except BaseException:  # it must not stay writable
            os.chmod(name, stat.S_IMODE(mode), dir_fd=source)
            raise
        os.chmod(new_name, stat.S_IMODE(mode), dir_fd=into)


def _move_to_backup(target: Below, path: str, backup: str) -> None:
    try:
        folder, name = target.parent(path)
        os.rename(name, backup, src_dir_fd=folder)
    except FileNotFoundError:
        pass  # another program has removed it


def _link_backup(folder: int, name: str, backup: str) -> None:
    """Give the old file a second name, so that its own is never missing."""
    if os.path.lexists(backup):
        return
    try:
        os.link(name, backup, src_dir_fd=folder, follow_symlinks=False)
    except PermissionError:  # no links to other users' files (protected_hardlinks)
        os.rename(name, backup, src_dir_fd=folder)
    except FileNotFoundError:
        pass


def _remove_backup(backup: str) -> None:
    """Remove the second name: a rename between two links of one file does nothing."""
    try:
        os.unlink(backup)
    except FileNotFoundError:
        pass


def _set_xattrs(target: Below, path: str, wanted: XAttrs | None) -> None:
    """Set these attributes of a directory and remove all others; None leaves it as it is."""
    if wanted is None:
        return
    names = {name for name, _ in wanted}
    with target.open_directory(path) as descriptor:
        for name in os.listxattr(descriptor):
            if name not in names and not name.startswith(HOST_XATTRS):
                try:
                    os.removexattr(descriptor, name)
                except PermissionError:
                    pass  # a label of the system's own
        set_xattrs(descriptor, wanted)


def _set_metadata(target: Below, path: str, wanted: tuple[int, int, int, int]) -> None:
    mode, uid, gid, mtime_ns = wanted
    folder, name = target.parent(path)
    now = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if os.geteuid() == 0 and (now.st_uid, now.st_gid) != (uid, gid):
        os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    if now.st_mode & 0o7777 != mode:
        os.chmod(name, mode, dir_fd=folder)
    try:
        os.utime(name, ns=(now.st_atime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)
    except PermissionError:
        pass  # another user's directory that lets us write: only its owner may set its time
