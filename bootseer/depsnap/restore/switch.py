"""Carry out, finish or undo a switch: the part of a restore that a kill may cut anywhere.

Every action tells from the disk alone whether it is already done: a staged thing that is still in
the staging has not been moved; a backup that exists was made. So the whole list can be run again
forwards, or backwards, after a kill at any point.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
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
from bootseer.depsnap.types import HOST_XATTRS, XAttrs

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Step = Callable[[str], None]


class Below:
    """Descriptors of directories below a root, each part opened without following links."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, _FOLDER)
        self._path = ""
        self._descriptor = self._root

    def __enter__(self) -> Below:
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        os.close(self._root)

    @property
    def root(self) -> int:
        return self._root

    def parent(self, path: str) -> tuple[int, str]:
        """(descriptor of the path's directory, its last part); valid until the next call.

        Raises FileNotFoundError, NotADirectoryError, or OSError(ELOOP) where a link is in the way.
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
            if error.errno == errno.ELOOP:  # a link stands where a directory should
                return None
            raise
        return Status(now.st_mode, now.st_uid, now.st_gid, now.st_mtime_ns, now.st_dev)

    def attributes(self, path: str) -> XAttrs:
        """The extended attributes of a directory; none where they cannot be read, as in a scan."""
        try:
            with self.opened(path) as descriptor:
                names = [n for n in os.listxattr(descriptor) if not n.startswith(HOST_XATTRS)]
                return tuple((n, os.getxattr(descriptor, n)) for n in sorted(names))
        except OSError:
            return ()

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor of a directory itself."""
        folder, name = self.parent(path)
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class Switch:
    """One root's actions between its staging and its target. `kept` names directories that
    could not go because something else lies in them; `mtime_ns` is what an existing target's own
    mtime shall be at the end (the staging inside it changes that)."""

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
            self._appear(os.path.join(self.stage, TREE), self.target)
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
                self._appear(self.target, tree)
            return
        with Below(self.target) as target, Below(os.path.join(self.stage, TREE)) as staged:
            for number in range(len(self.actions) - 1, -1, -1):
                self._undo(self.actions[number], number, target, staged)
            for action in self.actions:  # what was moved back has changed its directories' times
                if action.old is not None:
                    _set_metadata(target, action.path, action.old)

    @staticmethod
    def _appear(source: str, target: str) -> None:
        """Rename a whole tree unless that is done; a target that came meanwhile is not replaced."""
        if not os.path.lexists(source):
            return
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "appeared meanwhile", target)
        source_fd = os.open(os.path.dirname(source), _FOLDER)
        try:
            target_fd = os.open(os.path.dirname(target), _FOLDER)
            try:
                names = (os.path.basename(source), os.path.basename(target))
                move(source_fd, names[0], target_fd, names[1])
            finally:
                os.close(target_fd)
        finally:
            os.close(source_fd)

    def _old(self, number: int) -> str:
        return os.path.join(self.stage, OLD, str(number))

    def _do(self, action: Action, number: int, target: Below, staged: Below) -> None:
        old = self._old(number)
        if action.what == DELETE:
            if not os.path.lexists(old):
                self._rename_away(action.path, old, target)
        elif action.what == REMOVE_DIRECTORY:
            self._rmdir(action.path, target)
        elif action.what == METADATA:
            assert action.new is not None
            _set_xattrs(target, action.path, action.new_xattrs)
            _set_metadata(target, action.path, action.new)
        elif staged.status(action.path) is not None:
            source, name = staged.parent(action.path)
            into, _ = target.parent(action.path)
            if action.what == SWAP:
                _back_up(into, name, old)
            move(source, name, into, name)

    def _undo(self, action: Action, number: int, target: Below, staged: Below) -> None:
        old = self._old(number)
        if action.what in (DELETE, SWAP):
            if os.path.lexists(old):
                into, name = target.parent(action.path)
                os.rename(old, name, dst_dir_fd=into)
                _forget(old)
        elif action.what == MOVE:
            if staged.status(action.path) is None and target.status(action.path) is not None:
                back, name = staged.parent(action.path)
                source, _ = target.parent(action.path)
                move(source, name, back, name)
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

    @staticmethod
    def _rename_away(path: str, old: str, target: Below) -> None:
        try:
            source, name = target.parent(path)
            os.rename(name, old, src_dir_fd=source)
        except FileNotFoundError:
            pass  # gone already, by another hand

    def _rmdir(self, path: str, target: Below) -> None:
        try:
            source, name = target.parent(path)
            os.rmdir(name, dir_fd=source)
        except (FileNotFoundError, NotADirectoryError):
            pass  # done before, and perhaps replaced since
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self.kept.append(path)


def move(source: int, name: str, into: int, new_name: str) -> None:
    """Rename; a directory that its owner may not write in must be made so to change its parent."""
    try:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=into)
    except PermissionError:
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode) or mode & 0o200:
            raise
        os.chmod(name, stat.S_IMODE(mode) | 0o200, dir_fd=source)
        try:
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=into)
        except BaseException:  # left writable it would not be what it was
            os.chmod(name, stat.S_IMODE(mode), dir_fd=source)
            raise
        os.chmod(new_name, stat.S_IMODE(mode), dir_fd=into)


def _back_up(folder: int, name: str, old: str) -> None:
    """Keep the old file under a second name, so that its own is never missing."""
    if os.path.lexists(old):
        return
    try:
        os.link(name, old, src_dir_fd=folder, follow_symlinks=False)
    except PermissionError:
        os.rename(
            name, old, src_dir_fd=folder
        )  # no links to other users' files (protected_hardlinks)
    except FileNotFoundError:
        pass


def _forget(old: str) -> None:
    """A rename between two links of one file does nothing and leaves both."""
    try:
        os.unlink(old)
    except FileNotFoundError:
        pass


def _set_xattrs(target: Below, path: str, wanted: XAttrs | None) -> None:
    """Give a directory these attributes and no others; None leaves it as it is."""
    if wanted is None:
        return
    names = {name for name, _ in wanted}
    with target.opened(path) as descriptor:
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
        pass  # another user's directory that lets us write: its time is not ours to set
