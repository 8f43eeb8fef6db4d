"""What a transfer reports of its progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far work is; both are called from several threads."""

    def expect(self, size_bytes: int) -> None:
        """So many bytes more are to be done."""

    def advance(self, size_bytes: int) -> None:
        """So many bytes are done; negative when they must be done anew."""


class Silent:
    """A `Progress` that nobody watches."""

    def expect(self, size_bytes: int) -> None: ...

    def advance(self, size_bytes: int) -> None: ...


SILENT = Silent()
