"""What a `with` block does at its end: it closes, or completes. Python 3.9."""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import TypeVar

    T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """Leaving the block closes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; twice is safe."""

    def __enter__(self: T) -> T:
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
