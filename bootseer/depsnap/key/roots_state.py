"""What an install's roots hold: the packages in them, and digests of their state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence

from bootseer.depsnap import pins
from bootseer.depsnap.key.install_roots import ALSO, Target, variables_of
from bootseer.depsnap.types import WORK_PREFIX
from bootseer.system import sha256
from bootseer.system.regular_files import opener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.capture.entries import Entry

_DATABASES = ("/var/lib/dpkg/status", "/lib/apk/db/installed", "/var/lib/rpm/rpmdb.sqlite")
"""The package databases of the system."""
_PLACES = (
    ".",
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "lib/python3*/dist-packages",
    "usr/local/lib/python3*/*-packages",
)
"""Where an installer finds packages below a root."""


def base_state(target: Target, exclude: Sequence[str] = ()) -> str:
    """A digest of what the roots hold before an install, as far as an installer looks.

    Names of distributions; for a directory named by `--also`, every path with its size; for the
    whole file system, the package databases of the system too. Times do not count: nodes differ.
    """
    parts: list[object] = []
    for root in target.roots:
        names = sorted(os.path.basename(p) for p in distributions(root.path))
        held: object = names or ("something" if top_level(root.path) else "")
        if root.path == "/":
            held = [names, [_content_digest(path) for path in _DATABASES]]
        elif root.why == ALSO:
            held = [[e.path, e.kind, e.size] for e in _entries(root.path, exclude) if e.path]
        parts.append([root.path, held])
    return digest_json(parts)


def fingerprint(target: Target, exclude: Sequence[str] = ()) -> str | None:
    """A digest that shows whether roots still hold what an install or restore left there.

    Covers each distribution's RECORD by size and mtime, which a restore keeps to the nanosecond,
    and the metadata of every entry below a directory named by `--also`. None for the whole file
    system, which is too large to look at in each start.
    """
    parts: list[object] = []
    for root in target.roots:
        if root.path == "/":
            return None
        if root.why == ALSO:
            entries = _entries(root.path, exclude)
            parts.append([[e.path, e.kind, e.mode, e.size, e.mtime_ns, e.target] for e in entries])
        for path in sorted(distributions(root.path)):
            try:
                record = os.stat(os.path.join(path, "RECORD"))
                parts.append([path, record.st_size, record.st_mtime_ns])
            except OSError:
                parts.append([path])
        parts.append([root.path, top_level(root.path)])
    return digest_json(parts)


def packages(target: Target) -> dict[str, str]:
    """Name -> version of every distribution in the roots now."""
    names = (os.path.basename(p) for root in target.roots for p in distributions(root.path))
    return pins.of_distributions(names)


def packages_outside(target: Target, environ: Mapping[str, str]) -> set[str]:
    """Names of the packages outside of the roots that may satisfy an installer."""
    folders = [*target.python.search, target.python.user_site] if target.python else []
    for variables in (environ, *(variables_of(i, environ) for i in target.installs)):
        folders += [f for f in variables.get("PYTHONPATH", "").split(os.pathsep) if f]
    names = (n for f in dict.fromkeys(folders) for n in top_level(f))
    return set(pins.of_distributions(n for n in names if n.endswith((".dist-info", ".egg-info"))))


def distributions(root: str) -> list[str]:
    """Paths of the `.dist-info` and `.egg-info` entries that an installer finds below a root."""
    out: list[str] = []
    for place in _PLACES:
        folders = [root]
        for part in place.split("/"):
            folders = [path for folder in folders for path in _find_matching(folder, part)]
        listed = [(f, _names(f)) for f in folders if place == "." or not os.path.islink(f)]
        for kind in (".dist-info", ".egg-info"):
            for folder, names in listed:
                out += [os.path.join(folder, name) for name in names if name.endswith(kind)]
    return out


def top_level(path: str) -> list[str]:
    """The names in a directory, our own and `__pycache__` left out; none if it is unreadable."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(n for n in names if not n.startswith(WORK_PREFIX) and n != "__pycache__")


def _find_matching(folder: str, part: str) -> list[str]:
    """Paths in a folder that match a part of a place; one without `*` need not exist."""
    begin, star, end = part.partition("*")
    if not star:
        return [os.path.normpath(f"{folder}/{part}")]
    names = (n for n in _names(folder) if n.startswith(begin) and n[len(begin) :].endswith(end))
    return [os.path.normpath(f"{folder}/{name}") for name in names]


def _names(folder: str) -> list[str]:
    """The names in a folder that are not hidden; none where it cannot be listed."""
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []


def _entries(root: str, exclude: Sequence[str]) -> Iterable[Entry]:
    """The entries of a root, which may be a symlink to a shared tree."""
    from bootseer.depsnap.capture.scan import scan  # few roots are named by the user

    place = os.path.realpath(root) if os.path.islink(root) else root
    return scan(place, exclude=exclude).entries.values()


def _content_digest(path: str) -> str:
    try:
        with open(path, "rb", opener=opener) as file:
            return sha256.of_file(file)
    except OSError:
        return ""


def digest_json(value: object) -> str:
    """sha256 of a value's canonical JSON."""
    return sha256.of_text(canonical_json(value))


def canonical_json(value: object) -> str:
    """The JSON of a value, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
