"""Say what is wrong with a JSON file that another program may have written or damaged."""

from __future__ import annotations

import json

MALFORMED = (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
"""What Python raises for JSON of another shape than expected, or nested too deeply to parse."""
_LARGEST_SHOWN = 80


class ShapeError(ValueError):
    """A fault that one of our own checks found: its message already describes the file."""


def describe_fault(error: BaseException) -> str:
    """What is wrong with the file: Python's own messages are about Python."""
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
