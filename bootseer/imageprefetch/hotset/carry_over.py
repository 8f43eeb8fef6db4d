"""A trace carried over to the next version of an image: the same contents at their new places."""

from __future__ import annotations

import dataclasses

from bootseer.blockimage.filemap import FileMap
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class CarriedTrace:
    """A trace of the new version, and how many of the old trace's bytes it has."""

    trace: Trace
    old_bytes: int
    carried_bytes: int

    @property
    def share(self) -> float:
        """The part of the old trace's bytes; 1 when that had none."""
        return self.carried_bytes / self.old_bytes if self.old_bytes else 1.0


def carry(trace: Trace, old: FileMap, new: FileMap, key: str) -> CarriedTrace:
    """The trace of one block image for another, whose data has the source key `key`.

    Files with the same content are the same: of the same path first, otherwise of any. What changed
    is left out, and the next starts add it.
    """
    paths = {range_.path for range_ in old.ranges((e.offset, e.length) for e in trace.extents)}
    touched = FileMap([file for file in old.files if file.path in paths], old.data_bytes)
    # Only what was touched can be carried over, so comparing two large images is quick.
    digests = {file.digest for file in touched.files}
    same = FileMap([file for file in new.files if file.digest in digests], new.data_bytes)
    moved = traces.moves(touched.places(), same.places())
    # Content that several new files share is stored once: the first move is enough.
    carried = traces.carry_over(trace, dict.fromkeys(moved), key, new.data_bytes)
    return CarriedTrace(carried, trace.touched_bytes(), carried.touched_bytes())
