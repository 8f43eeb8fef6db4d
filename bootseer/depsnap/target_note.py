"""A node's note of what a target holds, and the lock that one install at a time has there.

Both are in the cache directory, named by the target's paths. A note is trusted only while the
target's fingerprint is the noted one; a lost note costs one restore, never correctness.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BusyError, from_os_error
from bootseer.system import file_lock, sha256
from bootseer.system.atomic import replace_file
from bootseer.system.file_lock import FileLock


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """What a target held after an install or restore of `key`.

    `state` is what the roots held before, `fingerprint` what they held afterwards; `created_s` is
    by this node's wall clock, `boot` the boot in which the note was written; `lock` and `packages`
    as in a record.
    """

    key: str
    state: str
    fingerprint: str
    created_s: float
    boot: str
    lock: str
    packages: dict[str, str]


def _path(cache: str, roots: Sequence[str], suffix: str) -> str:
    name = sha256.of_text("\0".join(roots))[:32]
    return os.path.join(cache, "deps", "targets", name + suffix)


def read(cache: str, roots: Sequence[str]) -> Note | None:
    """The note of a target; None when there is none, or it is damaged or another user's."""
    try:
        with open(_path(cache, roots, ".json"), "rb") as file:
            if os.fstat(file.fileno()).st_uid not in (0, os.geteuid()):
                return None
            body = json.loads(file.read(1 << 20))
        note = Note(**body)
    except (OSError, ValueError, TypeError):
        return None
    texts = (note.key, note.state, note.fingerprint, note.boot, note.lock)
    return note if all(isinstance(t, str) for t in texts) and _is_map(note.packages) else None


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def write(cache: str, roots: Sequence[str], note: Note) -> None:
    """Replace the note. Raises a mapped error when the cache cannot be written."""
    path = _path(cache, roots, ".json")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Not synced: a lost or damaged note costs a scan.
        replace_file(path, json.dumps(dataclasses.asdict(note)).encode(), sync=False)
    except OSError as error:
        raise from_os_error(error, f"write the note {path}") from error


def acquire_lock(cache: str, roots: Sequence[str], *, limit_s: float) -> FileLock:
    """Take the target's lock on this node. Raises BusyError when it stays held for `limit_s`.

    The lock ends with the process, also when that is killed.
    """
    path = _path(cache, roots, ".lock")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return file_lock.acquire(path, 0o666, limit_s=limit_s)
    except BlockingIOError:
        raise BusyError(f"another process is installing into {roots[0]}") from None
    except OSError as error:
        raise from_os_error(error, f"open the lock {path}") from error
