"""A hot set for the next version of an image: what was touched, wherever its content lies now."""

from __future__ import annotations

import dataclasses

from bootseer.blockimage.filemap import FileMap
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """A trace of the new version, and how much of the old one's bytes it holds."""

    trace: Trace
    old_bytes: int
    carried_bytes: int

    @property
    def share(self) -> float:
        """Of the old trace's bytes; 1 when it had none."""
        return self.carried_bytes / self.old_bytes if self.old_bytes else 1.0


def carry(trace: Trace, old: FileMap, new: FileMap, key: str) -> Carried:
    """The trace of one block image for another, whose data has the source key `key`.

    A file counts as the same by its content: of the same path first, else of any. What changed is
    left out, and the next starts add it.
    """
    hot = {range_.path for range_ in old.ranges((e.offset, e.length) for e in trace.extents)}
    touched = FileMap([file for file in old.files if file.path in hot], old.data_bytes)
    # Only what was touched can be carried, so that two large images are compared in no time.
    digests = {file.digest for file in touched.files}
    there = FileMap([file for file in new.files if file.digest in digests], new.data_bytes)
    moved = traces.moves(touched.places(), there.places())
    # Content that several new files have in common lies once: the first move is enough.
    carried = traces.carry_over(trace, dict.fromkeys(moved), key, new.data_bytes)
    return Carried(carried, trace.touched_bytes(), carried.touched_bytes())
