"""File mode beside a job's start: replay at once, record until the first step, keep the trace.

A replay has the job's own priority. Without one nothing is urgent, and all is done at the lowest
priority from the beginning; what only the end of a recording needs is loaded then.
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

if TYPE_CHECKING:  # loaded when they are needed: replay comes first
    from bootseer.imageprefetch.filemode.file_trace import FileTrace
    from bootseer.imageprefetch.filemode.file_trace_store import Keeper
    from bootseer.imageprefetch.filemode.process_follower import Following
    from bootseer.imageprefetch.filemode.replay import Replayed
    from bootseer.imageprefetch.record.start_recording import FirstStepWatch

POLL_S = 0.2
WINDOW_S = 120.0
LEFT_S = 30.0
"""How long this process may go on after the job, to keep what it recorded."""
ENOUGH_RECORDINGS = 5
"""From so many on, `auto` records only where much of the trace no longer fits."""
MOST_SKIPPED = 0.1
_LONGEST_LOCK_NAME = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings:
    """`place` is a directory or a store's URL; `image` names the image's traces in it, empty: see
    `trace_names.image_here`. `share` and `most_bytes` as in `ReplaySettings`. `began_ns`: when the
    start began, on the wall clock; a quick job may have had its first step before anybody looks for
    it. `options` are the fields of `StoreOptions`."""

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
    """`accompany` by plain values: the fields of `StartSettings`."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in request.items()}
    accompany(StartSettings(**values), writer, pid)


def accompany(settings: StartSettings, writer: NullWriter, pid: int) -> None:
    """Accompany the start of process `pid`, until its first step, its end or the window's end.

    Raises BootseerError for what made it impossible; the job is not concerned by any of it.
    """
    cache_before = rate_limit.cache_bytes()
    image = trace_names.check_image(settings.image or trace_names.image_here())
    with _alone(f"{image}.{settings.workload}") as alone:
        if not alone:
            writer.point("image.replay", attributes={"bootseer.why": "another start does it"})
            return
        path = trace_names.local_path(settings.place, image, settings.workload)
        if path and not os.path.exists(path):
            go_idle()
        with _Job(pid) as job:
            job.watch()
            trace = _known(image, settings, writer)
            job.left_s = LEFT_S
            replayed = _replay(settings, writer, job, trace)
            if _worth_it(settings, trace, replayed):
                go_idle()
                _record(_Start(settings, writer, job, cache_before), image, trace, replayed)


def _keeper(settings: StartSettings) -> Keeper:
    from bootseer.imageprefetch.filemode.file_trace_store import Keeper
    from bootseer.storage.options import StoreOptions

    return Keeper(settings.place, StoreOptions(**(settings.options or {})))


def _replay(
    settings: StartSettings, writer: NullWriter, job: _Job, trace: FileTrace | None
) -> Replayed | None:
    if trace is None:
        return None
    from bootseer.imageprefetch.filemode.replay import ReplaySettings, replay

    about = ReplaySettings(
        roots=settings.roots, share=settings.share, most_bytes=settings.most_bytes
    )
    disk = rate_limit.DiskWatch()
    done = replay(trace, about, stop=lambda asked: job.ended or disk.none_read(asked))
    told = _told(done, trace)
    if disk.none:
        told["bootseer.why"] = "the files are in memory, or on no disk: the rest is left to the job"
    writer.point("image.replay", attributes=told)
    return done


class _Start(NamedTuple):
    """A start being recorded. `cache_before`: see `Following`."""

    settings: StartSettings
    writer: NullWriter
    job: _Job
    cache_before: int | None


def _record(start: _Start, image: str, trace: FileTrace | None, replayed: Replayed | None) -> None:
    from bootseer.imageprefetch.filemode.process_follower import Following

    about, job = start.settings, start.job
    with Following(
        about.roots,
        about.workload,
        job.pid,
        helpers=(os.getpid(),),
        over=lambda: job.ended,
        cache_before=start.cache_before,
    ) as following:
        why = _wait(about, following, job, _watch(start.writer, about.began_ns))
        ranges = replayed.ranges if replayed is not None else {}
        got = following.finish(full=why in ("first step", "window"), replayed=ranges)
    kept = trace
    if got.files or kept is None:
        with _keeper(about) as keeper:
            kept = keeper.add(image, got)
    start.writer.point("image.record", attributes=_recorded(following, got, kept, why))


