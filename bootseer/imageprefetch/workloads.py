"""The names of workloads, by which traces and hot sets of one image are kept apart."""

from __future__ import annotations

import re

from bootseer.errors import UsageError

_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99})?")
_DEFAULT = "_default"


def check_workload(name: str) -> str:
    """Return a workload's name, which annotations and files have; raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} is no workload; use up to 100 letters, digits, '.', '_' and '-'"
        )
    return name


def file_name(workload: str) -> str:
    """A workload's file or folder; that of "" is a name that no workload can have."""
    return check_workload(workload) or _DEFAULT


def workload_of(name: str) -> str:
    """The workload of a file or folder that `file_name` named."""
    return "" if name == _DEFAULT else name
