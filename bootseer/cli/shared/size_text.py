"""Sizes as they are printed. Knows no click."""

from __future__ import annotations


def shown(size_bytes: int) -> str:
    """Bytes with a unit, powers of 1024, three digits or so."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1023.95:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
