"""Mounts for tests: served in this process or another, and gone afterwards for certain."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import MountPoint, absolute, has_ended
from bootseer.fuse.mount.passthrough import OpenInodes
from bootseer.fuse.operations import Operations, WritableOperations
from bootseer.fuse.serve.server import Server, handshake
from tests.support.paths import ROOT

MNT_FORCE, MNT_DETACH = 1, 2


def end_mount(directory: Path) -> None:
    """Take it away, readers or not; nothing happens where nothing is mounted."""
    ctypes.CDLL(None).umount2(os.fsencode(directory), MNT_FORCE | MNT_DETACH)


class Mount:
    """A file system that this process mounts and serves, without a supervisor.

    `with Mount(operations, "/mnt/x") as mount:` serves inside the block. When a thread that serves
    fails, the mount is ended.
    """

    def __init__(
        self, operations: Operations, mountpoint: str, *, options: MountOptions | None = None
    ) -> None:
        self._operations, self._mountpoint = operations, mountpoint
        self._options = options or MountOptions()
        if not isinstance(operations, WritableOperations):
            self._options = dataclasses.replace(self._options, read_only=True)
        self._server: Server | None = None

    def start(self) -> None:
        """Mount, and serve in threads; returns once the mount answers. Raises as `open_mount`."""
        mountpoint = absolute(self._mountpoint)
        descriptor = open_mount(mountpoint, self._options)
        point = MountPoint.find(mountpoint, lambda: has_ended(descriptor))
        try:
            negotiated = handshake(descriptor, self._options)
            point.set_read_ahead(self._options.read_ahead_kib)
        except BaseException:  # a mount without a server would hang its readers
            point.abandon()
            os.close(descriptor)
            raise

        def end() -> None:
            point.abandon()
            threading.Thread(target=self.close, daemon=True).start()

        self._server = Server(
            self._operations,
            point,
            descriptor,
            negotiated,
            self._options,
            on_death=end,
            open_inodes=OpenInodes() if negotiated.passthrough else None,
        )
        self._server.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the mount has ended; False when the time is over first."""
        assert self._server is not None
        return self._server.wait(timeout_s)

    def close(self) -> None:
        """Unmount and end. Twice is safe."""
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Mount:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_descriptor(link: socket.socket, descriptor: int) -> None:
    """The other side of `receive_descriptor`, on a connected Unix socket."""
    socket.send_fds(link, [b"\0"], [descriptor])


@contextlib.contextmanager
def mounted(
    operations: Operations, directory: Path, **options: Any
) -> Iterator[tuple[Path, list[str]]]:
    """Serve here; yields the directory and what faults were told. Look inside with `outside`."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)  # unlike Path.mkdir, this looks not into a dead mount there
    faults: list[str] = []
    told = MountOptions(on_fault=faults.append, **options)
    mount = Mount(operations, str(directory), options=told)
    # Not where namespaces of tests beside this one would copy it, and keep it from ending.
    with own_mounts() if os.geteuid() == 0 else contextlib.nullcontext():
        try:
            with mount:
                yield directory, faults
        finally:
            end_mount(directory)


@contextlib.contextmanager
def own_mounts() -> Iterator[None]:
    """This thread, and what it starts, in a mount namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, own_folder, private_recursive = 0x20000, 0x200, 1 << 18 | 0x4000
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    here = os.getcwd()
    try:
        if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private_recursive, None):
            raise OSError(ctypes.get_errno(), "a mount namespace of our own")
        yield
    finally:
        libc.unshare(own_folder)  # which threads from inside may share still, and setns would mind
        if libc.setns(before, new_namespace):
            raise OSError(ctypes.get_errno(), "back into the mount namespace of before")
        os.close(before)
        os.chdir(here)


def in_time(work: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Run in a thread, so that a mount that does not answer fails the test, not the whole run."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, work()))
        except BaseException as error:
            result.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert result, "no answer from the mount"
    done, value = result[0]
    if not done:
        raise value
    return value


def python(code: str, *words: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that dies with this one, `code` seeing `sys`, `os` and the words."""
    prelude = (
        "import ctypes, os, sys, signal\n"
        "ctypes.CDLL(None).prctl(1, 9)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def output(code: str, *words: object, **options: Any) -> str:
    """What such a process prints; it must end well."""
    with python(code, *words, **options) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said


def refusal(work: Callable[[], Any]) -> int | None:
    """The errno with which `work` fails, None if it does not."""
    try:
        in_time(work)
    except OSError as error:
        return error.errno
    return None
