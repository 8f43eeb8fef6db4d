"""File mode during a job's start: replay at once, record until the first step, keep the trace.

A replay has the job's own priority. Without one nothing is urgent, and everything is done at idle
priority. What only the end of a recording needs is imported then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bootseer.events.writer import NullWriter, Writer
from bootseer.imageprefetch.filemode import rate_limit, trace_names
from bootseer.system.priority import go_idle
from bootseer.system.readiness import readable
from bootseer.system.regular_files import open_to_read

if TYPE_CHECKING:  # imported when they are needed: the replay comes first
    from bootseer.imageprefetch.filemode.file_trace import FileTrace
    from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore
    from bootseer.imageprefetch.filemode.process_follower import ProcessFollower
    from bootseer.imageprefetch.filemode.replay import FileReplayResult
    from bootseer.imageprefetch.record.first_step import FirstStepWatch

POLL_S = 0.2
WINDOW_S = 120.0
LEFT_S = 30.0
"""How long this process may run after the job's end, to write its trace."""
ENOUGH_RECORDINGS = 5
"""From so many on, `auto` records only where much of the trace no longer fits the files."""
MOST_SKIPPED = 0.1
_LONGEST_LOCK_NAME = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings:
    """The settings of file mode for one start.

    - `place`: the traces, in a directory or at a store's URL.
    - `image`: names the image's traces there; "": see `trace_names.image_here`.
    - `share`, `most_bytes`: as in `ReplaySettings`.
    - `began_ns`: the start's begin on the wall clock; a quick job may have had its first step
      before this process looks for it.
    - `options`: the fields of `StoreOptions`.
    """

    place: str
    image: str = ""
    workload: str = ""
    roots: tuple[str, ...] = ("/",)
    record: Literal["auto", "always", "never"] = "auto"
    window_s: float = WINDOW_S
    share: float = 0.25
    most_bytes: int | None = None
    began_ns: int = 0
    options: Mapping[str, Any] | None = None


def run(request: Mapping[str, Any], writer: NullWriter, pid: int) -> None:
    """As `accompany`, with the fields of `StartSettings` as plain values."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in request.items()}
    accompany(StartSettings(**values), writer, pid)


def accompany(settings: StartSettings, writer: NullWriter, pid: int) -> None:
    """Replay and record the start of process `pid`, until its first step, its or the window's end.

    Raises BootseerError where that is impossible, which does not affect the job.
    """
    cache_before = rate_limit.cache_bytes()
    image = trace_names.check_image(settings.image or trace_names.image_here())
    with _lock_on_node(f"{image}.{settings.workload}") as is_alone:
        if not is_alone:
            writer.point("image.replay", attributes={"bootseer.why": "another start does it"})
            return
        path = trace_names.local_path(settings.place, image, settings.workload)
        if path and not os.path.exists(path):
            go_idle()
        with _Job(pid) as job:
            job.watch()
            trace = _load_trace(image, settings, writer)
            job.left_s = LEFT_S
            replayed = _replay(settings, writer, job, trace)
            if _is_to_record(settings, trace, replayed):
                go_idle()
                _record(_Start(settings, writer, job, cache_before), image, trace, replayed)


def _open_store(settings: StartSettings) -> FileTraceStore:
    from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore
    from bootseer.storage.options import StoreOptions

    return FileTraceStore.open(settings.place, StoreOptions(**(settings.options or {})))


def _replay(
    settings: StartSettings, writer: NullWriter, job: _Job, trace: FileTrace | None
) -> FileReplayResult | None:
    if trace is None:
        return None
    from bootseer.imageprefetch.filemode.replay import ReplaySettings, replay

    replay_settings = ReplaySettings(
        roots=settings.roots, share=settings.share, most_bytes=settings.most_bytes
    )
    disk = rate_limit.DiskWatch.begin()
    result = replay(
        trace, replay_settings, stop=lambda requested: job.ended or disk.none_read(requested)
    )
    attributes = _replay_attributes(result, trace)
    if disk.none:
        why = "the files are in memory, or on no disk: the rest is left to the job"
        attributes["bootseer.why"] = why
    writer.point("image.replay", attributes=attributes)
    return result


class _Start(NamedTuple):
    """A start that is recorded. `cache_before`: see `ProcessFollower`."""

    settings: StartSettings
    writer: NullWriter
    job: _Job
    cache_before: int | None


def _record(
    start: _Start, image: str, trace: FileTrace | None, replayed: FileReplayResult | None
) -> None:
    from bootseer.imageprefetch.filemode.process_follower import ProcessFollower

    settings, job = start.settings, start.job
    with ProcessFollower(
        settings.roots,
        settings.workload,
        job.pid,
        helpers=(os.getpid(),),
        over=lambda: job.ended,
        cache_before=start.cache_before,
    ) as follower:
        ended_by = _wait(settings, follower, job, _begin_watch(start.writer, settings.began_ns))
        ranges = replayed.ranges if replayed is not None else {}
        new = follower.finish(full=ended_by in ("first step", "window"), replayed=ranges)
    merged = trace
    if new.files or merged is None:
        with _open_store(settings) as store:
            merged = store.add(image, new)
    start.writer.point(
        "image.record", attributes=_record_attributes(follower, new, merged, ended_by)
    )


def _begin_watch(writer: NullWriter, began_ns: int) -> FirstStepWatch | None:
    from bootseer.imageprefetch.record.first_step import FirstStepWatch

    if not isinstance(writer, Writer):
        return None
    return FirstStepWatch.begin(os.path.dirname(writer.path), began_ns)


def _is_to_record(
    settings: StartSettings, trace: FileTrace | None, replayed: FileReplayResult | None
) -> bool:
    """Whether this start is recorded, now that it is known how much of the trace still fits."""
    if settings.record == "never":
        return False
    if settings.record == "always" or trace is None or replayed is None:
        return True
    skipped = sum(replayed.skipped.values())
    if trace.recordings < ENOUGH_RECORDINGS:
        return True
    return skipped > MOST_SKIPPED * (skipped + replayed.files)


def _wait(
    settings: StartSettings, follower: ProcessFollower, job: _Job, watch: FirstStepWatch | None
) -> str:
    """Wait for the recording's end; returns its reason."""
    until = time.monotonic() + settings.window_s
    while time.monotonic() < until:
        if watch is not None and watch.was_reached():
            return "first step"
        if job.wait(POLL_S):
            return "job"
        follower.sample()
    return "window"


