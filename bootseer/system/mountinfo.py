"""The mounts of this mount namespace, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re

from bootseer.light_dataclasses import dataclass

MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mounted:
    """One mount; `root` is the directory of the file system that is visible at `target`.

    `number` is the mount's own id, `parent` that of the mount it is attached to.
    """

    target: str
    device: str
    kind: str
    source: str = ""
    root: str = "/"
    number: int = 0
    parent: int = 0


def parse_mountinfo(text: bytes) -> list[Mounted]:
    """The mounts in the order of mounting: of several at one target, the last is visible."""
    mounts = []
    for line in text.split(b"\n"):  # not `splitlines`: a name may contain a carriage return
        left, _, right = line.partition(b" - ")
        fields, (kind, _, rest) = left.split(b" "), right.partition(b" ")
        if len(fields) > 4:
            names = map(_name, (fields[4], rest.partition(b" ")[0], fields[3]))
            target, source, root = names
            device = fields[2].decode()
            number, parent = int(fields[0]), int(fields[1])
            mounts.append(Mounted(target, device, kind.decode(), source, root, number, parent))
    return mounts


def _name(field: bytes) -> str:
    """Decode a name, in which the kernel writes blanks and the like as octal numbers."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def all_mounts() -> list[Mounted]:
    """All mounts of this process's namespace below its root. Raises OSError without /proc."""
    with open(MOUNTINFO, "rb") as file:
        return parse_mountinfo(file.read())


def is_mounted(target: str) -> bool:
    """Whether `target` itself is a mount point in this mount namespace."""
    return any(mounted.target == target for mounted in all_mounts())


def shown_at(mounts: list[Mounted], target: str) -> Mounted | None:
    """The mount that is visible at `target`, a path without symbolic links, if one begins there.

    A mount that is listed at `target` may be covered by another one, at the same place or at a
    directory above it. The path itself is not accessed, as a file system's server may hang.
    """
    above = {(m.parent, m.target): m for m in mounts if m.parent != m.number}
    known = {m.number for m in mounts}
    # After a chroot into a plain directory the root itself is not listed.
    base = {m.parent for m in mounts if m.parent not in known}
    here = next((m for m in mounts if m.target == "/" and m.parent in {*base, m.number}), None)
    place = ""
    for name in target.strip("/").split("/"):
        place += f"/{name}"
        parents = base if here is None else {here.number}
        while over := next((above[n, place] for n in parents if (n, place) in above), None):
            here, parents = over, {over.number}
    return here if here is not None and here.target == target else None
