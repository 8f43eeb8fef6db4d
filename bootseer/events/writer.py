"""The event writer: one JSON object a line, each line one `os.write` to a file opened O_APPEND.

Nothing here ever raises into a job: when events cannot be written, they are lost and the job goes
on.

Span ids: the first 10 hex digits are random and the same for all spans that one writer makes,
the last 6 count up. The `resource` line of a writer has the count 000000, so a file to which
several processes append still tells which line belongs to which process.
"""

from __future__ import annotations

import os
import time

from .encoding import MAX_LINE_BYTES, MAX_NAME_CHARS, encode_object, encode_text, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextvars import ContextVar, Token
    from types import TracebackType
    from typing import Any, TypeVar, Union

    Environ = Mapping[str, str]
    Attributes = Mapping[str, Any]
    AnyWriter = Union["Writer", "NullWriter"]
    _Self = TypeVar("_Self", bound="NullWriter")

# The innermost `phase` of this thread or task as (trace id, span id). A list, because its module
# is imported with the first phase only: a wrapper's few events do without.
_current: list[ContextVar[tuple[str, str]]] = []
_fstat, _write = os.fstat, os.write
_time_ns, _monotonic_ns = time.time_ns, time.monotonic_ns

_forks = [0]  # how many forks lie between this process and the one that imported this module


def _reset_after_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_reset_after_fork)  # cheaper than a getpid() for each event


def resource_from_environment(environ: Environ | None = None) -> dict[str, Any]:
    """Describe this process as `resource.describe` does."""
    from . import resource

    return resource.describe(os.environ if environ is None else environ)


def trace_from_environment(environ: Environ | None = None) -> tuple[str, str | None]:
    """Return (trace id, parent span id or None) for this process, as `resource.trace` does."""
    from . import resource

    return resource.trace(os.environ if environ is None else environ)


def default_directory(environ: Environ | None = None) -> str:
    """Return where `run`, `start` and `report` look when no place was named."""
    env = os.environ if environ is None else environ
    state = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or "/tmp", ".local", "state")
    return os.path.join(state, "bootseer", "events")


def _span() -> ContextVar[tuple[str, str]]:
    if not _current:
        from contextvars import ContextVar

        _current.append(ContextVar("bootseer_span"))
    return _current[0]


class _Phase:
    """Context manager of `phase`; `attributes` may be added to until it ends."""

    __slots__ = ("_name", "_token", "_writer", "attributes", "span_id")

    _token: Token[tuple[str, str]]

    def __init__(self, writer: AnyWriter, name: str, attributes: dict[str, Any]) -> None:
        self._writer, self._name, self.span_id = writer, name, ""
        self.attributes = attributes

    def __enter__(self) -> _Phase:
        self.span_id = self._writer.begin(self._name, self.attributes)
        self._token = _span().set((self._writer.trace_id, self.span_id))
        self.attributes = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            _span().reset(self._token)
        except ValueError:
            pass  # a generator may be closed in another context than it was opened in
        if kind is not None:
            self.attributes["error.type"] = kind.__qualname__
        self._writer.end(self.span_id, self._name, "error" if kind else "ok", self.attributes)


