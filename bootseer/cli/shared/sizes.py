"""Sizes on the command line: `4MiB`, `4M`, `64k` or plain bytes, and their printed form."""

from __future__ import annotations

import re

import click

from bootseer.cli.shared.size_text import shown

__all__ = ["parsed", "shown"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:I?B)?\Z", re.IGNORECASE)


def parsed(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """A click callback: the bytes that a text means; units are powers of 1024, however written."""
    if text is None:
        return None
    match = _SIZE.match(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; give bytes, or a number with K, M, G or T")
    return int(float(match[1]) * _UNITS[match[2].upper()])
