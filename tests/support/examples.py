"""How many examples a property is tried with: fewer in `make test-fast`, for each change."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100  # hypothesis's own default


def examples(count: int) -> int:
    """`count`, or as much less of it as the profile in use has fewer than the usual examples."""
    return max(1, count * min(settings.default.max_examples, _USUAL) // _USUAL)
