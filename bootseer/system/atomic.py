"""Files that appear whole or not at all, whichever process is killed meanwhile.

A *draft* is a file with a temporary name in the folder of its final one. It is written, synced,
named, and the folder is synced; then the file survives a power cut too. All functions raise the
operating system's errors, for the caller to say what was being written.
"""

from __future__ import annotations

import errno
import os
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

PREFIX = ".tmp-"  # hidden from listings


class Draft:
    """A file being written next to its final name; a context manager that removes what it leaves.

    `open` creates it, and so does entering where that has not been done.

    `mode` are its permission bits, less the process's umask, or to the letter with `exact_mode`.
    The temporary name begins with `prefix`.
    """

    def __init__(
        self, path: str, *, mode: int = 0o666, exact_mode: bool = False, prefix: str = PREFIX
    ) -> None:
        self.path = path
        self.folder = os.path.dirname(path) or "."
        self.fd = -1
        self._mode, self._exact_mode, self._prefix = mode, exact_mode, prefix
        self._temporary = ""

    def open(self) -> Self:
        """Create the file; nothing is left after an error."""
        temporary = os.path.join(self.folder, self._prefix + os.urandom(8).hex())
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.fd = os.open(temporary, flags, self._mode)
        self._temporary = temporary
        if self._exact_mode:
            try:
                os.fchmod(self.fd, self._mode)
            except OSError:
                self.discard()
                raise
        return self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.fd, view) :]

    def publish(self, *, sync: bool = True) -> None:
        """Give the file its name, in place of one that has it. Nothing is left after an error.

        `sync=False` is for what its readers check, or can do without after a power cut.
        """
        try:
            self._end(sync=sync)
            os.rename(self._temporary, self.path)
        except OSError:
            self.discard()
            raise
        self._temporary = ""
        if sync:
            sync_folder(self.folder)

    def publish_new(self, *, sync: bool = True) -> bool:
        """Give the file its name unless that is taken; False, and no file of ours, when it is."""
        try:
            self._end(sync=sync)
            created = _link(self._temporary, self.path)
        finally:
            self.discard()
        if created and sync:
            sync_folder(self.folder)
        return created

    def discard(self) -> None:
        """Remove what was not published; twice is safe, and so is after `publish`."""
        self._close()
        if self._temporary:
            try:
                os.unlink(self._temporary)
            except OSError:
                pass  # renamed away, or the medium is gone: nothing more can be done
            self._temporary = ""

    def _end(self, *, sync: bool) -> None:
        try:
            if sync:
                os.fsync(self.fd)
        finally:
            self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self if self._temporary else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()


def replace_file(
    path: str,
    data: bytes | bytearray | memoryview,
    *,
    mode: int = 0o666,
    exact_mode: bool = False,
    prefix: str = PREFIX,
    sync: bool = True,
) -> None:
    """Write a file, whether or not there is one; readers see the old or the new."""
    with Draft(path, mode=mode, exact_mode=exact_mode, prefix=prefix) as draft:
        draft.write(data)
        draft.publish(sync=sync)


def sync_folder(folder: str) -> None:
    """Make the names in a folder survive a power cut, as far as its file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot
            raise
    finally:
        os.close(fd)


def _link(temporary: str, final: str) -> bool:
    """Give the file its final name unless that is taken; False when it is.

    Where hard links are not supported, an exclusively created file claims the name and the
    rename then fills it; a reader in between sees an empty object, which no format of ours is.
    """
    try:
        os.link(temporary, final)
        return True
    except FileExistsError:
        # A network file system may repeat a request whose first answer was lost: ours, then.
        try:
            return os.path.samefile(temporary, final)
        except FileNotFoundError:
            return False  # somebody else's, which is gone by now
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    try:
        os.close(os.open(final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    os.rename(temporary, final)
    return True
