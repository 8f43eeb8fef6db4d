"""Exact versions by package name: of a requirement list, of a lock, of what an install left (pure).

Names are compared as PyPI does (case, `-`, `_` and `.` alike), versions without trailing zeros.
A version without a local part (`2.13.0`) stands for any (`2.13.0+cpu`), as in pip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SEEDS = frozenset({"pip", "setuptools", "wheel"})
"""What a new environment may bring by itself, which no list names."""
_RUNS = re.compile(r"[-_.]+")
_EXACT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*===?\s*(?P<version>[^\s*,;\\$]+)\s*(?:[;\\].*)?"
)
_DISTRIBUTION = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def normal_name(name: str) -> str:
    """A package's name in the one spelling that names are compared in."""
    return _RUNS.sub("-", name).lower()


def _normal_version(version: str) -> str:
    public, plus, local = version.lower().removeprefix("v").partition("+")
    while public.endswith(".0"):
        public = public[:-2]
    return public + plus + _RUNS.sub(".", local)


def same_version(pinned: str, found: str) -> bool:
    """Whether a pin stands for a version; spelled in another way than ours, it may say no."""
    one, other = _normal_version(pinned), _normal_version(found)
    return one == other or one == other.partition("+")[0]


def exact(requirement: str) -> tuple[str, str] | None:
    """Name and version of a requirement that pins one; None for any other."""
    match = _EXACT.fullmatch(requirement.partition(" --")[0].strip())
    return (normal_name(match["name"]), match["version"]) if match else None


def of_lock(text: str) -> dict[str, str]:
    """What a resolver's output pins."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(pin for line in lines if (pin := exact(line)))


def of_distributions(names: Iterable[str]) -> dict[str, str]:
    """What `.dist-info` and `.egg-info` names say; a name without a version has the version ""."""
    found = {}
    for name in names:
        match = _DISTRIBUTION.fullmatch(name)
        if match:
            found[normal_name(match["name"])] = match["version"]
        else:
            found[normal_name(name.rpartition(".")[0])] = ""
    return found


def cover(pinned: Mapping[str, str], brought: Mapping[str, str]) -> bool:
    """Whether each package that was brought is named, with its version, among the pins."""
    return all(n in pinned and same_version(pinned[n], v) for n, v in brought.items())


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What changed between two sets, for a reader: `numpy 2.4.6 → 2.5.0`, `six 1.17 new`."""
    out = []
    for name in sorted({*old, *new}):
        if name not in old:
            out.append(f"{name} {new[name]} new")
        elif name not in new:
            out.append(f"{name} {old[name]} gone")
        elif not same_version(new[name], old[name]):
            out.append(f"{name} {old[name]} → {new[name]}")
    return out
