"""How a transfer reports its progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives how far a transfer is; both methods are called from several threads."""

    def expect(self, size_bytes: int) -> None:
        """Another `size_bytes` are to be transferred."""

    def advance(self, size_bytes: int) -> None:
        """`size_bytes` were transferred; negative when they must be transferred again."""


class Silent:
    """A `Progress` that ignores what it receives."""

    def expect(self, size_bytes: int) -> None: ...

    def advance(self, size_bytes: int) -> None: ...


SILENT = Silent()
