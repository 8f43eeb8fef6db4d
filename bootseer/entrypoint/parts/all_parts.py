"""All parts of a start."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.entrypoint.parts.checkpoint_part import CheckpointPart
from bootseer.entrypoint.parts.deps_part import DepsPart
from bootseer.entrypoint.parts.image_part import ImagePart
from bootseer.entrypoint.parts.part import Part

REGISTRY: Sequence[Part] = (ImagePart(), DepsPart(), CheckpointPart())


def get_part(name: str) -> Part:
    """The registered part of this name; raises KeyError if there is none."""
    return {part.name: part for part in REGISTRY}[name]
