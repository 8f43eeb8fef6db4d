"""What a `with` block does at its end: it closes, completes, or translates an error."""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
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


class OsAction:
    """A step that the operating system may refuse: its OSError becomes an error of ours.

    `action` as in `from_os_error`.
    """

    __slots__ = ("_action",)

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            from bootseer.errors import from_os_error  # not for Python 3.9, as the rest is

            raise from_os_error(error, self._action) from error
