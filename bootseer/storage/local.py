"""A store in a directory: local, NFS or any file system with atomic link and rename.

Symbolic links are not followed, since they may lead out of the directory: `list` leaves them out,
as it does FIFOs, sockets and devices, which are never opened either.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
from collections.abc import Callable, Iterator, Sequence

from bootseer.context_managers import Committing
from bootseer.errors import (
    BusyError,
    CorruptDataError,
    NotSupportedError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import (
    HIDDEN,
    NO_HINTS,
    TEMPORARY,
    PreferredReads,
    Stat,
    Store,
    WriteHints,
    check_limit,
    check_name,
    truncated_error,
)
from bootseer.system.atomic import Draft, sync_folder
from bootseer.system.regular_files import irregularity, open_to_read, read_fully

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

MODE = 0o644  # of objects, less the process's umask
COPY_BYTES = 8 << 20
FOLDER_TRIES = 20
PREFERRED = PreferredReads(range_bytes=8 << 20, streams=4)


class LocalStore(Store):
    """`Store` over a directory, which the first write makes."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def _path(self, name: str) -> str:
        return f"{self.root}/{check_name(name)}"

    @property
    def preferred(self) -> PreferredReads:
        return PREFERRED

    def close(self) -> None:
        """Nothing is held between calls."""

    def local_path(self, name: str) -> str | None:
        return self._path(name)

    def stat(self, name: str) -> Stat:
        path = self._path(name)
        try:
            status = os.lstat(path)
            if stat_module.S_ISLNK(status.st_mode):
                raise NotSupportedError(
                    f"{name} in {self.url} is a symbolic link to {os.readlink(path)}, and stores "
                    "follow none; name its target"
                )
            kind = irregularity(status.st_mode)
            if kind:
                raise CorruptDataError(
                    f"{name} in {self.url} is {kind}, and stores hold files; remove it"
                )
            return _stat(name, status)
        except OSError as error:
            raise from_os_error(error, f"look at {name} in {self.url}") from error

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        try:
            fd = open_to_read(self._path(name), os.O_NOFOLLOW)
            try:
                _fill(fd, name, offset, memoryview(buffer).cast("B"))
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"read {name} in {self.url}") from error

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        try:
            fd = open_to_read(self._path(name), os.O_NOFOLLOW)
            try:
                for number, buffer in enumerate(buffers):
                    if attempt.cancelled:
                        raise StoreUnavailableError(f"reading {name} in {self.url} was given up")
                    _fill(fd, name, offset, buffer)
                    offset += len(buffer)
                    attempt.received_bytes += len(buffer)
                    if filled is not None:
                        filled(number)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"read {name} in {self.url}") from error

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        size = self.stat(name).size_bytes
        check_limit(f"{name} in {self.url}", size, limit_bytes)
        buffer = bytearray(size)
        self.read_range(name, 0, buffer)
        return bytes(buffer)

    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        return self._publish(name, data, keep_existing=True, sync=durable)

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._publish(name, data, keep_existing=False, sync=durable)

    def create_from_file(self, name: str, path: str) -> bool:
        return self._publish(name, b"", keep_existing=True, source=path)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
        try:
            return LocalWriter(self, name, self._draft(name))
        except OSError as error:
            raise from_os_error(error, f"write {name} in {self.url}") from error

    def _draft(self, name: str) -> Draft:
        path = self._path(name)
        return _in_folder_of(path, Draft(path, mode=MODE, prefix=TEMPORARY).open)

    def _publish(
        self,
        name: str,
        data: bytes,
        *,
        keep_existing: bool,
        source: str | None = None,
        sync: bool = True,
    ) -> bool:
        try:
            if keep_existing and os.path.lexists(self._path(name)):
                return False
            with self._draft(name) as draft:
                draft.write(data)
                if source is not None:
                    _copy(source, draft)
                if keep_existing:
                    return draft.publish_new(sync=sync)
                draft.publish(sync=sync)
        except OSError as error:
            raise from_os_error(error, f"write {name} in {self.url}") from error
        return True

    def list(self, folder: str) -> Iterator[Stat]:
        path = self._path(folder) if folder else self.root
        prefix = f"{folder}/" if folder else ""
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith(HIDDEN):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    if not entry.is_symlink() and not irregularity(status.st_mode):
                        yield _stat(prefix + entry.name, status)
        except OSError as error:
            raise from_os_error(error, f"list {folder or 'the root'} of {self.url}") from error

    def temporaries(self, folder: str) -> Iterator[Stat]:
        path = self._path(folder) if folder else self.root
        prefix = f"{folder}/" if folder else ""
        try:
            names = [n for n in os.listdir(path) if n.startswith(HIDDEN)]
        except OSError as error:
            raise from_os_error(error, f"list {folder or 'the root'} of {self.url}") from error
        for name in names:
            try:
                yield _stat(prefix + name, os.lstat(f"{path}/{name}"))
            except FileNotFoundError:
                continue

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        try:
            _in_folder_of(target, lambda: os.rename(source, target))
            sync_folder(os.path.dirname(target))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and os.path.isdir(source):
                raise BusyError(f"{new} in {self.url} is taken; choose another name") from error
            raise from_os_error(error, f"rename {old} to {new} in {self.url}") from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            try:
                os.unlink(path)
            except (IsADirectoryError, PermissionError):
                if not os.path.isdir(path):
                    raise
                os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, f"delete {name} in {self.url}") from error

    def delete_tree(self, folder: str) -> None:
        path = self._path(folder)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                import shutil  # brings compressors along

                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, f"delete {folder} in {self.url}") from error

    def mkdir(self, folder: str) -> None:
        path = self._path(folder)
        try:
            _in_folder_of(path, lambda: os.makedirs(path, exist_ok=True))
        except OSError as error:
            raise from_os_error(error, f"make the folder {folder} in {self.url}") from error


class LocalWriter(Committing):
    """`ObjectWriter` under a temporary name in the object's folder; `close` syncs and renames."""

    def __init__(self, store: LocalStore, name: str, draft: Draft) -> None:
        self._store, self._name, self._draft = store, name, draft
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._draft.write(data)
        except OSError as error:
            raise self._map_error(error) from error

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._draft.publish()
        except OSError as error:
            raise self._map_error(error) from error

    def abort(self) -> None:
        self._open = False
        self._draft.discard()

    def _map_error(self, error: OSError) -> Exception:
        return from_os_error(error, f"write {self._name} in {self._store.url}")


def _in_folder_of(path: str, act: Callable[[], T]) -> T:
    """Act in the folder of a path, which is made, and again where it was removed meanwhile.

    Another writer removes a folder that it finds empty, as ours is until we have acted.
    """
    for left in reversed(range(FOLDER_TRIES)):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return act()
        except (FileNotFoundError, FileExistsError):  # the latter: `makedirs` saw it go
            if not left:
                raise
    raise AssertionError("unreachable")


def _stat(name: str, status: os.stat_result) -> Stat:
    if stat_module.S_ISDIR(status.st_mode):
        return Stat(name, 0, status.st_mtime, True)
    version = f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}:{status.st_size}"
    return Stat(name, status.st_size, status.st_mtime, False, version)


def _fill(fd: int, name: str, offset: int, view: memoryview) -> None:
    done = read_fully(fd, view, offset)
    if done < len(view):
        raise truncated_error(name, offset + done, offset + len(view))


def _copy(source: str, draft: Draft) -> None:
    with open(source, "rb") as read, open(draft.fd, "wb", buffering=0, closefd=False) as out:
        import shutil

        shutil.copyfileobj(read, out, COPY_BYTES)
