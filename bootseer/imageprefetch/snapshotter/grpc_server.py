"""The snapshots API over gRPC on a Unix socket. Needs the extra `snapshotter`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.imageprefetch.snapshotter import messages
from bootseer.imageprefetch.snapshotter.snapshotter import Snapshotter
from bootseer.imageprefetch.snapshotter.types import (
    Mount,
    Snapshot,
    SnapshotExistsError,
    SnapshotStateError,
)
from bootseer.system import file_lock
from bootseer.system.file_lock import FileLock

WORKERS = 256  # a call that waits for an image's registry must not keep others waiting
BATCH = 100  # snapshots in one message of a list
GRACE_S = 5.0
PROBE_S = 2.0
Say = Callable[[str], None]

# The first class that fits gives the gRPC status, by which containerd tells faults apart.
_CODES: tuple[tuple[type[BootseerError], str], ...] = (
    (SnapshotExistsError, "ALREADY_EXISTS"),
    (SnapshotStateError, "FAILED_PRECONDITION"),
    (NotFoundError, "NOT_FOUND"),
    (UsageError, "INVALID_ARGUMENT"),
    (AccessDeniedError, "PERMISSION_DENIED"),
    (CorruptDataError, "DATA_LOSS"),
    (NotSupportedError, "FAILED_PRECONDITION"),
    (NoSpaceError, "RESOURCE_EXHAUSTED"),
    (DeadlineError, "DEADLINE_EXCEEDED"),
    (BootseerError, "UNAVAILABLE"),
)


def code_of(error: BootseerError) -> str:
    """The name of the gRPC status for an error of ours."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


class Calls:
    """Each method takes one request message and returns the response."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter
        self._types = messages.messages()

    def prepare(self, request: Any) -> Any:
        found = self._snapshotter.prepare(request.key, request.parent, dict(request.labels))
        return self._types.PrepareSnapshotResponse(mounts=[self._mount(found)])

    def view(self, request: Any) -> Any:
        found = self._snapshotter.view(request.key, request.parent, dict(request.labels))
        return self._types.ViewSnapshotResponse(mounts=[self._mount(found)])

    def mounts(self, request: Any) -> Any:
        return self._types.MountsResponse(
            mounts=[self._mount(self._snapshotter.mounts(request.key))]
        )

    def commit(self, request: Any) -> Any:
        self._snapshotter.commit(request.name, request.key, dict(request.labels))
        return self._types.Empty()

    def remove(self, request: Any) -> Any:
        self._snapshotter.remove(request.key)
        return self._types.Empty()

    def stat(self, request: Any) -> Any:
        return self._types.StatSnapshotResponse(
            info=self._info(self._snapshotter.stat(request.key))
        )

    def update(self, request: Any) -> Any:
        labels, paths = dict(request.info.labels), list(request.update_mask.paths)
        row = self._snapshotter.update(request.info.name, labels, paths)
        return self._types.UpdateSnapshotResponse(info=self._info(row))

    def list(self, request: Any) -> Iterator[Any]:
        rows = self._snapshotter.list(list(request.filters))
        for at in range(0, len(rows), BATCH):
            batch = [self._info(row) for row in rows[at : at + BATCH]]
            yield self._types.ListSnapshotsResponse(info=batch)

    def usage(self, request: Any) -> Any:
        size_bytes, inodes = self._snapshotter.usage(request.key)
        return self._types.UsageResponse(size=size_bytes, inodes=inodes)

    def cleanup(self, request: Any) -> Any:
        self._snapshotter.cleanup()
        return self._types.Empty()

    def _mount(self, mount: Mount) -> Any:
        return self._types.Mount(type=mount.kind, source=mount.source, options=mount.options)

    def _info(self, row: Snapshot) -> Any:
        info = self._types.Info(
            name=row.name, parent=row.parent, kind=int(row.kind), labels=dict(row.labels)
        )
        info.created_at.FromNanoseconds(row.created_ns)
        info.updated_at.FromNanoseconds(row.updated_ns)
        return info


class Server:
    """Answers on `socket_path` until closed; one a root directory and a socket."""

    def __init__(self, snapshotter: Snapshotter, socket_path: str, say: Say) -> None:
        """Raises NotSupportedError without grpcio, and our errors for the socket."""
        try:
            import grpc
        except ImportError as error:
            raise NotSupportedError(
                "the snapshotter needs grpcio; pip install 'bootseer[snapshotter]'"
            ) from error
        _make_parent(socket_path)
        _check_free(socket_path)
        self._say = say
        self._grpc = grpc
        self._server = grpc.server(ThreadPoolExecutor(WORKERS, "snapshots"))
        handlers = self._handlers(Calls(snapshotter))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(messages.SERVICE, handlers),)
        )
        before = os.umask(0o177)  # whoever may connect may mount: root alone
        try:
            self._server.add_insecure_port(f"unix:{os.path.abspath(socket_path)}")
        except RuntimeError as error:
            raise BusyError(f"cannot listen on {socket_path}; remove what is there") from error
        finally:
            os.umask(before)

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        """Let calls under way end within GRACE_S; twice is safe."""
        self._server.stop(GRACE_S).wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handlers(self, calls: Calls) -> Mapping[str, Any]:
        types, out = messages.messages(), {}
        for name, (request, _, streams) in messages.CALLS.items():
            function = getattr(calls, name.lower())
            make = self._grpc.unary_unary_rpc_method_handler
            guarded: Callable[[Any, Any], Any] = self._guard(name, function)
            if streams:
                make = self._grpc.unary_stream_rpc_method_handler
                guarded = self._guard_stream(name, function)
            out[name] = make(
                guarded,
                request_deserializer=getattr(types, request).FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
        return out

    def _guard(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            try:
                return function(request)
            except Exception as error:  # the border: containerd hears of every fault as a status
                self._fail(name, error, context)

        return answer

    def _guard_stream(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Iterator[Any]:
            try:
                yield from function(request)
            except Exception as error:  # as above
                self._fail(name, error, context)

        return answer

    def _fail(self, name: str, error: Exception, context: Any) -> None:
        if isinstance(error, BootseerError):
            code, text = code_of(error), str(error)
            if not isinstance(error, SnapshotExistsError | NotFoundError):
                self._say(f"{name}: {text}")
        else:
            code, text = "INTERNAL", f"{type(error).__name__}: {error}"
            self._say(f"{name}: {traceback.format_exc()}")
        context.abort(getattr(self._grpc.StatusCode, code), text)


def lock_root(root: str) -> FileLock:
    """For the one process that may change what is below a root directory.

    Raises BusyError while another holds it.
    """
    try:
        os.makedirs(root, mode=0o711, exist_ok=True)
        return file_lock.acquire(os.path.join(root, "lock"), limit_s=0)
    except BlockingIOError as error:
        raise BusyError(f"another snapshotter works in {root}; stop that first") from error
    except OSError as error:
        raise from_os_error(error, f"use the directory {root}") from error


def _make_parent(socket_path: str) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(socket_path)), mode=0o711, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"make the directory of {socket_path}") from error


def _check_free(socket_path: str) -> None:
    """Raise BusyError where somebody listens: grpc would take the socket over without a word."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(socket_path)
        except OSError:
            return
    raise BusyError(f"another snapshotter listens on {socket_path}; stop that first")


def wait_for_signal() -> None:
    """Return on SIGTERM or SIGINT; main thread only."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
