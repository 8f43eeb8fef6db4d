"""What is wrong with a file whose JSON is not of our shape, in words about the file."""

from __future__ import annotations

import json

MALFORMED = (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
"""What reading JSON of another shape than ours leads to, also nested too deep for the parser."""
_LARGEST_SHOWN = 80


class ShapeError(ValueError):
    """A fault of a file that was found by our own check: its message is about the file."""


def fault(error: BaseException) -> str:
    """Say what is wrong with the file, where Python's message is about Python."""
    if isinstance(error, ShapeError):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (character {error.pos})"
    if isinstance(error, UnicodeError):
        return "it holds bytes that are no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"the field {str(error.args[0])[:_LARGEST_SHOWN]!r} is missing"
    if isinstance(error, OverflowError) or "integer string conversion" in str(error):
        return "it holds a number that is too large"
    if isinstance(error, LookupError):
        return "it refers to something that it does not hold"
    return "a field of it holds something else than it should"
