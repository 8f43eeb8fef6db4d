"""A mount that outlives its server: a supervisor holds the descriptor, a worker serves it.

The supervisor opens the mount, replies to INIT, and then only waits: it has one thread, touches
no file of the mount and imports nothing, so that little can end it. Its worker is a fork of it,
which builds the operations and serves. When the worker dies, the supervisor forks another one:
that takes some milliseconds, needs no command line, settings or credentials again (a fresh
interpreter would, and takes 100 ms and more to import), and is safe because the supervisor has
one thread. The new worker asks the kernel to send every request without a reply again
(NOTIFY_RESEND), so readers wait a little longer and notice nothing else. What only the dead
worker knew is lost: files being written fail (the operations do not know the handle), and a
request that had taken effect before its reply, such as a `mkdir`, is done twice.

The descriptor is not cloned (FUSE_DEV_IOC_CLONE): requests of a clone end with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from bootseer import errors
from bootseer.errors import BootseerError, NotSupportedError, StoreUnavailableError
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import MountPoint, absolute, has_ended
from bootseer.fuse.mount.passthrough import OpenInodes
from bootseer.fuse.operations import Operations
from bootseer.fuse.serve.dispatch import Negotiated
from bootseer.fuse.serve.pending_replies import request_resend
from bootseer.fuse.serve.server import Server, handshake
from bootseer.light_dataclasses import dataclass
from bootseer.reporting import Reporter
from bootseer.system.child_processes import end_with_parent, fork
from bootseer.system.readiness import readable

ENDED, FAILED = 0, 70
"""Exit codes of a worker: the mount ended, or the worker cannot serve."""
_SERVING = b"1"
_STOP_S = 5.0
_THREAD_EXIT_S = 1.0
_MAX_MESSAGE_BYTES = 4096  # what a pipe takes at once
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """After `deaths` workers in a row that each served for less than `young_s` the mount ends.

    Each of these delays the next worker's start by another `pause_s`. A worker that does not serve
    `ready_s` after its start is killed.
    """

    ready_s: float = 120.0
    deaths: int = 5
    young_s: float = 5.0
    pause_s: float = 0.05


def supervise(
    build: Callable[[], Operations],
    mountpoint: str,
    options: MountOptions | None = None,
    *,
    limits: RestartLimits | None = None,
    on_ready: Callable[[], None] | None = None,
    on_death: Callable[[int], None] | None = None,
    on_serve: Callable[[MountPoint], None] | None = None,
) -> None:
    """Mount and serve until it is unmounted, by others or on SIGTERM, SIGINT or SIGHUP.

    `build` is called in each worker; it must return the same tree each time. To be written, a
    tree also needs `options.read_only` False. `on_ready` is called in this process once the first
    worker serves, `on_death` with each dead worker's process id, and `on_serve` in each worker,
    with what it is about to serve. Must be called in the main thread of a process that has no
    other. Raises as `open_mount`; what `build` raised in the first worker, if that is a
    BootseerError; NotSupportedError when threads run here; StoreUnavailableError when workers die
    one after the other.
    """
    threads = _other_threads()
    if threads:
        raise NotSupportedError(
            "a supervisor must have one thread only, as it forks its workers, and here run also "
            f"{', '.join(threads)}; start it before them, or in a process of its own"
        )
    options = options or MountOptions()
    mountpoint = absolute(mountpoint)
    device = open_mount(mountpoint, options)
    point = MountPoint.find(mountpoint, lambda: has_ended(device))
    try:
        negotiated = handshake(device, options)
        point.set_read_ahead(options.read_ahead_kib)
        supervisor = _Supervisor(build, point, options, device, negotiated, on_serve)
        supervisor.run(limits or RestartLimits(), on_ready, on_death)
    finally:
        point.abandon()  # whatever happened, leave no mount without a server
        os.close(device)


def _other_threads() -> list[str]:
    """Names of the threads that run here besides this one, those of libraries included.

    A library may have started one in the fork that made this process: gRPC does so. The kernel
    removes a joined thread only a moment later, so only threads that stay count.
    """
    end_s = time.monotonic() + _THREAD_EXIT_S
    while True:
        last = time.monotonic() >= end_s  # read before looking: we may be stopped in between
        others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
        if others or len(os.listdir("/proc/self/task")) == 1:
            return others
        if last:
            return _kernel_names(threading.get_native_id())
        time.sleep(0.001)


def _kernel_names(ours: int) -> list[str]:
    """The kernel's names of the other threads of this process."""
    names = []
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(number) != ours:
                with open(f"/proc/self/task/{number}/comm", encoding="utf-8") as file:
                    names.append(file.read().strip())
    return names


