"""Read event files into `spans.Loaded`: fast, and with every fault counted instead of fatal.

Files are read in blocks of whole lines. A block of lines in the event writer's own form is taken
apart by a pattern (see `line_blocks`). Any other is parsed as one JSON array, which is twice as
fast as line by line; when that fails, its lines are parsed one by one and the bad ones counted.
Many files are parsed by several processes (see `readers`). These do what depends on one file alone;
here all of it is joined in the order of the files, so the result does not depend on which process
read what.
"""

from __future__ import annotations

import gc
import io
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.profiler.report.load import readers
from bootseer.profiler.report.load.identity import identity_of
from bootseer.profiler.report.load.line_blocks import RESOURCE_START, decode_json, pack_lines
from bootseer.profiler.report.load.pairing import Collector
from bootseer.profiler.report.load.segments import pack_events
from bootseer.profiler.report.load.spans import Loaded
from bootseer.profiler.report.load.templates import Templates
from bootseer.profiler.report.model import Problem

_FIRST_BYTES = 64 << 10  # holds a whole file of the usual size; asking for more costs its pages
_BLOCK_BYTES = 8 << 20
_MAX_LINE_BYTES = 1 << 20  # the writer's limit is 32 KiB; a longer line is not an event

DETAILS = {
    "unreadable": "could not be opened or read, or is no regular file",
    "empty-file": "the file is empty: its process was killed before its first event",
    "empty-pipe": "nothing writes to this pipe now, so there was nothing to read",
    "torn-line": "a line stops in the middle: its writer was killed or the disk was full",
    "not-text": "bytes that are not text",
    "bad-line": "a line that is not a JSON object",
    "bad-event": "a line that lacks an event's fields or has wrong types in them",
    "newer-version": "events of a newer version, read as far as this version knows them",
    "no-resource": "no resource line: the node is taken from the file's name",
    "clock-jump": "the wall clock jumped, within a process or between two of a node; the monotonic "
    "clock was used instead",
    "clock-set-back": "the wall clock was set back, and these events know no other clock: times "
    "before and after that do not fit together",
    "other-unit": "times in seconds, milliseconds or microseconds where nanoseconds belong; read "
    "as what they must be, without the monotonic clock",
    "run-of-same-name": "the job was made again under its name, which is all that its pods know it "
    "by, or a pod was added or replaced while all others were at work: a start of its own, told "
    "from the one before by the pods' uids",
    "negative-duration": "a phase ended before it began; its length is unknown",
    "end-without-begin": "the end of a phase whose begin is missing",
    "duplicate-event": "an event that was already read",
    "duplicate-file": "all events of this file were already read from another one",
}


def load(paths: Sequence[str]) -> Loaded:
    """Read all event files under `paths` (files as they are, directories for `*.jsonl`).

    Raises NotFoundError when there is no file at all, CorruptDataError when there are files but
    not one event in them. Anything less is a `Problem` of the result.
    """
    counts: Counter[tuple[str, str]] = Counter()
    files, size = _find_files(paths, counts)
    collector = Collector(counts)
    templates = Templates()
    pack_file = partial(_pack_file, templates=templates)
    with pause_garbage_collection(), readers.pack_files(files, size, pack_file) as results:
        for path, packed in zip(files, results, strict=True):
            if packed is None or not _add_packed(packed, path, collector, counts):
                _read_file(path, collector, counts, templates)
        starts = collector.finish()
    problems = tuple(
        Problem(path, kind, count, DETAILS[kind]) for (path, kind), count in counts.items()
    )
    if not starts:
        named = ", ".join(paths)
        if not files:
            raise NotFoundError(
                f"no event files at {named}; give the directory that BOOTSEER_EVENTS named"
            )
        worst = ", ".join(sorted({f"{p.kind} in {p.file}" for p in problems})[:3])
        raise CorruptDataError(
            f"no events in {len(files)} files at {named} ({worst or 'resource lines only'}); "
            "check that these are event files of bootseer"
        )
    return Loaded(tuple(starts), problems)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Looking for cycles among a million records that have none would take half the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _find_files(paths: Sequence[str], counts: Counter[tuple[str, str]]) -> tuple[list[str], int]:
    """All event files, each once (by device and inode), in a stable order; and their bytes."""
    files: dict[tuple[int, int], str] = {}
    size = 0

    def note_unreadable(error: OSError) -> None:
        counts[str(error.filename), "unreadable"] += 1

    for path in paths:
        if os.path.isdir(path):
            candidates = sorted(
                os.path.join(folder, name)
                for folder, _, names in os.walk(path, onerror=note_unreadable)
                for name in names
                if name.endswith(".jsonl")
            )
        else:
            candidates = [path]
        for candidate in candidates:
            try:
                status = os.stat(candidate)
            except FileNotFoundError:
                if candidate == path:
                    raise NotFoundError(
                        f"no such file or directory: {path}; check the path"
                    ) from None
                counts[candidate, "unreadable"] += 1
            except OSError:
                counts[candidate, "unreadable"] += 1
            else:
                files.setdefault((status.st_dev, status.st_ino), candidate)
                size += status.st_size
    return list(files.values()), size