class NullWriter:
    """The interface of `Writer`, writing nothing; it still makes ids for child processes."""

    def __init__(self, trace_id: str | None = None, parent_span_id: str | None = None) -> None:
        self.trace_id = trace_id or os.urandom(16).hex()
        self.parent_span_id = parent_span_id
        self._forks = _forks[0]
        self._ids()

    def _ids(self) -> None:
        self._prefix = os.urandom(5).hex()
        self._count = iter(range(1, 1 << 62))

    def _after_fork(self) -> None:
        """In a forked child: the same span ids must not be made twice."""
        self.parent_span_id = self._parent()
        self._forks = _forks[0]
        self._ids()

    def _next(self) -> str:
        if self._forks != _forks[0]:
            self._after_fork()
        # `next` of a C iterator is atomic, so threads need no lock.
        return f"{self._prefix}{next(self._count) & 0xFFFFFF:06x}"

    def _parent(self) -> str | None:
        if _current:
            here = _current[0].get(None)
            # Another writer's span is no parent: its trace is not ours.
            if here is not None and here[0] == self.trace_id:
                return here[1]
        return self.parent_span_id

    def _emit(
        self,
        kind: str,
        span_id: str,
        parent: str | None,
        name: str,
        status: str,
        attributes: Attributes | None,
        time_unix_nano: int | None,
        mono_nano: int | None,
    ) -> None:
        """Write one event; this writer drops it."""

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        parent: str | None = None,
        time_unix_nano: int | None = None,
        mono_nano: int | None = None,
        span_id: str | None = None,
    ) -> str:
        """Write the begin of a span and return its id, to be given to `end`.

        Times are nanoseconds of the wall clock and of CLOCK_MONOTONIC; when only the wall clock's
        is given (from a log), the other is written as null.
        """
        if span_id is None:
            span_id = self._next()
        self._emit("begin", span_id, parent, name, "ok", attributes, time_unix_nano, mono_nano)
        return span_id

    def end(
        self,
        span_id: str,
        name: str,
        status: str = "ok",
        attributes: Attributes | None = None,
        time_unix_nano: int | None = None,
        mono_nano: int | None = None,
        parent: str | None = None,
    ) -> None:
        """Write the end of a span; `status` is ok, error or fallback."""
        self._emit("end", span_id, parent, name, status, attributes, time_unix_nano, mono_nano)

    def point(
        self,
        name: str,
        status: str = "ok",
        attributes: Attributes | None = None,
        parent: str | None = None,
        time_unix_nano: int | None = None,
        mono_nano: int | None = None,
    ) -> None:
        """Write a single moment."""
        self._emit(
            "point", self._next(), parent, name, status, attributes, time_unix_nano, mono_nano
        )

    def phase(self, name: str, **attributes: Any) -> _Phase:
        """Return a context manager: begin and end, status error when an exception leaves it."""
        return _Phase(self, name, attributes)

    def close(self) -> None:
        """Close the file; later events are dropped. Calling it twice is safe."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(NullWriter):
    """Appends events to `path`.

    A path ending in `.jsonl` is that very file, which any number of processes may append to; any
    other path is a directory where this process, and each child forked from it, creates a file
    `<host>-<pid>-<start time in ns, hex>.jsonl`. Raises OSError when that is impossible; once
    constructed nothing raises any more.
    """

    def __init__(
        self,
        path: str,
        resource: Attributes | None = None,
        trace_id: str | None = None,
        parent_span_id: str | None = None,
    ) -> None:
        super().__init__(trace_id, parent_span_id)
        self.target = os.path.abspath(os.fspath(path))
        self.path = ""
        self._resource = dict(resource or {})
        self._fd = -1
        self._torn = self._closed = False
        self._open()

    def _open(self) -> None:
        self._resource["process.pid"] = pid = os.getpid()
        self._fd = -1
        now, mono = _time_ns(), _monotonic_ns()
        # O_NONBLOCK: a FIFO without a reader must not stop the job.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        if self.target.endswith(".jsonl"):
            self.path = self.target
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        else:
            host = os.uname().nodename.replace("/", "_") or "localhost"
            self.path = os.path.join(self.target, f"{host}-{pid}-{now:x}.jsonl")
            flags |= os.O_EXCL | os.O_NOFOLLOW
            os.makedirs(self.target, exist_ok=True)
        self._resource["service.instance.id"] = os.path.basename(self.path)[: -len(".jsonl")]
        fd = os.open(self.path, flags, 0o666)
        if fd < 3:
            # A job with a closed standard stream must not print into our file.
            from fcntl import F_DUPFD_CLOEXEC, fcntl

            low, fd = fd, fcntl(fd, F_DUPFD_CLOEXEC, 3)
            os.close(low)
        status = _fstat(fd)
        self._identity = (status.st_ino, status.st_dev)
        self._fd = fd
        first = self._prefix + "000000"
        self._emit("resource", first, None, "resource", "ok", self._resource, now, mono)

    def _ready(self) -> bool:
        """Make sure that our descriptor is still ours: one system call, about a microsecond.

        A job may close all descriptors and open others (daemons do); writing to the number we
        remember would then go into a file of the job.
        """
        if self._closed:
            return False
        if self._forks != _forks[0]:
            self._after_fork()
            return self._fd >= 0
        try:
            status = _fstat(self._fd)
            if (status.st_ino, status.st_dev) == self._identity:
                return True
        except OSError:
            pass
        if self._fd >= 0:
            self._reopen()
        return self._fd >= 0

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._fd >= 0 and not self._closed:
            self._reopen()

    def _reopen(self) -> None:
        # The old number is not closed: it may be the job's by now. In a forked child it is ours,
        # one descriptor that an exec closes.
        try:
            self._open()
        except OSError:
            self._fd = -1

    def _emit(
        self,
        kind: str,
        span_id: str,
        parent: str | None,
        name: str,
        status: str,
        attributes: Attributes | None,
        time_unix_nano: int | None,
        mono_nano: int | None,
    ) -> None:
        if time_unix_nano is None:
            time_unix_nano, mono_nano = _time_ns(), _monotonic_ns()
        try:
            if not self._ready():
                return
            if kind == "resource":
                above = "null"
            else:
                parent_span = self._parent() if parent is None else parent
                above = quote(parent_span) if parent_span else "null"
            head = (
                f'{{"v":1,"event":"{kind}","trace_id":"{self.trace_id}","span_id":{quote(span_id)}'
                f',"parent_span_id":{above},"name":{encode_text(str(name), MAX_NAME_CHARS)}'
                f',"time_unix_nano":{time_unix_nano}'
                f',"mono_nano":{"null" if mono_nano is None else mono_nano}'
                f',"status":{quote(status)},"attributes":'
            )
            line = f"{head}{encode_object(attributes) if attributes else '{}'}}}\n".encode("ascii")
            if len(line) > MAX_LINE_BYTES:
                line = f'{head}{{"bootseer.dropped_bytes":{len(line)}}}}}\n'.encode("ascii")
            if self._torn:
                line = b"\n" + line
            written = _write(self._fd, line)
            if written != len(line) or self._torn:
                self._torn = written < len(line) and not self._cut(written)
        except Exception:  # whatever a foreign attribute or a broken file system does: not the job
            return

    def _cut(self, written: int) -> bool:
        """End what a full disk left of a line, so that the next line stays whole.

        The last byte that did arrive becomes the newline: that needs no space, and no later line
        of another process is touched. Returns False when the file system refuses even that.
        """
        try:
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)  # pwrite on O_APPEND would append
            try:
                status = _fstat(fd)
                if written < 1 or (status.st_ino, status.st_dev) != self._identity:
                    return False
                return os.pwrite(fd, b"\n", end - 1) == 1
            finally:
                os.close(fd)
        except OSError:
            return False

    def close(self) -> None:
        if not self._closed and self._forks == _forks[0] and self._ready():
            os.close(self._fd)
        self._closed = True


def open_writer(
    events: str | None = None,
    environ: Environ | None = None,
    default: str | None = None,
) -> AnyWriter:
    """Open the writer for this process: at `events`, else BOOTSEER_EVENTS, else `default`.

    Where none is set, or the place cannot be written, the result drops every event.
    """
    env = os.environ if environ is None else environ
    trace_id, parent = trace_from_environment(env)
    target = events or env.get("BOOTSEER_EVENTS") or default
    if target:
        try:
            return Writer(target, resource_from_environment(env), trace_id, parent)
        except (OSError, ValueError):
            pass  # events are a by-product; the job does not care why they cannot be kept
    return NullWriter(trace_id, parent)


def child_environment(
    writer: AnyWriter, span_id: str | None = None, environ: Environ | None = None
) -> dict[str, str]:
    """Return the variables that make a child process write into the same trace below `span_id`."""
    env = os.environ if environ is None else environ
    parent = span_id or writer.parent_span_id or writer._next()
    out = {"BOOTSEER_TRACEPARENT": f"00-{writer.trace_id}-{parent}-01"}
    if isinstance(writer, Writer):
        out["BOOTSEER_EVENTS"] = writer.target
    if "TORCHELASTIC_RESTART_COUNT" in env:
        out["BOOTSEER_TRACE_RESTART"] = env["TORCHELASTIC_RESTART_COUNT"]
    return out


_process_writer: dict[str, AnyWriter] = {}


def _default_writer() -> AnyWriter:
    writer = _process_writer.get("writer")
    if writer is None:
        opened = open_writer()
        writer = _process_writer.setdefault("writer", opened)
        if writer is not opened:
            opened.close()  # another thread was first
    return writer


def phase(name: str, **attributes: Any) -> _Phase:
    """Measure a block: `with bootseer.phase("model.init"): ...`.

    Writes where BOOTSEER_EVENTS points, which `bootseer run` and `start` set; else does nothing.
    """
    return _Phase(_default_writer(), name, attributes)


def event(name: str, **attributes: Any) -> None:
    """Write one moment of this process: `bootseer.event("first_step")`."""
    _default_writer().point(name, "ok", attributes)


def fault(name: str, **attributes: Any) -> None:
    """Write that something of ours went wrong at this moment: reports name it."""
    _default_writer().point(name, "fallback", attributes)
