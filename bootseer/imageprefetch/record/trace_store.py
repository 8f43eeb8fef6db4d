"""Traces of an image's starts, kept on this node and merged start by start.

One file a workload, in the folder of the image. Every start adds its own under a lock, so that
starts of any number of processes end at once without losing one another's; readers see the old
trace or the new one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bootseer import events
from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import LIMITS, Trace
from bootseer.errors import CorruptDataError, UsageError, from_os_error
from bootseer.imageprefetch.image_cache import DEFAULT_NAME
from bootseer.imageprefetch.workloads import check_workload
from bootseer.system import file_lock
from bootseer.system.atomic import replace_file
from bootseer.system.file_lock import FileLock

SUFFIX = ".trace"
PUSHED = ".pushed"  # a workload's trace, as far as a published one holds it


class TraceStore:
    """The traces in one folder, which is made when the first is added."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, workload: str = "") -> Path:
        """Where a workload's trace lies, if there is one."""
        return self.folder / f"{check_workload(workload) or DEFAULT_NAME}{SUFFIX}"

    def workloads(self) -> list[str]:
        """The workloads that have a trace, sorted."""
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(SUFFIX)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os_error(error, f"list the traces in {self.folder}") from error
        known = (name.removesuffix(SUFFIX) for name in names)
        return sorted("" if name == DEFAULT_NAME else name for name in known)

    def load(self, workload: str = "") -> Trace | None:
        """A workload's merged trace; None when there is none.

        Raises CorruptDataError for a damaged one, whose file is left where it is.
        """
        return _read(self.path(workload))

    def pushed(self, workload: str = "") -> Trace | None:
        """What of a workload's trace was published; None when nothing was, or it is damaged."""
        try:
            return _read(self.path(workload).with_suffix(PUSHED))
        except CorruptDataError:
            return None

    def keep_pushed(self, trace: Trace) -> None:
        """A published trace holds this one, which is or was kept here, from now on."""
        path = self.path(trace.workload).with_suffix(PUSHED)
        with self._locked():
            self._publish(path, traces.serialise(within(trace)))

    def add(self, trace: Trace) -> Trace:
        """Merge a start's trace in; returns what is kept now.

        A kept trace that is damaged, or of other bytes (the block image was made anew by other
        rules), is set aside and replaced: it must not stop recording for ever.
        """
        path = self.path(trace.workload)
        with self._locked():
            try:
                kept = self.load(trace.workload)
                merged = traces.merge([kept, trace]) if kept else trace
            except (CorruptDataError, UsageError) as error:
                merged = trace
                _set_aside(path, str(error))
            merged = within(merged)
            self._publish(path, traces.serialise(merged))
        return merged

    def replace(self, trace: Trace) -> None:
        """Keep this trace instead of whatever is kept for its workload."""
        with self._locked():
            self._publish(self.path(trace.workload), traces.serialise(within(trace)))

    def _locked(self) -> FileLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return file_lock.acquire(f"{self.folder}/.lock", 0o644)  # merging takes milliseconds
        except OSError as error:
            raise from_os_error(error, f"keep traces in {self.folder}") from error

    def _publish(self, path: Path, data: bytes) -> None:
        try:
            replace_file(str(path), data, mode=0o644, exact_mode=True)
        except OSError as error:
            raise from_os_error(error, f"write the trace {path}") from error


def _read(path: Path) -> Trace | None:
    try:
        with open(path, "rb") as file:
            data = file.read(LIMITS.packed_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, f"read the trace {path}") from error
    return traces.parse(data, name=f"the trace {path}")


def _set_aside(path: Path, reason: str) -> None:
    with contextlib.suppress(OSError):
        os.replace(path, path.with_suffix(".damaged"))
    with events.open_writer() as writer:
        writer.point("image.trace", "fallback", {"bootseer.reason": reason})


def within(trace: Trace, most_extents: int = LIMITS.extents) -> Trace:
    """The trace as a file may hold it: the extents that fewest starts saw go first."""
    starts, replays = min(trace.starts, LIMITS.starts), min(trace.replays, LIMITS.starts)
    counted = (starts, replays) == (trace.starts, trace.replays)
    if len(trace.extents) <= most_extents and counted:
        return trace

    def few(number: int) -> tuple[int, int]:
        extent = trace.extents[number]
        return -extent.starts_seen, -extent.replays_seen

    ranked = sorted(range(len(trace.extents)), key=few)
    extents = tuple(
        trace.extents[n]._replace(
            starts_seen=min(trace.extents[n].starts_seen, max(starts, 1)),
            replays_seen=min(trace.extents[n].replays_seen, max(replays, 1)),
        )
        for n in sorted(ranked[:most_extents])
    )
    return dataclasses.replace(trace, starts=starts, replays=replays, extents=extents)
