"""Which boot of which machine this is."""

from __future__ import annotations


def boot_id() -> str:
    """This boot's id; also the same in every container of the node."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode("ascii").strip()
