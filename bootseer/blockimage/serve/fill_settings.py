"""The settings of a fill, and the reads that it yields to; a module that imports no fill."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSettings:
    """`rate_bytes_s` bounds the fill (0 = as fast as it can).

    It waits until no read came for `quiet_s`, or for `start_quiet_s` while a start may still be
    under way. `lock` is a file that the servers of a node lock, so that one of them fills at a
    time ("": none). After some requests in a row that failed it `rests`, or else ends.
    """

    rate_bytes_s: int = 0
    quiet_s: float = 2.0
    start_quiet_s: float = 5.0
    lock: str = ""
    rests: bool = True


class Activity(NamedTuple):
    """Reads so far, programs' own and replay's; how many programs wait for their bytes now.

    `link_taken`: another start on this node, or this one, needs the link.
    """

    reads: int
    waiting: int
    link_taken: bool = False