def _load_trace(image: str, settings: StartSettings, writer: NullWriter) -> FileTrace | None:
    path = trace_names.local_path(settings.place, image, settings.workload)
    if path and not os.path.exists(path):
        return None
    from bootseer.errors import CorruptDataError

    try:
        if path:
            return _read_trace(path)
        with _open_store(settings) as store:
            return store.load(image, settings.workload)
    except CorruptDataError as error:
        writer.point("image.replay", "fallback", {"bootseer.reason": str(error)})
        return None


def _read_trace(path: str) -> FileTrace:
    """Read a trace of a directory without importing the stores: the job reads already."""
    from bootseer.errors import from_os_error
    from bootseer.imageprefetch.filemode import file_trace as filetraces

    try:
        fd = open_to_read(path, os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            data = file.read(filetraces.MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"read the trace {path}") from error
    return filetraces.parse(data, name=f"the trace {path}")


def _replay_attributes(result: FileReplayResult, trace: FileTrace) -> dict[str, object]:
    attributes: dict[str, object] = {
        "bootseer.image.mode": "files",
        "bootseer.image.workload": trace.workload,
        "bootseer.bytes": result.size_bytes,
        "bootseer.image.files": result.files,
        "bootseer.duration_ms": round(result.duration_s * 1000),
    }
    if result.skipped:
        attributes["bootseer.image.skipped"] = dict(result.skipped)
    return attributes


def _record_attributes(
    follower: ProcessFollower, new: FileTrace, merged: FileTrace, ended_by: str
) -> dict[str, object]:
    return {
        "bootseer.image.mode": "files",
        "bootseer.image.recorder": follower.method,
        "bootseer.why": follower.why,
        "bootseer.image.ended_by": ended_by,
        "bootseer.image.workload": new.workload,
        "bootseer.image.full": bool(new.trace.starts),
        "bootseer.image.files": len(new.files),
        "bootseer.bytes": new.trace.touched_bytes(),
        "bootseer.image.starts": merged.trace.starts,
    }


@contextlib.contextmanager
def _lock_on_node(name: str) -> Iterator[bool]:
    """Whether this is the only process of the node for that name: all ranks start at once.

    The lock is the name of an abstract socket, because a container may have no writable directory;
    the kernel frees it with its process.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        try:
            lock.bind(f"\0bootseer-files-{os.geteuid()}-{name}"[:_LONGEST_LOCK_NAME])
        except OSError:
            yield False
            return
        yield True
    finally:
        lock.close()


class _Job:
    """The job's process; `ended` becomes true with its end. A context manager.

    After `watch` this process ends `left_s` after the job: a store that hangs must not keep it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.left_s = 0.0
        self._fd = -1

    def watch(self) -> None:
        """Exit `left_s` after the job's end."""
        threading.Thread(target=self._exit_later, name="leave", daemon=True).start()

    def _exit_later(self) -> None:
        while not self.wait(1.0):
            pass
        time.sleep(self.left_s)
        os._exit(0)

    @property
    def ended(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        if self._fd == -1:
            return True
        if self._fd == -2:
            time.sleep(timeout_s)
            return not os.path.exists(f"/proc/{self.pid}")
        return bool(readable(self._fd, timeout_s=timeout_s))

    def close(self) -> None:
        """Twice is safe."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> _Job:
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._fd = -1
        except OSError:  # an old kernel or a sandbox
            self._fd = -2
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