def _add_packed(
    packed: readers.PackedFile, path: str, collector: Collector, counts: Counter[tuple[str, str]]
) -> bool:
    """Add a file that another process read; False, with nothing added, if it must be read here."""
    problems, segments, writers = packed
    collector.open_file(path)
    if not collector.can_add(segments):
        return False
    for kind, count in problems:
        counts[path, kind] += count
    collector.add_segments(segments, writers)
    collector.close_file()
    return True


def _pack_file(path: str, templates: Templates) -> readers.PackedFile | None:
    """What a file holds, if it is no longer than one block and made of segments."""
    try:
        with _open(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size < _BLOCK_BYTES:
                return None
            # A buffer of a whole block's size would cost its pages for every small file.
            block = os.read(file.fileno(), status.st_size + 1)
            if not block or os.read(file.fileno(), 1):
                return None
    except OSError:
        return None
    counts: Counter[tuple[str, str]] = Counter()
    segments = pack_lines(block, whole=True, templates=templates)
    segments = segments or pack_events(_parse_events(block, path, counts), whole=True)
    if segments is None:
        return None
    problems = [(kind, count) for (_, kind), count in counts.items()]
    return problems, segments, [identity_of(segment.resource, path) for segment in segments]


def _open(path: str) -> io.BufferedReader:
    # O_NONBLOCK: a FIFO among the files must not stop the report.
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _read_file(
    path: str, collector: Collector, counts: Counter[tuple[str, str]], templates: Templates
) -> None:
    collector.open_file(path)
    size = 0
    try:
        with _open(path) as file:
            status = os.fstat(file.fileno())
            mode = status.st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # /dev/zero has no end
                raise OSError
            # One byte more than there are shows at once that there are no more.
            for block in _read_blocks(file.fileno(), status.st_size + 1):
                whole = not size and len(block) == status.st_size
                size += len(block)
                _parse_block(block, path, collector, counts, whole, templates)
    except OSError:
        counts[path, "unreadable"] += 1
    else:
        if not size:
            counts[path, "empty-pipe" if stat.S_ISFIFO(mode) else "empty-file"] += 1
    collector.close_file()


def _read_blocks(fd: int, first_bytes: int) -> Iterator[bytes]:
    """Blocks of whole lines, the last line possibly without its newline."""
    rest = b""
    ask_bytes = min(max(first_bytes, _FIRST_BYTES), _BLOCK_BYTES)
    while data := os.read(fd, ask_bytes):
        ask_bytes = _BLOCK_BYTES if len(data) == ask_bytes else ask_bytes
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut]
        rest = data[cut:]
        if len(rest) > _MAX_LINE_BYTES:
            yield rest[:_MAX_LINE_BYTES]  # counted as one bad line, then go on behind it
            rest = b""
    if rest:
        yield rest


def _parse_block(
    block: bytes,
    path: str,
    collector: Collector,
    counts: Counter[tuple[str, str]],
    whole: bool,
    templates: Templates,
) -> None:
    """Give the collector a block's events, as segments if possible.

    With `whole`, it is the file's only block.
    """
    ahead, rest = (b"", block) if whole else _cut_at_resource(block)
    segments = pack_lines(rest, whole=whole, templates=templates)
    if segments is None:
        _add_events(_parse_events(block, path, counts), collector, whole)
        return
    if ahead:
        _add_events(_parse_events(ahead, path, counts), collector, whole)
    if collector.can_add(segments):
        collector.add_segments(segments)
    else:
        collector.add_events(_parse_events(rest, path, counts))


def _cut_at_resource(block: bytes) -> tuple[bytes, bytes]:
    """A block cut before its first resource line."""
    if block.startswith(RESOURCE_START):
        return b"", block
    cut = block.find(b"\n" + RESOURCE_START) + 1
    return (block[:cut], block[cut:]) if cut else (block, b"")


def _add_events(events: list[object], collector: Collector, whole: bool) -> None:
    if not whole:  # events of a writer whose resource line stood in an earlier block
        starts = (index for index, event in enumerate(events) if _is_resource(event))
        ahead = next(starts, len(events))
        collector.add_events(events[:ahead])
        events = events[ahead:]
    segments = pack_events(events, whole=whole)
    if segments is not None and collector.can_add(segments):
        collector.add_segments(segments)
    else:
        collector.add_events(events)


def _is_resource(event: object) -> bool:
    return isinstance(event, dict) and event.get("event") == "resource"


def _parse_events(block: bytes, path: str, counts: Counter[tuple[str, str]]) -> list[object]:
    """The values that a block's lines hold as JSON; lines that hold none are counted."""
    if block.endswith(b"\n"):
        joined = block[:-1].replace(b"\n", b",")
        try:
            events = decode_json("[" + joined.decode("utf-8") + "]")
        except (ValueError, RecursionError):
            events = []
        # Equal counts rule out that a torn line and its successor made one value together.
        if len(events) == block.count(b"\n"):
            return events  # type: ignore[no-any-return]
    return list(_parse_lines(block, path, counts))


def _parse_lines(block: bytes, path: str, counts: Counter[tuple[str, str]]) -> Iterator[object]:
    for line in block.split(b"\n"):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            counts[path, "not-text"] += 1
            continue
        try:
            yield decode_json(text)
        except (ValueError, RecursionError):
            counts[path, "torn-line" if text.startswith("{") else "bad-line"] += 1
