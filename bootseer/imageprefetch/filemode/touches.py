"""From what was seen to touches: arithmetic of both ways of recording. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from bootseer.blocks.extents import Extent, subtract
from bootseer.imageprefetch.filemode.file_trace import Touch
from bootseer.imageprefetch.filemode.mincore import Seen
from bootseer.imageprefetch.filemode.tracefs import Added

WHOLE_BYTES = 1 << 20  # a file of which only the opening is known counts whole up to this size


def ms(seconds: float) -> int:
    """Milliseconds since a start began, never before it."""
    return max(0, int(seconds * 1000))


def traced(files: Iterable[Seen], added: Iterable[Added], begun_s: float) -> Iterator[Touch]:
    """What the kernel's events since `begun_s` say about these files."""
    new = [one for one in added if one.at_s >= begun_s]
    known = _by_inode(files, new)
    for one in new:
        seen = known.get((one.device, one.inode))
        if seen is not None and one.offset < seen.size_bytes:
            yield Touch(seen.path, one.offset, one.length, ms(one.at_s - begun_s))


def opened(seen: Seen, heard: Container[str], mapped: Mapping[str, list[Extent]]) -> list[Extent]:
    """What is taken as touched of a file whose pages the kernel does not tell."""
    if seen.size_bytes <= WHOLE_BYTES:
        return [Extent(0, seen.size_bytes)] if seen.path in heard or seen.path in mapped else []
    return mapped.get(seen.path, [])


def by_path(several: Iterable[Touch]) -> dict[str, list[tuple[int, int]]]:
    """The ranges of each file."""
    out: dict[str, list[tuple[int, int]]] = {}
    for touch in several:
        out.setdefault(touch.path, []).append((touch.offset, touch.length))
    return out


def without(
    several: Iterable[Touch], ranges: Mapping[str, Sequence[tuple[int, int]]]
) -> Iterator[Touch]:
    """Touches, or parts of them, that are not in these ranges of their file."""
    for touch in several:
        over = ranges.get(touch.path)
        if not over:
            yield touch
            continue
        for left in subtract([(touch.offset, touch.length)], over):
            yield Touch(touch.path, left.offset, left.length, touch.first_touch_ms)


def _by_inode(files: Iterable[Seen], added: Sequence[Added]) -> dict[tuple[int, int], Seen]:
    """Files by the device and inode of their data, as the kernel's events name them.

    A file on overlayfs shows its data's inode number, but the overlay's own device. Which device
    lies beneath is told by the events: it is the one that most of the overlay's numbers are on.
    """
    by_device: dict[int, dict[int, Seen]] = {}
    for seen in files:
        by_device.setdefault(seen.device, {})[seen.inode] = seen
    pairs = {(one.device, one.inode): one.offset for one in added}
    out: dict[tuple[int, int], Seen] = {}
    for device, inodes in by_device.items():
        matches: dict[int, int] = {}
        for (event_device, inode), offset in pairs.items():
            if inode in inodes and offset < inodes[inode].size_bytes:
                matches[event_device] = matches.get(event_device, 0) + 1
        if device in matches:
            beneath = device
        elif matches:
            beneath = max(matches, key=lambda d: matches[d])
        else:
            continue
        for inode, seen in inodes.items():
            out.setdefault((beneath, inode), seen)
    return out
