"""What a `with` block does at its end, for classes that have something to close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class Closing(ABC):
    """Leaving the block closes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; twice is safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Committing(Closing):
    """Leaving the block normally closes, which completes; leaving it by an exception aborts."""

    @abstractmethod
    def abort(self) -> None:
        """Give up and remove what was made; twice is safe, and so is after `close`."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
