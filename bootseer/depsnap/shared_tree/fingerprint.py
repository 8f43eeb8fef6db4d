"""A fast fingerprint of a tree's metadata, which shows whether something wrote to it."""

from __future__ import annotations

import errno
import marshal
import os
from operator import attrgetter

import xxhash

from bootseer.system.child_processes import fork, has_threads

_MASK = (1 << 128) - 1
_DIVISIBLE = 256
"""So many directories can be divided evenly, and are worth the fork of a second process."""
_name = attrgetter("name")


def compute_fingerprint(roots: list[str]) -> list[str]:
    """Two digests over every entry below `roots`: with and without the files' ctimes.

    Each directory is hashed with its path, and the hashes are added up, so that two processes can
    walk half the tree each. It shows accidental changes: forging inode numbers and ctimes takes
    access to the disk itself. Raises OSError for what cannot be read.
    """
    pending = [(str(number), root) for number, root in enumerate(roots)]
    strict, loose = _walk(pending, _DIVISIBLE)
    if pending and not has_threads() and len(os.sched_getaffinity(0)) > 1:
        other = _start_walk(pending[1::2])
        mine = _walk(pending[::2])
        theirs = _await_walk(*other)
    else:
        mine, theirs = _walk(pending), (0, 0)
    totals = (strict + mine[0] + theirs[0], loose + mine[1] + theirs[1])
    return [f"{total & _MASK:032x}" for total in totals]


def _walk(pending: list[tuple[str, str]], most: int | None = None) -> tuple[int, int]:
    """Hash directories off the list, breadth first, until none or more than `most` are left."""
    strict = loose = 0
    while pending and (most is None or len(pending) <= most):
        relative, folder = pending.pop(0 if most is not None else -1)
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=_name)
        rows: list[tuple[str | int, ...]] = [(relative,)]
        ctimes: list[int] = []
        for entry in entries:
            is_directory = entry.is_dir(follow_symlinks=False)
            s = entry.stat(follow_symlinks=False)
            row = (entry.name, s.st_mode, s.st_mtime_ns, s.st_ino, s.st_uid)
            if is_directory:
                rows.append((*row, s.st_ctime_ns))
                pending.append((f"{relative}/{entry.name}", entry.path))
            else:
                rows.append((*row, s.st_size))
                ctimes.append(s.st_ctime_ns)
        data = marshal.dumps(rows, 2)  # version 2 depends on the values alone
        hasher = xxhash.xxh3_128(data)
        loose += hasher.intdigest()
        hasher.update(marshal.dumps(ctimes, 2))
        strict += hasher.intdigest()
    return strict, loose


def _start_walk(pending: list[tuple[str, str]]) -> tuple[int, int]:
    """Walk in a forked child; its process id and the pipe that its sums come through."""
    out, into = os.pipe()
    pid = fork()
    if pid == 0:
        code = 1
        try:
            sums = b"".join([(total & _MASK).to_bytes(16, "big") for total in _walk(pending)])
            os.write(into, sums)
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    return pid, out


def _await_walk(pid: int, out: int) -> tuple[int, int]:
    try:
        sums = os.read(out, 32)
    finally:
        os.close(out)
        os.waitpid(pid, 0)
    if len(sums) != 32:
        raise OSError(errno.EIO, "a part of the tree could not be read")
    return int.from_bytes(sums[:16], "big"), int.from_bytes(sums[16:], "big")
