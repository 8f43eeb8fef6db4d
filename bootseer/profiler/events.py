"""The event writer: one JSON object a line, each line one `os.write` to a file opened O_APPEND.

Standard library only, Python 3.9, and importable without anything else of bootseer, so that one
copied file is enough in a foreign image. Nothing here ever raises into a job: when events cannot
be written, they are lost and the job goes on.

Span ids: the first 10 hex digits are random and the same for all spans that one writer makes,
the last 6 count up. The `resource` line of a writer has the count 000000, so a file to which
several processes append still tells which line belongs to which process.
"""

from __future__ import annotations

import os
import sys
import time
from contextvars import ContextVar
from itertools import count

try:  # the C function alone: importing `json` costs 2 ms of a 9 ms interpreter
    from _json import encode_basestring_ascii as _quote
except ImportError:  # an interpreter without the accelerator
    from json.encoder import py_encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType
    from typing import Any, Optional, TypeVar, Union

    Environ = Mapping[str, str]
    Attributes = Mapping[str, Any]
    AnyWriter = Union["Writer", "NullWriter"]
    _Self = TypeVar("_Self", bound="NullWriter")

__all__ = [
    "NullWriter",
    "Writer",
    "child_environment",
    "default_directory",
    "event",
    "open_writer",
    "phase",
    "redact",
    "redact_url",
    "resource_from_environment",
    "trace_from_environment",
]

MAX_TEXT_CHARS = 1024  # of one attribute value; what is cut ends in "..."
MAX_NAME_CHARS = 256
MAX_ITEMS = 128  # of one list, or of one object
MAX_LINE_BYTES = 32768

_current: ContextVar[tuple[str, str]] = ContextVar("bootseer_span")
_getpid, _fstat, _write = os.getpid, os.fstat, os.write
_time_ns, _monotonic_ns = time.time_ns, time.monotonic_ns


def _text(value: str, limit: int = MAX_TEXT_CHARS) -> str:
    if len(value) > limit:
        value = value[:limit] + "..."
    if "://" in value:
        value = redact_url(value)
    if not value.isascii():
        # Names from the operating system may hold lone surrogates, which strict parsers refuse.
        value = value.encode("utf-8", "replace").decode("utf-8")
    return _quote(value)


def _value(value: Any, depth: int = 0) -> str:
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return repr(value) if -(2**63) <= value < 2**63 else _text(hex(value))
    if kind is float:
        return repr(value) if value - value == 0.0 else "null"  # JSON knows no nan, no inf
    if value is None:
        return "null"
    if depth < 4 and isinstance(value, dict):
        return _object(value, depth + 1)
    if depth < 4 and isinstance(value, (list, tuple)):
        return "[" + ",".join([_value(v, depth + 1) for v in value[:MAX_ITEMS]]) + "]"
    if isinstance(value, (bytes, bytearray)):
        return _text(bytes(value[:MAX_TEXT_CHARS]).decode("utf-8", "replace"))
    return _text(str(value))


def _object(attributes: Attributes, depth: int = 0) -> str:
    parts: list[str] = []
    for key, value in attributes.items():
        if len(parts) == MAX_ITEMS:
            break
        try:
            parts.append(f"{_text(str(key), MAX_NAME_CHARS)}:{_value(value, depth)}")
        except Exception:  # a foreign __str__ may raise anything; the other attributes still count
            continue
    return "{" + ",".join(parts) + "}"


def redact_url(text: str) -> str:
    """Return `text` with user, password and query of every URL in it replaced by `***`."""
    out: list[str] = []
    rest = text
    while True:
        head, mark, rest = rest.partition("://")
        out.append(head + mark)
        if not mark:
            return "".join(out)
        end = len(rest)
        for stop in " \t\r\n\"'<>,;":
            found = rest.find(stop, 0, end)
            end = found if found >= 0 else end
        url, rest = rest[:end], rest[end:]
        url, query, _ = url.partition("?")
        authority, slash, path = url.partition("/")
        if "@" in authority:
            authority = "***@" + authority.rpartition("@")[2]
        out.append(authority + slash + path + ("?***" if query else ""))


_SECRET_WORDS = ("token", "passw", "secret", "credential", "apikey", "api_key", "auth")


