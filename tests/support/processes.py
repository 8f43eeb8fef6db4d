"""What a test asks of processes that may end meanwhile."""

from __future__ import annotations

from pathlib import Path


def command_name(pid: int) -> str:
    """A process's own name for itself; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""
