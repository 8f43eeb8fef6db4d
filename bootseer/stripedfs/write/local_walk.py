"""A local directory, listed as the entries of a directory checkpoint."""

from __future__ import annotations

import dataclasses
import os
import re
import stat as stat_module
from typing import Literal

from bootseer.errors import OsAction, UsageError, from_os_error
from bootseer.stripedfs.format.json_fields import BadFieldError, check_path, compute_digest
from bootseer.stripedfs.format.manifest import check_target
from bootseer.stripedfs.format.pointer import DATA

MAX_PART_BYTES = 200
# No percent, plus or space and nothing beyond ASCII: WebHDFS misreads them in some versions.
_UNSAFE = re.compile(r"[^A-Za-z0-9._=@,-]|^\.")


@dataclasses.dataclass(frozen=True, slots=True)
class LocalEntry:
    """A file, folder or link below a directory that is put; `local` is its path on this machine."""

    path: str
    local: str
    kind: Literal["file", "folder", "link"]
    mode: int
    mtime_ns: int
    size_bytes: int
    target: str = ""


def walk_folder(root: str, *, follow_links: bool = False) -> list[LocalEntry]:
    """All entries below `root`, by ascending path.

    Links are kept as links when they surely stay below `root`; `follow_links` stores what they
    point to instead. Raises UsageError for other links and for what is neither file nor folder.
    """
    listed: list[LocalEntry] = []
    folders: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while folders:
        folder, above = folders.pop()
        local = f"{root}/{folder}" if folder else root
        with OsAction(f"list {local}"):
            stat = os.stat(local)
            with os.scandir(local) as entries:
                names = sorted(entry.name for entry in entries)
        identity = (stat.st_dev, stat.st_ino)
        if identity in above:
            raise UsageError(f"{local} is a link to a folder above it; put without following links")
        for name in names:
            entry = _read_entry(root, f"{folder}/{name}" if folder else name, follow_links)
            listed.append(entry)
            if entry.kind == "folder":
                folders.append((entry.path, (*above, identity)))
    return sorted(listed, key=lambda entry: entry.path)


def _read_entry(root: str, path: str, follow_links: bool) -> LocalEntry:
    local = f"{root}/{path}"
    try:
        check_path(path, "the path")
        stat = os.stat(local) if follow_links else os.lstat(local)
        mode, mtime_ns = stat_module.S_IMODE(stat.st_mode), stat.st_mtime_ns
        if stat_module.S_ISLNK(stat.st_mode):
            target = check_target(path, os.readlink(local))
            return LocalEntry(path, local, "link", mode, mtime_ns, 0, target)
    except OSError as error:
        raise from_os_error(error, f"look at {local}") from error
    except BadFieldError as error:
        raise UsageError(f"{local} cannot be kept: {error}; follow links to store files") from error
    if stat_module.S_ISDIR(stat.st_mode):
        return LocalEntry(path, local, "folder", mode, mtime_ns, 0)
    if stat_module.S_ISREG(stat.st_mode):
        return LocalEntry(path, local, "file", mode, mtime_ns, stat.st_size)
    raise UsageError(f"{local} is neither a file, a folder nor a link; remove it from the folder")


def object_name(path: str) -> str:
    """The name of a tree's file within its version: its path, spelt so that any store accepts it.

    Two paths never have the same name.
    """
    return f"{DATA}/" + "/".join(_spell_part(part) for part in path.split("/"))


def _spell_part(part: str) -> str:
    spelt = _UNSAFE.sub(_escape, part)
    if len(spelt) <= MAX_PART_BYTES:
        return spelt
    return "~-" + compute_digest(part.encode("utf-8", "surrogateescape")).hex()


def _escape(match: re.Match[str]) -> str:
    return "".join(f"~{byte:02X}" for byte in match[0].encode("utf-8", "surrogateescape"))
