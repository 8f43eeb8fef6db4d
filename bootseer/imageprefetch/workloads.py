"""The names of workloads, by which traces and hot sets of one image are kept apart."""

from __future__ import annotations

import re

from bootseer.errors import UsageError

_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99})?")


def check_workload(name: str) -> str:
    """Return a workload's name, which files and annotations have; raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} is no workload; use up to 100 letters, digits, '.', '_' and '-'"
        )
    return name
