"""Exact versions by package name: of a requirement list, a lock, installed packages (pure).

Names are compared as PyPI does (case, `-`, `_` and `.` alike), versions without trailing zeros.
A version without a local part (`2.13.0`) stands for any (`2.13.0+cpu`), as in pip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SEEDS = frozenset({"pip", "setuptools", "wheel"})
"""Packages that a new environment may contain by itself, though no list names them."""
_RUNS = re.compile(r"[-_.]+")
_EXACT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*===?\s*(?P<version>[^\s*,;\\$]+)\s*(?:[;\\].*)?"
)
_DISTRIBUTION = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def normal_name(name: str) -> str:
    """A package's name in the spelling that names are compared in."""
    return _RUNS.sub("-", name).lower()


def _normal_version(version: str) -> str:
    public, plus, local = version.lower().removeprefix("v").partition("+")
    while public.endswith(".0"):
        public = public[:-2]
    return public + plus + _RUNS.sub(".", local)


def same_version(pinned: str, installed: str) -> bool:
    """Whether a pin stands for a version; it may say no for another spelling of the same one."""
    one, other = _normal_version(pinned), _normal_version(installed)
    return one == other or one == other.partition("+")[0]


def parse_pin(requirement: str) -> tuple[str, str] | None:
    """Name and version of a requirement that pins one; None for any other."""
    match = _EXACT.fullmatch(requirement.partition(" --")[0].strip())
    return (normal_name(match["name"]), match["version"]) if match else None


def of_lock(text: str) -> dict[str, str]:
    """The pins of a resolver's output."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(pin for line in lines if (pin := parse_pin(line)))


def of_distributions(names: Iterable[str]) -> dict[str, str]:
    """The packages of `.dist-info` and `.egg-info` names; "" is the version of one without."""
    versions = {}
    for name in names:
        match = _DISTRIBUTION.fullmatch(name)
        if match:
            versions[normal_name(match["name"])] = match["version"]
        else:
            versions[normal_name(name.rpartition(".")[0])] = ""
    return versions


def cover(pinned: Mapping[str, str], installed: Mapping[str, str]) -> bool:
    """Whether each of the installed packages is pinned to its version."""
    return all(n in pinned and same_version(pinned[n], v) for n, v in installed.items())


def describe_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
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
