"""The node-shared tree: found or unpacked in the node's cache, placed at its targets, collected."""

from bootseer.depsnap.shared_tree.cache import (
    TreeStatus,
    discard,
    ensure,
    find,
    read_ahead_newest,
    recently_used,
    trees,
)
from bootseer.depsnap.shared_tree.forms import can_overlay, place, unplace, unplace_all
from bootseer.depsnap.shared_tree.placement_records import in_use, sweep

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
