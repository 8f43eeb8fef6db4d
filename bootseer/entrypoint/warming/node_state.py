"""How ready a node is for a start: what of its image, dependencies and checkpoint is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import BootseerError, describe
from bootseer.light_dataclasses import dataclass

Part = Literal["image", "deps", "checkpoint"]
NOT_READY = 1
"""The exit code for a node that is not ready, where nothing failed."""


@dataclass(frozen=True, slots=True)
class PartState:
    """One input of a start on this node.

    `name` says which it is (a digest, a tag, a URL); of its `total_bytes` so many are here.
    `reason` says why it is not `ready`, or what is unusual; `exit_code` is that of a failure.
    """

    part: Part
    name: str
    ready: bool
    present_bytes: int = 0
    total_bytes: int = 0
    reason: str = ""
    exit_code: int = 0

    @classmethod
    def failed(cls, part: Part, name: str, error: BootseerError | OSError) -> PartState:
        """That of a part that an error kept from being brought."""
        exit_code = error.exit_code if isinstance(error, BootseerError) else NOT_READY
        return cls(part, name, ready=False, reason=describe(error), exit_code=exit_code)


@dataclass(frozen=True, slots=True)
class NodeState:
    """All inputs that the settings of a job name."""

    parts: tuple[PartState, ...]

    @classmethod
    def of(cls, parts: Sequence[PartState]) -> NodeState:
        return cls(tuple(parts))

    @property
    def ready(self) -> bool:
        """Whether a start fetches nothing of these over the network."""
        return all(part.ready for part in self.parts)

    @property
    def exit_code(self) -> int:
        """0 for a node that is ready, else the first failure's, or `NOT_READY`."""
        if self.ready:
            return 0
        return next((part.exit_code for part in self.parts if part.exit_code), NOT_READY)

    def as_document(self) -> dict[str, object]:
        """As the JSON of `bootseer warm --json` has it."""
        parts = [dataclasses.asdict(part) for part in self.parts]
        return {"ready": self.ready, "parts": parts}
