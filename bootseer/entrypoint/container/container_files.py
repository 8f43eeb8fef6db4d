"""What a container will find at a path, before it runs: in volumes, or else in its image."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Sequence
from typing import BinaryIO

from bootseer.errors import UsageError, from_os_error
from bootseer.imageprefetch.run import podman_options
from bootseer.light_dataclasses import dataclass
from bootseer.system.mount_calls import BENEATH, IN_ROOT, NO_SYMLINKS, open_in
from bootseer.system.paths import is_within

MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ContainerFiles:
    """The files of a container on the image's tree `tree`, whose commands begin in `directory`.

    `volumes` are pairs of a path in the container and the path on this node that is shown there.
    """

    tree: str
    directory: str
    volumes: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tree: str, options: Sequence[str], directory: str) -> ContainerFiles:
        """By podman's options, which may name another directory than the image's."""
        volumes = podman_options.bind_mounts(options)
        longest_first = sorted(volumes, key=lambda pair: len(pair[0]), reverse=True)
        return cls(
            tree,
            podman_options.working_directory(options) or directory or "/",
            tuple(longest_first),
        )

    def join(self, path: str, *, folder: str = "") -> str:
        """The absolute path in the container of one that is named in a folder."""
        return posixpath.normpath(posixpath.join(self.directory, folder, path))

    def read(self, path: str) -> bytes | None:
        """A small file's bytes; None where there is none. Raises UsageError for a large one.

        Links are followed as in the container.
        """
        absolute = self.join(path)
        try:
            for target, source in self.volumes:
                if is_within(absolute, target):
                    self._check_target(target)
                    return _read_in(source, posixpath.relpath(absolute, target), path, BENEATH)
            return self._read_in_image(absolute, path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if error.errno in (errno.EXDEV, errno.ELOOP):
                raise _make_link_error(path) from error
            raise from_os_error(error, f"read {path} of the container") from error

    def _check_target(self, target: str) -> None:
        """Raise OSError(ELOOP) where a link leads to a volume's place: it is elsewhere then."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.close(_open_in(self.tree, target, os.O_PATH, NO_SYMLINKS | IN_ROOT))

    def _read_in_image(self, absolute: str, path: str) -> bytes:
        descriptor = _open_in(self.tree, absolute, os.O_RDONLY | os.O_NONBLOCK, IN_ROOT)
        with open(descriptor, "rb") as file:
            at = os.readlink(f"/proc/self/fd/{descriptor}")
            inside = f"/{posixpath.relpath(at, os.path.realpath(self.tree))}"
            if any(is_within(inside, target) for target, _ in self.volumes):
                raise _make_link_error(path)
            return _read_small(file, path)


def _make_link_error(path: str) -> UsageError:
    return UsageError(f"a link on the way to {path} leads in or out of a volume; name it directly")


def _read_in(root: str, inside: str, path: str, resolve: int) -> bytes:
    flags = os.O_RDONLY | os.O_NONBLOCK
    if os.path.isdir(root):
        descriptor = _open_in(root, inside, flags, resolve)
    else:  # a single file that is shown in the container
        descriptor = os.open(root, flags | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return _read_small(file, path)


def _open_in(root: str, inside: str, flags: int, resolve: int) -> int:
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_in(folder, os.fsencode(inside), flags | os.O_CLOEXEC, resolve)
    finally:
        os.close(folder)


def _read_small(file: BinaryIO, path: str) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is larger than 64 MiB; name a lock file instead")
    return data
