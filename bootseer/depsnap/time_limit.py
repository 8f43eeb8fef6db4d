"""Work that may hang for good, as on a store or a file system that does not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from bootseer.errors import DeadlineError

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
    ]
)


def within(action: Callable[[], T], limit_s: float, what: str) -> T:
    """What `action` returns. Raises DeadlineError when it takes longer.

    The thread that waits for it then stays behind until the process ends.
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
    """Whether a path lies on a file system that is served over a network or by another process.

    Hangs where that does not answer: call it by `within`. Raises OSError.
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            if left.split(" ", 3)[2] == number:
                kind = right.split(" ", 1)[0]
                return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")
    return False