def redact(words: Iterable[str]) -> list[str]:
    """Return a command's words without what looks like a secret.

    Hidden are the credentials and queries of URLs, the value in `NAME=VALUE` and the word after
    `--NAME` where NAME speaks of a token, password, secret, key or credential.
    """
    out: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        plain = name.lower().replace("-", "_")
        secret = any(mark in plain for mark in _SECRET_WORDS) and " " not in name
        if hide_next and not word.startswith("-"):
            out.append("***")
        elif secret and equals:
            out.append(name + "=***")
        else:
            out.append(redact_url(word))
        hide_next = secret and not equals and word.startswith("-")
    return out


# --- what the environment tells -----------------------------------------------------------------

_RANKS = {
    "bootseer.rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "bootseer.world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "bootseer.local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "bootseer.gpu.count": ("BOOTSEER_GPU_COUNT", "SLURM_GPUS_ON_NODE"),
}
_ATTEMPT = ("BOOTSEER_ATTEMPT", "SLURM_RESTART_COUNT")
_JOB_UID = ("BOOTSEER_JOB_UID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_K8S = {
    "k8s.pod.name": ("K8S_POD_NAME", "POD_NAME", "MY_POD_NAME"),
    "k8s.pod.uid": ("K8S_POD_UID", "POD_UID", "MY_POD_UID"),
    "k8s.namespace.name": ("K8S_NAMESPACE", "POD_NAMESPACE", "MY_POD_NAMESPACE"),
    "k8s.node.name": ("K8S_NODE_NAME", "NODE_NAME", "MY_NODE_NAME"),
    "k8s.container.name": ("K8S_CONTAINER_NAME", "CONTAINER_NAME"),
    "k8s.cluster.name": ("K8S_CLUSTER_NAME", "CLUSTER_NAME"),
}


def _first(environ: Environ, names: Iterable[str]) -> str:
    for name in names:
        value = environ.get(name, "")
        if value and value != "none":  # torchrun's run id when nobody chose one
            return value
    return ""


def _number(environ: Environ, names: Iterable[str]) -> Optional[int]:
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def _read(path: str, limit: int = 65536) -> str:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.read(fd, limit).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)
    except OSError:
        return ""


def _container_id() -> str:
    # The runtime's directory of hostname, hosts or resolv.conf carries the 64-digit id; the
    # cgroup path does so only outside a cgroup namespace.
    for path in ("/proc/self/cgroup", "/proc/self/mountinfo"):
        for word in _read(path).replace("-", "/").replace(".", "/").split("/"):
            if len(word) == 64 and not word.strip("0123456789abcdef"):
                return word
    return ""


def _gpu_count(environ: Environ) -> Optional[int]:
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("NVIDIA_VISIBLE_DEVICES", "all"))
    if visible not in ("", "all", "void", "none"):
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        names = os.listdir("/dev")
    except OSError:
        return None
    found = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in names)
    return found or None


def _otel_attributes(environ: Environ) -> dict[str, str]:
    out = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = pair.partition("=")
        if equals and key.strip():
            if "%" in value:
                from urllib.parse import unquote

                value = unquote(value)
            out[key.strip()] = value.strip()
    return out


