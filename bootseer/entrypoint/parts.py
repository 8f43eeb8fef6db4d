"""The parts there are."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.entrypoint.deps_part import DepsPart
from bootseer.entrypoint.part import Part

REGISTRY: Sequence[Part] = (DepsPart(),)


def by_name(name: str) -> Part:
    """The registered part of that name; KeyError when there is none."""
    return {part.name: part for part in REGISTRY}[name]
