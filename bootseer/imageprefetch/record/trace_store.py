"""The traces of an image's starts on this node, one file a workload.

Every start merges its own trace under a lock, so that any number of starts can end at once;
readers see either the old trace or the new one.
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
from bootseer.imageprefetch.workloads import file_name, workload_of
from bootseer.system import file_lock
from bootseer.system.atomic import replace_file
from bootseer.system.file_lock import FileLock

SUFFIX = ".trace"
PUSHED = ".pushed"  # the part of a workload's trace that a published one contains


class TraceStore:
    """The traces in one folder, which is created with the first one."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, workload: str = "") -> Path:
        """The file of a workload's trace."""
        return self.folder / f"{file_name(workload)}{SUFFIX}"

    def workloads(self) -> list[str]:
        """The workloads that have a trace, sorted."""
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(SUFFIX)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os_error(error, f"list the traces in {self.folder}") from error
        return sorted(workload_of(name.removesuffix(SUFFIX)) for name in names)

    def load(self, workload: str = "") -> Trace | None:
        """A workload's merged trace; None when there is none.

        Raises CorruptDataError for a damaged one, whose file is left where it is.
        """
        return _read(self.path(workload))

    def read_pushed(self, workload: str = "") -> Trace | None:
        """The part of a workload's trace that was published; None without one, or if damaged."""
        try:
            return _read(self.path(workload).with_suffix(PUSHED))
        except CorruptDataError:
            return None

    def keep_pushed(self, trace: Trace) -> None:
        """Note that a published trace contains this one, which is or was this node's."""
        path = self.path(trace.workload).with_suffix(PUSHED)
        with self._acquire_lock():
            self._publish(path, traces.serialise(fit_limits(trace)))

    def add(self, trace: Trace) -> Trace:
        """Merge a start's trace in; returns the merged trace.

        A kept trace that is damaged, or of other bytes (after a rebuild of the block image by other
        rules), is set aside and replaced: it must not prevent recording for ever.
        """
        path = self.path(trace.workload)
        with self._acquire_lock():
            try:
                kept = self.load(trace.workload)
                merged = traces.merge([kept, trace]) if kept else trace
            except (CorruptDataError, UsageError) as error:
                merged = trace
                _set_aside(path, str(error))
            merged = fit_limits(merged)
            self._publish(path, traces.serialise(merged))
        return merged

    def replace(self, trace: Trace) -> None:
        """Keep this trace in place of its workload's earlier one."""
        with self._acquire_lock():
            self._publish(self.path(trace.workload), traces.serialise(fit_limits(trace)))

    def _acquire_lock(self) -> FileLock:
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


def fit_limits(trace: Trace, most_extents: int = LIMITS.extents) -> Trace:
    """The trace within a file's limits: extents that the fewest starts saw are dropped first."""
    starts, replays = min(trace.starts, LIMITS.starts), min(trace.replays, LIMITS.starts)
    counts_fit = (starts, replays) == (trace.starts, trace.replays)
    if len(trace.extents) <= most_extents and counts_fit:
        return trace

    def rank(number: int) -> tuple[int, int]:
        extent = trace.extents[number]
        return -extent.starts_seen, -extent.replays_seen

    ranked = sorted(range(len(trace.extents)), key=rank)
    extents = tuple(
        trace.extents[n]._replace(
            starts_seen=min(trace.extents[n].starts_seen, max(starts, 1)),
            replays_seen=min(trace.extents[n].replays_seen, max(replays, 1)),
        )
        for n in sorted(ranked[:most_extents])
    )
    return dataclasses.replace(trace, starts=starts, replays=replays, extents=extents)