def _kubernetes(environ: Environ) -> dict[str, str]:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return {}
    out = {"k8s.pod.name": environ.get("HOSTNAME") or os.uname().nodename}
    namespace = _read("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    if namespace:
        out["k8s.namespace.name"] = namespace
    out.update({key: _first(environ, names) for key, names in _K8S.items()})
    return {key: value for key, value in out.items() if value}


def resource_from_environment(environ: Optional[Environ] = None) -> dict[str, Any]:
    """Describe this process: OpenTelemetry's resource names and ours; unknown keys are absent.

    `bootseer.gpu.count` counts the GPUs this process may see. Attributes given in
    OTEL_RESOURCE_ATTRIBUTES win over what is found here.
    """
    env = os.environ if environ is None else environ
    attempt = _number(env, _ATTEMPT) or 0
    in_place = _number(env, ("TORCHELASTIC_RESTART_COUNT",)) or 0
    argv = list(getattr(sys, "orig_argv", None) or sys.argv)
    out: dict[str, Any] = {
        "service.name": env.get("OTEL_SERVICE_NAME") or env.get("SLURM_JOB_NAME") or "bootseer",
        "host.name": os.uname().nodename,
        "process.pid": _getpid(),
        "process.command": argv[0] if argv else "",
        "process.command_args": redact(argv[:32]),
        "bootseer.boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "bootseer.attempt": attempt + in_place,
        "bootseer.start.kind": (
            "restart_in_place" if in_place else "restart" if attempt else "first"
        ),
        "bootseer.job_uid": _first(env, _JOB_UID),
        "container.id": _container_id(),
    }
    out.update(_kubernetes(env))
    for key, names in _RANKS.items():
        out[key] = _number(env, names)
    if out["bootseer.gpu.count"] is None:
        out["bootseer.gpu.count"] = _gpu_count(env)
    out.update(_otel_attributes(env))
    return {key: value for key, value in out.items() if value is not None and value != ""}


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and not text.strip("0123456789abcdef") and bool(text.strip("0"))


def _digest(text: str) -> str:
    try:
        from _sha2 import sha256  # type: ignore[import-not-found]  # 3.12 and newer
    except ImportError:
        try:
            from _sha256 import sha256  # type: ignore[import-not-found]
        except ImportError:
            from hashlib import sha256
    return str(sha256(text.encode("utf-8", "replace")).hexdigest()[:32])


def trace_from_environment(environ: Optional[Environ] = None) -> tuple[str, Optional[str]]:
    """Return (trace id, parent span id or None) for this process.

    The trace handed down in BOOTSEER_TRACEPARENT; else the hash of job uid and attempt, which is
    the same on every node; else a random one. A worker that torchrun restarted in place starts a
    trace of its own, derived so that all its peers find the same one.
    """
    env = os.environ if environ is None else environ
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    parts = env.get("BOOTSEER_TRACEPARENT", "").split("-")
    if len(parts) == 4 and _is_hex(parts[1], 32) and _is_hex(parts[2], 16):
        if restart == env.get("BOOTSEER_TRACE_RESTART", "0"):
            return parts[1], parts[2]
        return _digest(f"{parts[1]}:{restart}"), None
    uid = _first(env, _JOB_UID)
    if uid:
        attempt = (_number(env, _ATTEMPT) or 0) + (int(restart) if restart.isdecimal() else 0)
        return _digest(f"{uid}:{attempt}"), None
    return os.urandom(16).hex(), None


def default_directory(environ: Optional[Environ] = None) -> str:
    """Return where `run`, `start` and `report` look when no place was named."""
    env = os.environ if environ is None else environ
    state = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or "/tmp", ".local", "state")
    return os.path.join(state, "bootseer", "events")


class _Phase:
    """Context manager of `phase`; `attributes` may be added to until it ends."""

    __slots__ = ("_name", "_token", "_writer", "attributes", "span_id")

    def __init__(self, writer: AnyWriter, name: str, attributes: dict[str, Any]) -> None:
        self._writer, self._name, self.span_id = writer, name, ""
        self.attributes = attributes

    def __enter__(self) -> _Phase:
        self.span_id = self._writer.begin(self._name, self.attributes)
        self._token = _current.set((self._writer.trace_id, self.span_id))
        self.attributes = {}
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        try:
            _current.reset(self._token)
        except ValueError:
            pass  # a generator may be closed in another context than it was opened in
        if kind is not None:
            self.attributes["error.type"] = kind.__qualname__
        self._writer.end(self.span_id, self._name, "error" if kind else "ok", self.attributes)


