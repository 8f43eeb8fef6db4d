"""Sizes as they are printed. Does not import click."""

from __future__ import annotations


def format_size(size_bytes: int) -> str:
    """Return a size in bytes as a number with a binary unit, such as "1.5 MiB"."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1023.95:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
