"""What the servers that tests and benches start have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Running(ABC):
    """Entering the block starts, leaving it stops."""

    @abstractmethod
    def start(self) -> Self:
        """Start, and return when it answers. Raises RuntimeError when it does not."""

    @abstractmethod
    def stop(self) -> None:
        """End it; twice is safe."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
