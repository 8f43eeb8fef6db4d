"""What is mounted, by /proc/self/mountinfo (proc_pid_mountinfo(5)); no mount is touched."""

from __future__ import annotations

import os
import re

from bootseer.light_dataclasses import dataclass

MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mounted:
    """One mount; `root` is what of the file system is shown there.

    `number` is the mount's own, `parent` that of the mount which it lies on.
    """

    target: str
    device: str
    kind: str
    source: str = ""
    root: str = "/"
    number: int = 0
    parent: int = 0


def parse_mountinfo(text: bytes) -> list[Mounted]:
    """Mounts in the order of mounting, so that the last one at a target is the visible one."""
    mounts = []
    for line in text.split(b"\n"):  # a name may hold a carriage return, which ends no line here
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
    """A name in which blanks and the like stand as octal numbers."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def all_mounts() -> list[Mounted]:
    """All mounts that this process can reach, or that lie below such ones.

    Raises OSError without /proc.
    """
    with open(MOUNTINFO, "rb") as file:
        return parse_mountinfo(file.read())


def is_mounted(target: str) -> bool:
    """Whether something is mounted exactly at `target` in this mount namespace."""
    return any(mounted.target == target for mounted in all_mounts())


def shown_at(mounts: list[Mounted], target: str) -> Mounted | None:
    """What a path without symbolic links leads to, if that is where a mount begins.

    A mount may be listed at `target` and yet lie below another one, of the same place or of a
    directory above it. Nothing is touched: a path may lead to a server that does not answer.
    """
    above = {(m.parent, m.target): m for m in mounts if m.parent != m.number}
    known = {m.number for m in mounts}
    # The root is no mount itself where a process was put into some directory.
    base = {m.parent for m in mounts if m.parent not in known}
    here = next((m for m in mounts if m.target == "/" and m.parent in {*base, m.number}), None)
    place = ""
    for name in target.strip("/").split("/"):
        place += f"/{name}"
        parents = base if here is None else {here.number}
        while over := next((above[n, place] for n in parents if (n, place) in above), None):
            here, parents = over, {over.number}
    return here if here is not None and here.target == target else None
