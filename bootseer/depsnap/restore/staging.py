"""The staging directory next to or inside a target, where a restore unpacks before it switches in.

An absent target is staged in its parent, as `.bootseer-<name>.stage`, and appears by one rename. An
existing one is staged inside itself, as `.bootseer-stage`, so that the staging is on the same file
system even where the target is a mount point. The directory is locked by flock while a process
works in it: a forked worker that outlives its parent holds the lock too.
"""

from __future__ import annotations

import os
import stat

from bootseer.depsnap.types import WORK_PREFIX
from bootseer.errors import AccessDeniedError, BusyError, UsageError, from_os_error
from bootseer.light_dataclasses import dataclass
from bootseer.system import file_lock

TREE = "tree"
OLD = "old"
_TIME = "mtime_ns"
_INSIDE = f"{WORK_PREFIX}stage"


def path_for(target: str, *, absent: bool) -> str:
    """Where a target, absent or existing, is staged."""
    if not absent:
        return os.path.join(target, _INSIDE)
    parent, name = os.path.split(target)
    return os.path.join(parent, f"{WORK_PREFIX}{name}.stage")


def paths_for(target: str) -> tuple[str, str]:
    """Both paths where a target may be, or may have been, staged."""
    return path_for(target, absent=True), path_for(target, absent=False)


def is_staged(target: str) -> bool:
    """Whether there is a staging of a target, whose restore runs or was killed."""
    return any(map(os.path.lexists, paths_for(target)))


@dataclass(slots=True)
class Stage:
    """A locked staging directory. `mtime_ns` is that of an existing target before the staging."""

    target: str
    path: str
    absent: bool
    mtime_ns: int
    descriptor: int

    @property
    def tree(self) -> str:
        """The directory to unpack into."""
        return os.path.join(self.path, TREE)

    def close(self) -> None:
        """Release the lock and leave the directory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def remove(self) -> None:
        """Delete the staging; the lock is held until it is deleted. May be called twice."""
        if self.descriptor >= 0:
            remove_tree(self.path)
            if not self.absent:
                _restore_mtime(self.target, self.mtime_ns)
            self.close()


def make(target: str) -> Stage:
    """Create and lock the staging for `target`, emptied of what a killed restore left there.

    Raises UsageError for a target that is no directory, BusyError while another restore works
    there, AccessDeniedError or NoSpaceError as the file system says.
    """
    try:
        absent, mtime_ns = _check_target(target)
        if absent:
            os.makedirs(os.path.dirname(target), exist_ok=True)
        path = path_for(target, absent=absent)
        descriptor = _make_locked(path)
        try:
            remove_contents(path)
            _make_private(path)
            with open(os.path.join(path, _TIME), "w", encoding="ascii") as file:
                file.write(str(mtime_ns))
            os.mkdir(os.path.join(path, TREE), 0o700)
        except BaseException:  # else the lock stays until this process ends
            os.close(descriptor)
            raise
    except OSError as error:
        raise from_os_error(error, f"restore into {target}") from error
    return Stage(target, path, absent, mtime_ns, descriptor)


def of_killed_restore(target: str, path: str) -> Stage:
    """The staging at `path` of a restore that was killed before its commit, to be removed."""
    try:
        with open(os.path.join(path, _TIME), encoding="ascii") as file:
            mtime_ns = int(file.read())
    except (FileNotFoundError, ValueError):
        mtime_ns = os.stat(os.path.dirname(path)).st_mtime_ns
    absent = path == path_for(target, absent=True)
    return Stage(target, path, absent, mtime_ns, os.open(path, os.O_RDONLY))


def _check_target(target: str) -> tuple[bool, int]:
    """(whether the target is absent, its mtime). Raises UsageError for what is no directory."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return True, 0
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"the target {target} is a symlink; name the directory it points to")
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"the target {target} is no directory; choose another")
    return False, status.st_mtime_ns


def _make_locked(path: str) -> int:
    """Make a directory, unless it exists, and lock it; the descriptor that holds the lock."""
    while True:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            continue  # its owner ended between our two calls
        try:
            check_own(descriptor, path)
            lock(descriptor, path)
            if file_lock.is_named(descriptor, path):
                return descriptor
        except BaseException:  # else the lock stays until this process ends
            os.close(descriptor)
            raise
        os.close(descriptor)


def check_own(descriptor: int, path: str) -> None:
    """Raise AccessDeniedError where another user has made, or may write to, a staging."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise AccessDeniedError(
            f"{path} belongs to user {status.st_uid} or others may write there; have it removed"
        )


def lock(descriptor: int, path: str) -> None:
    """Lock or raise BusyError."""
    try:
        file_lock.lock(descriptor, limit_s=0)
    except BlockingIOError as error:
        raise BusyError(f"another restore works in {path}; wait for it to end") from error


def _make_private(path: str) -> None:
    """Remove what a parent's setgid bit or default ACL would make of the entries staged here."""
    os.chown(path, -1, os.getegid())
    os.chmod(path, 0o700)
    try:
        os.removexattr(path, "system.posix_acl_default")
    except OSError:
        pass  # the usual case: there is none, or the file system has no ACLs


def _restore_mtime(target: str, mtime_ns: int) -> None:
    try:
        os.utime(target, ns=(os.stat(target).st_atime_ns, mtime_ns))
    except OSError:
        pass  # another user's directory: only its owner may set its time


def remove_tree(path: str) -> None:
    """Delete a directory of ours and all below it, also read-only directories."""
    remove_contents(path)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass


def remove_contents(path: str) -> None:
    """Delete all below `path` without ever following a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return
    except PermissionError:
        os.chmod(path, 0o700, follow_symlinks=True)
        descriptor = os.open(path, flags)
    try:
        _empty(descriptor)
    finally:
        os.close(descriptor)


def _empty(descriptor: int) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.geteuid() != 0:
        os.fchmod(descriptor, 0o700)
    with os.scandir(descriptor) as listing:
        entries = [(e.name, e.is_dir(follow_symlinks=False)) for e in listing]
    for name, is_directory in entries:
        if not is_directory:
            os.unlink(name, dir_fd=descriptor)
            continue
        try:
            below = os.open(name, flags, dir_fd=descriptor)
        except PermissionError:
            os.chmod(name, 0o700, dir_fd=descriptor)
            below = os.open(name, flags, dir_fd=descriptor)
        try:
            _empty(below)
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=descriptor)
