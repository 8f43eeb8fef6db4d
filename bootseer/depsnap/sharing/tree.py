"""The node-shared tree: found or unpacked in the node's cache, placed at its targets, collected."""

from bootseer.depsnap.sharing.place import can_overlay, place, unplace, unplace_all
from bootseer.depsnap.sharing.placements import in_use, sweep
from bootseer.depsnap.sharing.treecache import (
    TreeStatus,
    discard,
    ensure,
    find,
    read_ahead_newest,
    recently_used,
    trees,
)

__all__ = [
    "TreeStatus",
    "can_overlay",
    "discard",
    "ensure",
    "find",
    "in_use",
    "place",
    "read_ahead_newest",
    "recently_used",
    "sweep",
    "trees",
    "unplace",
    "unplace_all",
]
