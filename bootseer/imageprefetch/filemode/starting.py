"""File mode beside a job's start: replay at once, record until the first step, keep the trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.filemode.format import FileTrace
from bootseer.imageprefetch.filemode.keeping import Keeper, check_image, image_here
from bootseer.imageprefetch.filemode.places import DEFAULT_ROOTS
from bootseer.imageprefetch.filemode.replaying import SHARE, Replayed, ReplaySettings, replay
from bootseer.profiler.events import NullWriter, Writer
from bootseer.storage.options import StoreOptions

if TYPE_CHECKING:  # loaded when recording begins: replay comes first
    from bootseer.imageprefetch.filemode.recording import Recording
    from bootseer.imageprefetch.recording import FirstStepWatch

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
    `keeping.image_here`. `most_bytes` as in `ReplaySettings`. `began_ns`: when the start began, on
    the wall clock; a quick job may have had its first step before anybody looks for it."""

    place: str
    image: str = ""
    workload: str = ""
    roots: tuple[str, ...] = DEFAULT_ROOTS
    record: Literal["auto", "always", "never"] = "auto"
    window_s: float = WINDOW_S
    share: float = SHARE
    most_bytes: int | None = None
    began_ns: int = 0
    options: StoreOptions | None = None


def run(request: Mapping[str, Any], writer: NullWriter, pid: int) -> None:
    """`accompany` by plain values: the fields of `StartSettings`, options as a table."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in request.items()}
    options = StoreOptions(**values.pop("options"))
    accompany(StartSettings(**values, options=options), writer, pid)


def accompany(settings: StartSettings, writer: NullWriter, pid: int) -> None:
    """Accompany the start of process `pid`, until its first step, its end or the window's end.

    Raises BootseerError for what made it impossible; the job is not concerned by any of it.
    """
    image = check_image(settings.image or image_here())
    with _alone(f"{image}.{settings.workload}") as alone:
        if not alone:
            writer.point("image.replay", attributes={"bootseer.why": "another start does it"})
            return
        with _Job(pid) as job, Keeper(settings.place, settings.options) as keeper:
            job.watch()
            trace = _known(keeper, image, settings, writer)
            job.left_s = LEFT_S
            _accompany(settings, writer, job, keeper, image, trace)


def _accompany(
    settings: StartSettings,
    writer: NullWriter,
    job: _Job,
    keeper: Keeper,
    image: str,
    trace: FileTrace | None,
) -> None:
    done = Replayed()
    if trace is not None:
        about = ReplaySettings(
            roots=settings.roots, share=settings.share, most_bytes=settings.most_bytes
        )
        done = replay(trace, about, stop=lambda: job.ended)
        writer.point("image.replay", attributes=_told(done, trace))
    if settings.record == "never" or not _worth_it(settings, trace, done):
        return
    from bootseer.imageprefetch.filemode.recording import Recording, RecordSettings

    about_it = RecordSettings(roots=settings.roots, workload=settings.workload)
    with Recording(about_it, job.pid) as recording:
        recording.begin()
        os.nice(19)  # from here on nothing is urgent
        recording.survey(racing=True, stop=_until(lambda: job.ended))
        why = _wait(settings, recording, job, _watch(writer, settings.began_ns))
        got = recording.finish(full=why in ("first step", "window"), replayed=done.ranges)
    kept = keeper.add(image, got) if got.files or trace is None else trace
    writer.point("image.record", attributes=_recorded(recording, got, kept, why))


def _watch(writer: NullWriter, began_ns: int) -> FirstStepWatch | None:
    from bootseer.imageprefetch.recording import FirstStepWatch

    if not isinstance(writer, Writer):
        return None
    return FirstStepWatch(os.path.dirname(writer.path), began_ns)


def _until(condition: Callable[[], bool]) -> Iterator[bool]:
    while True:
        yield condition()


def _worth_it(settings: StartSettings, trace: FileTrace | None, done: Replayed) -> bool:
    """Whether this start is recorded, now that it is known how much the trace still says."""
    if settings.record == "always" or trace is None:
        return True
    skipped = sum(done.skipped.values())
    if trace.recordings < ENOUGH_RECORDINGS:
        return True
    return skipped > MOST_SKIPPED * (skipped + done.files)


def _wait(
    settings: StartSettings, recording: Recording, job: _Job, watch: FirstStepWatch | None
) -> str:
    """Wait for the recording's end; returns what it was."""
    until = time.monotonic() + settings.window_s
    while time.monotonic() < until:
        if watch is not None and watch.reached():
            return "first step"
        if job.wait(POLL_S):
            return "job"
        recording.sample()
    return "window"


def _known(
    keeper: Keeper, image: str, settings: StartSettings, writer: NullWriter
) -> FileTrace | None:
    try:
        return keeper.load(image, settings.workload)
    except CorruptDataError as error:
        writer.point("image.replay", "fallback", {"bootseer.reason": str(error)})
        return None


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


def _recorded(recording: Recording, got: FileTrace, kept: FileTrace, why: str) -> dict[str, object]:
    return {
        "bootseer.image.mode": "files",
        "bootseer.image.recorder": recording.method,
        "bootseer.why": recording.why,
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
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def close(self) -> None:
        """Twice is safe."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
