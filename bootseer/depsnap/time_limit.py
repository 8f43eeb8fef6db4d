"""Work that may hang for good, as on a store or a file system that does not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

from bootseer.errors import DeadlineError
from bootseer.system.mountinfo import all_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "panfs",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "afs",
        "9p",
        "virtiofs",
        "wekafs",
        "fuseblk",
        "autofs",
    ]
)
_MOST_LINKS = 40


def within(action: Callable[[], T], limit_s: float, what: str) -> T:
    """What `action` returns. Raises DeadlineError when it takes longer.

    The thread that waits for it then stays behind until the process ends. That cannot end while
    the kernel waits for a file system's server: where `may_hang`, a process apart is to ask.
    """
    faults: list[BaseException] = []
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(action())
        except BaseException as error:  # a thread's would be lost; the caller raises it below
            faults.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(min(limit_s, threading.TIMEOUT_MAX))
    if faults:
        raise faults[0]
    if not answers:
        raise DeadlineError(f"{what} did not answer for {limit_s:g} s")
    return answers[0]


def may_hang(path: str) -> bool:
    """Whether the way to a path leads over a file system that is served over a network or by
    another process.

    Such a file system is not asked itself, so this does not hang where it does not answer.
    """
    try:
        served = {mounted.target: _is_served(mounted.kind) for mounted in all_mounts()}
    except OSError:
        return False  # without /proc nobody can tell
    hangs = served.get("/", False)
    if not any(served.values()):
        return False
    at, left, links = "", os.path.abspath(path).split("/")[1:], 0
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at).rstrip("/")
            hangs = _is_below_served(at, served)
            continue
        at = f"{at}/{name}"
        if at in served:
            hangs = served[at]
            if hangs:
                return True
        try:
            there = os.readlink(at)
        except OSError:
            continue  # no link, or nothing there at all
        links += 1
        if links > _MOST_LINKS:
            return hangs
        at = "" if there.startswith("/") else os.path.dirname(at).rstrip("/")
        hangs = _is_below_served(at, served)
        left = [*there.split("/"), *left]
    return hangs


def _is_below_served(folder: str, served: Mapping[str, bool]) -> bool:
    """Whether the last mount on the way to a folder, "" for the root, is a served one."""
    while folder and folder not in served:
        folder = os.path.dirname(folder).rstrip("/")
    return served.get(folder or "/", False)


def _is_served(kind: str) -> bool:
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")