def _watch(writer: NullWriter, began_ns: int) -> FirstStepWatch | None:
    from bootseer.imageprefetch.record.start_recording import FirstStepWatch

    if not isinstance(writer, Writer):
        return None
    return FirstStepWatch(os.path.dirname(writer.path), began_ns)


def _worth_it(settings: StartSettings, trace: FileTrace | None, done: Replayed | None) -> bool:
    """Whether this start is recorded, now that it is known how much the trace still says."""
    if settings.record == "never":
        return False
    if settings.record == "always" or trace is None or done is None:
        return True
    skipped = sum(done.skipped.values())
    if trace.recordings < ENOUGH_RECORDINGS:
        return True
    return skipped > MOST_SKIPPED * (skipped + done.files)


def _wait(
    settings: StartSettings, following: Following, job: _Job, watch: FirstStepWatch | None
) -> str:
    """Wait for the recording's end; returns what it was."""
    until = time.monotonic() + settings.window_s
    while time.monotonic() < until:
        if watch is not None and watch.reached():
            return "first step"
        if job.wait(POLL_S):
            return "job"
        following.sample()
    return "window"


def _known(image: str, settings: StartSettings, writer: NullWriter) -> FileTrace | None:
    path = trace_names.local_path(settings.place, image, settings.workload)
    if path and not os.path.exists(path):
        return None
    from bootseer.errors import CorruptDataError

    try:
        if path:
            return _in_file(path)
        with _keeper(settings) as keeper:
            return keeper.load(image, settings.workload)
    except CorruptDataError as error:
        writer.point("image.replay", "fallback", {"bootseer.reason": str(error)})
        return None


def _in_file(path: str) -> FileTrace:
    """A directory's trace, without what opens every kind of store: the job reads already."""
    from bootseer.errors import from_os_error
    from bootseer.imageprefetch.filemode import file_trace as filetraces

    try:
        fd = open_to_read(path, os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            data = file.read(filetraces.MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"read the trace {path}") from error
    return filetraces.parse(data, name=f"the trace {path}")


def _told(done: Replayed, trace: FileTrace) -> dict[str, object]:
    told: dict[str, object] = {
        "bootseer.image.mode": "files",
        "bootseer.image.workload": trace.workload,
        "bootseer.bytes": done.size_bytes,
        "bootseer.image.files": done.files,
        "bootseer.duration_ms": round(done.duration_s * 1000),
    }
    if done.skipped:
        told["bootseer.image.skipped"] = dict(done.skipped)
    return told


def _recorded(following: Following, got: FileTrace, kept: FileTrace, why: str) -> dict[str, object]:
    return {
        "bootseer.image.mode": "files",
        "bootseer.image.recorder": following.method,
        "bootseer.why": following.why,
        "bootseer.image.ended_by": why,
        "bootseer.image.workload": got.workload,
        "bootseer.image.full": bool(got.trace.starts),
        "bootseer.image.files": len(got.files),
        "bootseer.bytes": got.trace.touched_bytes(),
        "bootseer.image.starts": kept.trace.starts,
    }


@contextlib.contextmanager
def _alone(name: str) -> Iterator[bool]:
    """Whether this is the only process here that does it: the ranks of a node start together.

    The lock is an abstract socket's name, because a container may have no place to write to; the
    kernel frees it with its process.
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
    """The process that is accompanied; `ended` turns true with its end. A context manager.

    After `watch` this process ends `left_s` after the job: a store that hangs must not keep it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.left_s = 0.0
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
        except OSError:  # an old kernel or a sandbox
            self._fd = -2

    def watch(self) -> None:
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def _leave(self) -> None:
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