class NullWriter:
    """The interface of `Writer`, writing nothing; it still makes ids for child processes."""

    def __init__(
        self, trace_id: Optional[str] = None, parent_span_id: Optional[str] = None
    ) -> None:
        self.trace_id = trace_id or os.urandom(16).hex()
        self.parent_span_id = parent_span_id
        self._ids()

    def _ids(self) -> None:
        self._prefix = os.urandom(5).hex()
        self._count = count(1)

    def _next(self) -> str:
        # `next` of a C counter is atomic, so threads need no lock.
        return f"{self._prefix}{next(self._count) & 0xFFFFFF:06x}"

    def _parent(self, parent: Optional[str]) -> Optional[str]:
        if parent is not None:
            return parent
        here = _current.get(None)
        # Another writer's span is no parent: its trace is not ours.
        return here[1] if here and here[0] == self.trace_id else self.parent_span_id

    def _emit(
        self,
        kind: str,
        span_id: str,
        parent: Optional[str],
        name: str,
        status: str,
        attributes: Optional[Attributes],
        time_unix_nano: Optional[int],
        mono_nano: Optional[int],
    ) -> None:
        """Write one event; this writer drops it."""

    def begin(
        self,
        name: str,
        attributes: Optional[Attributes] = None,
        parent: Optional[str] = None,
        time_unix_nano: Optional[int] = None,
        mono_nano: Optional[int] = None,
    ) -> str:
        """Write the begin of a span and return its id, to be given to `end`.

        Times are nanoseconds of the wall clock and of CLOCK_MONOTONIC; when only the wall clock's
        is given (from a log), the other is written as null.
        """
        span_id = self._next()
        self._emit("begin", span_id, parent, name, "ok", attributes, time_unix_nano, mono_nano)
        return span_id

    def end(
        self,
        span_id: str,
        name: str,
        status: str = "ok",
        attributes: Optional[Attributes] = None,
        time_unix_nano: Optional[int] = None,
        mono_nano: Optional[int] = None,
        parent: Optional[str] = None,
    ) -> None:
        """Write the end of a span; `status` is ok, error or fallback."""
        self._emit("end", span_id, parent, name, status, attributes, time_unix_nano, mono_nano)

    def point(
        self,
        name: str,
        status: str = "ok",
        attributes: Optional[Attributes] = None,
        parent: Optional[str] = None,
        time_unix_nano: Optional[int] = None,
        mono_nano: Optional[int] = None,
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
        resource: Optional[Attributes] = None,
        trace_id: Optional[str] = None,
        parent_span_id: Optional[str] = None,
    ) -> None:
        super().__init__(trace_id, parent_span_id)
        self.target = os.path.abspath(os.fspath(path))
        self.path = ""
        self._resource = dict(resource or {})
        self._fd = -1
        self._torn = self._closed = False
        self._open()

    def _open(self) -> None:
        self._pid = _getpid()
        self._resource["process.pid"] = self._pid
        self._fd = -1
        now, mono = _time_ns(), _monotonic_ns()
        # O_NONBLOCK: a FIFO without a reader must not stop the job.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        if self.target.endswith(".jsonl"):
            self.path = self.target
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        else:
            host = os.uname().nodename.replace("/", "_") or "localhost"
            self.path = os.path.join(self.target, f"{host}-{self._pid}-{now:x}.jsonl")
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
        if self._pid == _getpid():
            try:
                status = _fstat(self._fd)
                if (status.st_ino, status.st_dev) == self._identity:
                    return True
            except OSError:
                pass
            if self._fd < 0:
                return False
        else:
            self._ids()  # a forked child: the same span ids must not be made twice
            here = _current.get(None)
            if here is not None and here[0] == self.trace_id:
                self.parent_span_id = here[1]
        try:
            self._open()
        except OSError:
            self._fd = -1
        return self._fd >= 0

    def _emit(
        self,
        kind: str,
        span_id: str,
        parent: Optional[str],
        name: str,
        status: str,
        attributes: Optional[Attributes],
        time_unix_nano: Optional[int],
        mono_nano: Optional[int],
    ) -> None:
        if time_unix_nano is None:
            time_unix_nano, mono_nano = _time_ns(), _monotonic_ns()
        try:
            if not self._ready():
                return
            above = None if kind == "resource" else self._parent(parent)
            head = (
                f'{{"v":1,"event":"{kind}","trace_id":"{self.trace_id}","span_id":{_text(span_id)}'
                f',"parent_span_id":{_text(above) if above else "null"}'
                f',"name":{_text(str(name), MAX_NAME_CHARS)}'
                f',"time_unix_nano":{time_unix_nano}'
                f',"mono_nano":{"null" if mono_nano is None else mono_nano}'
                f',"status":{_text(status)},"attributes":'
            )
            line = f"{head}{_object(attributes) if attributes else '{}'}}}\n".encode("ascii")
            if len(line) > MAX_LINE_BYTES:
                line = f'{head}{{"bootseer.dropped_bytes":{len(line)}}}}}\n'.encode("ascii")
            self._append(line)
        except Exception:  # whatever a foreign attribute or a broken file system does: not the job
            return

    def _append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written = _write(self._fd, line)
        self._torn = written < len(line) and not self._cut(written)

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
        if not self._closed and self._pid == _getpid() and self._ready():
            os.close(self._fd)
        self._closed = True


def open_writer(
    events: Optional[str] = None,
    environ: Optional[Environ] = None,
    default: Optional[str] = None,
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
    writer: AnyWriter, span_id: Optional[str] = None, environ: Optional[Environ] = None
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