class _Supervisor:
    def __init__(
        self,
        build: Callable[[], Operations],
        point: MountPoint,
        options: MountOptions,
        device: int,
        negotiated: Negotiated,
        on_serve: Callable[[MountPoint], None] | None,
    ) -> None:
        self._build = build
        self._on_serve = on_serve
        self._point = point
        self._options = options
        self._device = device
        self._negotiated = negotiated
        self._faults = Reporter("fuse.fault", options.on_fault)
        self._on_ready: Callable[[], None] | None = None
        self._open_inodes = OpenInodes() if negotiated.passthrough else None
        self._serving_since_s: float | None = None
        self._refusal: BootseerError | None = None

    def run(
        self,
        limits: RestartLimits,
        on_ready: Callable[[], None] | None,
        on_death: Callable[[int], None] | None,
    ) -> None:
        deaths = 0
        self._on_ready = on_ready
        with _signal_pipe() as signalled:
            while True:
                self._serving_since_s = None
                pid, ready = self._fork(takes_over=deaths > 0)
                status = self._watch(pid, ready, signalled, limits.ready_s)
                if status == ENDED:
                    return
                if self._refusal is not None:
                    raise self._refusal
                if on_death is not None:
                    on_death(pid)
                end = _describe(status)
                self._faults.report(f"worker {end}", f"the server of {self._point.target} {end}")
                since_s = self._serving_since_s
                young = since_s is None or time.monotonic() - since_s < limits.young_s
                deaths = deaths + 1 if young else 1
                if deaths >= limits.deaths or not self._negotiated.resend:
                    raise StoreUnavailableError(self._why_unmounted(end, deaths))
                time.sleep(limits.pause_s * (deaths - 1))

    def _why_unmounted(self, end: str, deaths: int) -> str:
        if not self._negotiated.resend:
            return (
                f"the server of {self._point.target} {end}, and this kernel (before 6.9) cannot "
                "hand its readers to another one: unmounted; mount again"
            )
        return (
            f"the server of {self._point.target} died {deaths} times in a row "
            f"soon after its start (at last it {end}): unmounted; see the event fuse.fault, "
            "then mount again"
        )

    def _fork(self, *, takes_over: bool) -> tuple[int, int]:
        """Start a worker; returns its process id and the pipe for its message: see `_receive`."""
        ready, message_pipe = os.pipe()
        supervisor = os.getpid()
        # A signal to the child must not reach our own pipe before the child has its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        pid = fork()
        if pid == 0:
            os.close(ready)
            self._run_worker(supervisor, message_pipe, takes_over)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(message_pipe)
        return pid, ready

    def _run_worker(self, supervisor: int, message_pipe: int, takes_over: bool) -> NoReturn:
        """The child: never returns into the code that called the supervisor."""
        code = FAILED
        try:
            code = self._serve(supervisor, message_pipe, takes_over)
        except BootseerError as error:
            self._faults.report(f"the server {type(error).__name__}", str(error))
            if not takes_over:
                message = f"{type(error).__name__} {error}".encode()
                os.write(message_pipe, message[:_MAX_MESSAGE_BYTES])
        except BaseException as error:
            # A border: whatever it is, this process is the worker's and must end here.
            self._faults.report_failure("the server", error)
        finally:
            os._exit(code)

    def _serve(self, supervisor: int, message_pipe: int, takes_over: bool) -> int:
        """In the worker: serve until the mount, a signal, or the supervisor's end."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)
        end_with_parent(signal.SIGTERM)
        with _signal_pipe((signal.SIGTERM,)) as signalled:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            if self._on_serve is not None:
                self._on_serve(self._point)
            server = Server(
                self._build(),
                self._point,
                self._device,
                self._negotiated,
                self._options,
                on_death=lambda: os._exit(FAILED),
                open_inodes=self._open_inodes,
            )
            if takes_over:
                # Before anything is received here, or that would be sent a second time.
                request_resend(self._device)
                if self._open_inodes is not None:
                    self._open_inodes.take_over()
            server.start()
            return self._wait_and_close(server, supervisor, message_pipe, signalled)

    def _wait_and_close(
        self, server: Server, supervisor: int, message_pipe: int, signalled: int
    ) -> int:
        end_readable, end_writable = os.pipe()
        try:
            supervisor_fd = os.pidfd_open(supervisor)
        except ProcessLookupError:
            supervisor_fd = end_readable
        if os.getppid() != supervisor:
            os.write(end_writable, b"1")  # it ended before PDEATHSIG was set
        os.write(message_pipe, _SERVING)
        os.close(message_pipe)

        def report_end() -> None:
            server.wait()
            os.write(end_writable, b"1")

        threading.Thread(target=report_end, name="fuse-end", daemon=True).start()
        readable(signalled, supervisor_fd, end_readable)
        # The mount ends now; operations that do not return must not keep the process.
        limit_s = self._options.unmount_grace_s + _STOP_S
        limit = threading.Timer(limit_s, os._exit, (ENDED,))
        limit.daemon = True
        limit.start()
        server.close()
        return ENDED

    def _watch(self, pid: int, ready: int, signalled: int, ready_s: float) -> int:
        """Until the worker has ended; returns its wait status. A signal to us ends both."""
        limit_ms: float | None = ready_s * 1000
        process = os.pidfd_open(pid)
        watched = select.poll()
        for descriptor in (process, ready, signalled):
            watched.register(descriptor, select.POLLIN)
        try:
            while True:
                events = dict(watched.poll(limit_ms))
                if not events:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                if ready in events:
                    limit_ms = None
                    watched.unregister(ready)
                    self._receive(os.read(ready, _MAX_MESSAGE_BYTES))
                if signalled in events:
                    return self._stop(pid, process)
                if process in events:
                    return os.waitpid(pid, 0)[1]
        finally:
            os.close(process)
            os.close(ready)

    def _receive(self, message: bytes) -> None:
        """A worker's message: that it serves, or why it never will; "" = it died before."""
        if message == _SERVING:
            self._serving_since_s = time.monotonic()
            if self._on_ready is not None:
                self._on_ready()
                self._on_ready = None
        elif message:
            name, _, text = message.decode(errors="replace").partition(" ")
            self._refusal = getattr(errors, name, BootseerError)(text)

    def _stop(self, pid: int, process: int) -> int:
        """Have the worker unmount and end; it is killed when it does not."""
        signal.pidfd_send_signal(process, signal.SIGTERM)
        limit_s = self._options.unmount_grace_s + _STOP_S
        if not readable(process, timeout_s=limit_s):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.waitpid(pid, 0)
        return ENDED


@contextlib.contextmanager
def _signal_pipe(numbers: tuple[signal.Signals, ...] = _STOP_SIGNALS) -> Iterator[int]:
    """A descriptor that becomes readable when one of these signals comes."""
    readable_end, writable_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup_before = signal.set_wakeup_fd(writable_end, warn_on_full_buffer=False)
    handlers_before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield readable_end
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(readable_end)
        os.close(writable_end)


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with code {os.WEXITSTATUS(status)}"
