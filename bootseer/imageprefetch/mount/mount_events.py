"""The events and log lines of an image's server, and the file of its faults."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer.errors import CorruptDataError, DeadlineError, StoreUnavailableError
from bootseer.reporting import Reporter

if TYPE_CHECKING:
    from bootseer.blockimage.serve.image_server import ImageServer
    from bootseer.events.writer import NullWriter
    from bootseer.imageprefetch.mount.hotset_replay import ReplayResult
    from bootseer.imageprefetch.resolve.resolver import ResolvedImage

MOUNT, REPLAY, READS, FAULT = "image.mount", "image.replay", "image.reads", "image.fault"
_MOST_BYTES = 64 << 10
_EVERY_S = 0.1


class FaultLog:
    """The file by which all containers on a server learn of its faults (`run.server_log`).

    A line is a kind and a text, in JSON. A fault that lasts is written again and again, for later
    readers; the file is cut when it is long. Nothing raises.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._written_s: dict[str, float] = {}

    @classmethod
    def open(cls, path: str) -> FaultLog:
        """Open the file, made when missing. Where that fails, the log keeps nothing."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return cls(os.open(path, flags, 0o600))
        except OSError:  # a full runtime directory must not prevent a mount
            return cls(-1)

    def write(self, kind: str, text: str) -> None:
        """Add a fault; from any thread."""
        now_s = time.monotonic()
        with self._lock, contextlib.suppress(OSError):
            if self._fd < 0 or now_s - self._written_s.get(kind, -_EVERY_S) < _EVERY_S:
                return
            self._written_s[kind] = now_s
            if os.fstat(self._fd).st_size > _MOST_BYTES:
                os.ftruncate(self._fd, 0)
            os.write(self._fd, json.dumps([kind, text]).encode() + b"\n")


class MountEvents:
    """The events and log lines of one server; `say` writes to the log.

    Every kind of fault is reported once, and every outage: one that begins `again_s` after another,
    and after reads that succeeded, is a new one. To `faults` each is written whenever it occurs.
    `notes` are for the caller: choices that are not as usual.
    """

    def __init__(
        self,
        ref: str,
        workload: str,
        say: Callable[[str], None],
        faults: FaultLog,
        writer: NullWriter,
        *,
        again_s: float,
    ) -> None:
        self._faults, self._again_s = faults, again_s
        self._outage, self._outage_s, self._came = 0, 0.0, (0, 0)
        self._about = {"bootseer.image.ref": ref, "bootseer.image.workload": workload}
        self._writer = writer
        self._reporter = Reporter(
            FAULT,
            lambda text: say(f"{ref}: {text}"),
            log_first=True,
            endless=True,
            writer=writer,
            attributes=self._about,
        )
        self._lock = threading.Lock()
        self._spans: dict[str, str] = {}
        self._mounted_ns = time.monotonic_ns()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Report a choice that is not as usual, also to the caller."""
        self.notes.append(text)
        self.fault("note", text)

    def fault(self, kind: str, text: str) -> None:
        """Report a fault that readers do not see, once a kind."""
        self._report(kind, kind, text)

    def _report(self, which: str, kind: str, text: str) -> None:
        self._faults.write(f"{os.getpid()} {which}", text)
        self._reporter.report(kind, text, same=which)

    def read_failed(self, offset: int, error: BaseException, came: tuple[int, int]) -> None:
        """Report that a reader got EIO.

        `came` is how many reads have waited and got their bytes, and how many bytes were fetched.
        """
        text = f"a read at {offset} got an input/output error: {error}"
        is_outage = isinstance(error, (StoreUnavailableError, DeadlineError))
        kind = "read outage" if is_outage else f"read {type(error).__name__}"
        if isinstance(error, CorruptDataError):  # other reads say nothing about these bytes
            self.fault(kind, text)
            return
        with self._lock:
            now_s = time.monotonic()
            # Both: cached bytes are waited for in an outage too, and late bytes may come in vain.
            grown = came[0] > self._came[0] and came[1] > self._came[1]
            if not self._outage or (grown and now_s - self._outage_s >= self._again_s):
                self._outage, self._outage_s = self._outage + 1, now_s
            self._came = came
            which = f"{kind} {self._outage}"
        self._report(which, kind, text)

    def begin(self, name: str, at_ns: tuple[int, int] | None = None) -> None:
        """Begin a span, now or when the wall clock and CLOCK_MONOTONIC had these nanoseconds."""
        wall_ns, mono_ns = at_ns or (None, None)
        self._spans[name] = self._writer.begin(
            name, self._about, time_unix_nano=wall_ns, mono_nano=mono_ns
        )

    def _end(self, name: str, status: str, attributes: dict[str, Any]) -> None:
        span = self._spans.pop(name, None)
        if span is not None:
            self._writer.end(span, name, status, {**self._about, **attributes})

    def report_mounted(
        self, resolved: ResolvedImage, *, hot: bool, loop: bool, complete: bool = False
    ) -> None:
        """The tree is mounted."""
        lazy = "cache" if resolved.offline else "lazy"
        attributes = {
            "bootseer.bytes": resolved.fetched_bytes,
            "bootseer.image.mode": "complete" if complete else lazy,
            "bootseer.image.hot_set": "used" if hot else "none",
            "bootseer.image.loop": loop,
        }
        self._end(MOUNT, "fallback" if self.notes else "ok", attributes)
        self._mounted_ns = time.monotonic_ns()

    def report_mount_failure(self, error: BaseException) -> None:
        """The mount failed."""
        attributes = {"error.type": type(error).__name__, "error.message": str(error)}
        self._end(MOUNT, "error", attributes)

    def report_missing(self) -> None:
        """There is no such image, as may be."""
        self._end(MOUNT, "ok", {"bootseer.image.mode": "missing", "bootseer.bytes": 0})

    def report_shared(self) -> None:
        """Another server serves the image."""
        self._end(MOUNT, "ok", {"bootseer.image.mode": "shared", "bootseer.bytes": 0})

    def report_replayed(self, server: ImageServer) -> None:
        """The hot set has arrived, or as much of it as ever will."""
        passed_ms = (time.monotonic_ns() - self._mounted_ns) // 1_000_000
        attributes = {
            "bootseer.bytes": server.hot_bytes,
            "bootseer.image.frames": server.hot_frames,
            "bootseer.duration_ms": passed_ms,
        }
        # No span: it runs in parallel to the start's own phases and takes none of their time.
        self._writer.point(REPLAY, "ok", {**self._about, **attributes})

    def report_read_ahead(self, result: ReplayResult) -> None:
        """A further workload's hot set was read ahead through another mount's server."""
        attributes = {
            "bootseer.image.files": result.files,
            "bootseer.image.warmed_bytes": result.bytes,
        }
        self._writer.point(REPLAY, "ok", {**self._about, **attributes})

    def reads(self, server: ImageServer, boot_bytes: int) -> None:
        """Report what reads have cost so far, and where their bytes came from."""
        counted, fetched = server.reads, server.count_fetched()
        attributes = {
            "bootseer.image.demand_reads": counted.reads,
            "bootseer.image.demand_misses": counted.waits,
            "bootseer.image.demand_bytes": counted.bytes,
            "bootseer.image.warm_bytes": counted.warm_bytes,
            "bootseer.image.failed_reads": counted.failed,
            "bootseer.image.blocked_s": round(counted.blocked_ns / 1e9, 6),
            "bootseer.image.bytes.boot": boot_bytes,
            "bootseer.image.bytes.hot": server.hot_bytes + fetched.hot_bytes,
            "bootseer.image.bytes.cold": fetched.demand_bytes,
            "bootseer.image.bytes.fill": fetched.background_bytes,
            "bootseer.image.bytes.cache": fetched.cache_bytes,
        }
        self._writer.point(READS, "ok", {**self._about, **attributes})
