"""Choosing the image of an index for a machine. Pure, except that `os.uname` is called."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from bootseer.errors import NotSupportedError, UsageError
from bootseer.storage.oci.manifest import Descriptor, Platform

_GO_NAMES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "amd64": "amd64",
    "aarch64": "arm64",
    "arm64": "arm64",
    "armhf": "arm",
    "armel": "arm",
    "i386": "386",
    "i686": "386",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
}
_UNSPECIFIED = frozenset(("", "unknown", "noarch", "all"))
_ALSO_RUNS = {"amd64": "386", "arm64": "arm"}


def this_platform() -> Platform:
    """The machine that this process runs on."""
    machine = os.uname().machine.lower()
    arm = re.match(r"armv([5-8])", machine)
    if arm:
        return Platform("linux", "arm", f"v{min(int(arm[1]), 7)}")
    return Platform("linux", _GO_NAMES.get(machine, machine))


def parse_platform(text: str) -> Platform:
    """Parse `OS/ARCHITECTURE[/VARIANT]`; UsageError for anything else."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(f"{text!r} is no platform; write OS/ARCHITECTURE[/VARIANT]")
    return Platform(*parts)


def choose_platform(manifests: Sequence[Descriptor], wanted: Platform, what: str) -> Descriptor:
    """The manifest for a platform; without one, NotSupportedError that lists those there are.

    Entries without a platform (`unknown/unknown`, as attestations have it) are never chosen. A
    newer variant of ARM runs older ones; the newest that it runs is taken.
    """
    best: Descriptor | None = None
    best_rank = 0
    for one in manifests:
        rank = _rank(one.platform, wanted)
        if rank > best_rank:
            best, best_rank = one, rank
    if best is not None:
        return best
    offered = sorted({str(p) for one in manifests if (p := one.platform) and p.os != "unknown"})
    raise NotSupportedError(
        f"{what} has no image for {wanted}; there are {', '.join(offered) or 'none at all'}"
    )


def check_platform(offered: Platform, wanted: Platform, what: str) -> None:
    """Raise NotSupportedError where an image without an index is for another platform."""
    if _rank(offered, wanted) == 0:
        raise NotSupportedError(f"{what} has no image for {wanted}; it is one for {offered}")


def check_alone(offered: Platform, what: str) -> None:
    """Raise NotSupportedError where an image without an index is not for this machine.

    As with podman, variants are ignored, which few such images name and some of them wrongly. An
    image without an architecture passes, and so does one that this machine's kernel mostly runs.
    """
    here = this_platform()
    system, architecture = offered.os.lower(), offered.architecture.lower()
    architecture = _GO_NAMES.get(architecture, architecture)
    fitting = {here.architecture, _ALSO_RUNS.get(here.architecture), *_UNSPECIFIED}
    if system not in ("", "unknown", here.os) or architecture not in fitting:
        raise NotSupportedError(f"{what} has no image for {here}; it is one for {offered}")


def _rank(offered: Platform | None, wanted: Platform) -> int:
    """How well an offer fits; 0 when it does not."""
    if offered is None or (offered.os, offered.architecture) != (wanted.os, wanted.architecture):
        return 0
    if offered.variant == wanted.variant:
        return 100
    ours, theirs = _level(wanted), _level(offered)
    return theirs if 0 < theirs <= ours else 0


def _level(one: Platform) -> int:
    """The number of a variant; without one, that of the variant which every such machine runs."""
    common = {"arm64": "v8", "amd64": "v1", "arm": "v7"}.get(one.architecture, "")
    digits = re.fullmatch(r"v(\d{1,2})", one.variant or common)
    return int(digits[1]) if digits else 0
