"""What of a container's files is no part of its dependency layer."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

from bootseer.imageprefetch.run.command import EVENTS_INSIDE
from bootseer.system.paths import is_within

_LEFT_OUT = (
    *("/run", "/var/run", "/proc", "/sys", "/dev", "/var/log", "/var/lib/apt/lists"),
    *("/var/cache/apt", "/var/cache/debconf", "/var/cache/ldconfig"),
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", EVENTS_INSIDE),
)
"""What runtimes put into a container, and what programs that install keep for themselves."""
_CACHES = ("/.cache/pip", "/.cache/uv")


class LeftOut:
    """Whether a path is no part of a layer: a runtime's, a cache, below `places`, of a pattern."""

    def __init__(self, places: Sequence[str], patterns: Sequence[str]) -> None:
        self._places, self._patterns = (*_LEFT_OUT, *places), patterns

    def __call__(self, path: str) -> bool:
        if path.endswith(_CACHES) or any(is_within(path, place) for place in self._places):
            return True
        name = os.path.basename(path)
        return any(
            fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern)
            for pattern in self._patterns
        )
