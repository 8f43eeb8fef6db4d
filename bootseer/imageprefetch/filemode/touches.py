"""From observations to touches, for both ways of recording. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from bootseer.blocks.extents import Extent, subtract
from bootseer.imageprefetch.filemode.file_trace import Touch
from bootseer.imageprefetch.filemode.mincore import FileState
from bootseer.imageprefetch.filemode.tracefs import PageAdded

WHOLE_BYTES = 1 << 20  # a file of which only the opening is known counts whole up to this size


def ms(seconds: float) -> int:
    """Milliseconds since a start began, never before it."""
    return max(0, int(seconds * 1000))


def from_events(
    files: Iterable[FileState], added: Iterable[PageAdded], begun_s: float
) -> Iterator[Touch]:
    """The touches of these files by the kernel's events since `begun_s`."""
    events = [event for event in added if event.at_s >= begun_s]
    by_inode = _by_inode(files, events)
    for event in events:
        file = by_inode.get((event.device, event.inode))
        if file is not None and event.offset < file.size_bytes:
            yield Touch(file.path, event.offset, event.length, ms(event.at_s - begun_s))


def pages_of_opened(
    file: FileState, opened_paths: Container[str], mapped: Mapping[str, list[Extent]]
) -> list[Extent]:
    """What counts as touched of a file whose pages in memory are unknown."""
    if file.size_bytes <= WHOLE_BYTES:
        is_touched = file.path in opened_paths or file.path in mapped
        return [Extent(0, file.size_bytes)] if is_touched else []
    return mapped.get(file.path, [])


def by_path(several: Iterable[Touch]) -> dict[str, list[tuple[int, int]]]:
    """The ranges of each file."""
    out: dict[str, list[tuple[int, int]]] = {}
    for touch in several:
        out.setdefault(touch.path, []).append((touch.offset, touch.length))
    return out


def subtract_ranges(
    several: Iterable[Touch], ranges: Mapping[str, Sequence[tuple[int, int]]]
) -> Iterator[Touch]:
    """Touches, or parts of them, that are not in these ranges of their file."""
    for touch in several:
        excluded = ranges.get(touch.path)
        if not excluded:
            yield touch
            continue
        for left in subtract([(touch.offset, touch.length)], excluded):
            yield Touch(touch.path, left.offset, left.length, touch.first_touch_ms)


def _by_inode(
    files: Iterable[FileState], added: Sequence[PageAdded]
) -> dict[tuple[int, int], FileState]:
    """Files by the device and inode of their data, as the kernel's events name them.

    A file on overlayfs has its data's inode number, but the overlay's own device. The device
    beneath follows from the events: it is the one with most of the overlay's inode numbers.
    """
    by_device: dict[int, dict[int, FileState]] = {}
    for file in files:
        by_device.setdefault(file.device, {})[file.inode] = file
    pairs = {(event.device, event.inode): event.offset for event in added}
    out: dict[tuple[int, int], FileState] = {}
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
        for inode, file in inodes.items():
            out.setdefault((beneath, inode), file)
    return out
