"""Hearing of a store that is waited for, in a process whose own log nobody reads.

Apart from `retry`, so that who listens on a path with a start-up budget imports nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Listener: TypeAlias = Callable[[str, int, float], None]
"""Called with why a try failed, how many have, and for how many seconds more there will be some."""

listener: Listener | None = None
"""Who hears of each try that failed and is made again, from any thread; None: nobody."""
