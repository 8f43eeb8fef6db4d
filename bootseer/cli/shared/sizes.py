"""Sizes on the command line: `4MiB`, `4M`, `64k` or plain bytes, and their printed form."""

from __future__ import annotations

import math
import re

import click

from bootseer.cli.shared.size_text import format_size

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGT]?)(?:I?B)?\Z", re.IGNORECASE)


def parse_size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Return the bytes of a size: a click callback. `MB`, `MiB` and `M` all mean 1024 * 1024."""
    if text is None:
        return None
    match = _SIZE.match(text.strip())
    amount = float(match[1]) * _UNITS[match[2].upper()] if match is not None else math.inf
    if amount == math.inf:
        raise click.BadParameter(f"{text!r} is no size; give bytes, or a number with K, M, G or T")
    return int(amount)
