"""What an install changed in its roots: scans before it and after it, compared."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.capture.entries import RootDelta, Tree
from bootseer.depsnap.capture.scan import diff, scan


@dataclasses.dataclass(frozen=True, slots=True)
class Scans:
    """The roots of an install before it, and what their scans leave out."""

    trees: list[Tree]
    exclude: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """The changes in the roots of an install. `fresh` are the roots that did not exist before."""

    deltas: tuple[RootDelta, ...]
    fresh: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether the install changed nothing."""
        return not self.deltas


def scan_roots(roots: Sequence[str], exclude: Sequence[str]) -> Scans:
    """Scan every root; one that does not exist yet gives an empty tree."""
    return Scans([scan(root, exclude=exclude) for root in roots], exclude)


def find_changes(before: Scans) -> Changes:
    """Scan the roots again and compare each with what it held before."""
    deltas, fresh = [], []
    for old in before.trees:
        new = scan(old.root, exclude=before.exclude)
        if old.entries:
            delta = diff(old, new)
            if not delta.empty:
                deltas.append(RootDelta.of_delta(delta))
        else:
            fresh.append(old.root)
            if new.entries:
                deltas.append(RootDelta.of_tree(new))
    return Changes(tuple(deltas), tuple(fresh))
