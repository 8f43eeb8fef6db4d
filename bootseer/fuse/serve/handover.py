"""A mount that outlives its server: a supervisor holds the descriptor, a child serves it.

The supervisor opens the mount, answers INIT, and then only waits: it has one thread, touches no
file of the mount and loads nothing, so that little can end it. Its worker is a fork of it, which
builds the operations and serves. When the worker dies, the supervisor forks another one: that
takes some milliseconds, needs no command line, settings or credentials told again (a fresh
interpreter would, and needs 100 ms and more to import), and is safe because the supervisor has
one thread. The new worker asks the kernel to send every unanswered request again (NOTIFY_RESEND),
so who was reading waits a little longer and sees nothing else. What is lost is what the worker
alone knew: files being written fail (the operations do not know the handle), and a request that
had taken effect without being answered, a `mkdir`, is done twice.

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
from bootseer.fuse.mount.device import Device
from bootseer.fuse.mount.mount import open_mount
from bootseer.fuse.mount.mount_options import MountOptions
from bootseer.fuse.mount.mount_point import MountPoint, absolute, has_ended
from bootseer.fuse.mount.passthrough import OpenInodes
from bootseer.fuse.operations import Operations
from bootseer.fuse.protocol.notifications import Notifier
from bootseer.fuse.serve.dispatch import Negotiated
from bootseer.fuse.serve.faults import Faults
from bootseer.fuse.serve.server import Mount, handshake
from bootseer.light_dataclasses import dataclass
from bootseer.system.fork import end_with_parent, fork
from bootseer.system.readiness import readable

GONE, FAILED = 0, 70
"""Exit codes of a worker: the mount ended, or it cannot serve."""
_SERVING = b"1"
_LAST_S = 5.0
_LAST_THREADS_S = 1.0
_MOST_SAID_BYTES = 4096  # what a pipe takes at once
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`deaths` in a row of workers that served shorter than `young_s` end the mount.

    Each of them makes the next start wait `pause_s` longer. A worker that does not serve
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
    patience: Patience | None = None,
    on_ready: Callable[[], None] | None = None,
    on_death: Callable[[int], None] | None = None,
) -> None:
    """Mount and serve until somebody unmounts or SIGTERM, SIGINT or SIGHUP asks us to.

    `build` is called in each worker; it must give the same tree each time. A tree that is to be
    written must be said so: `options.read_only` False. `on_ready` is called in this process once
    the first worker serves, `on_death` with each dead worker's process id. Must be called in the
    main thread of a process that has no other. Raises as `open_mount`; what `build` raised in the
    first worker, if that is a BootseerError; NotSupportedError when threads run here;
    StoreUnavailableError when workers die one after the other.
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
    point = MountPoint(mountpoint, lambda: has_ended(device))
    try:
        settled = handshake(device, options)
        point.set_read_ahead(options.read_ahead_kib)
        supervisor = _Supervisor(build, mountpoint, options, device, settled)
        supervisor.run(patience or Patience(), on_ready, on_death)
    finally:
        point.abandon()  # whatever happened, leave no dead mount behind
        os.close(device)


def _other_threads() -> list[str]:
    """Names of the threads that run here besides this one, those of libraries included.

    A library's may have been started by the fork that made this process: gRPC does so. The kernel
    removes a thread that was joined only a moment later, so these are looked at until they stay.
    """
    end_s = time.monotonic() + _LAST_THREADS_S
    while True:
        last = time.monotonic() >= end_s  # read before looking: we may be stopped in between
        others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
        if others or len(os.listdir("/proc/self/task")) == 1:
            return others
        if last:
            return _kernel_names(threading.get_native_id())
        time.sleep(0.001)


def _kernel_names(ours: int) -> list[str]:
    """What the kernel calls the other threads of this process."""
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
        mountpoint: str,
        options: MountOptions,
        device: int,
        settled: Negotiated,
    ) -> None:
        self.build = build
        self.mountpoint = mountpoint
        self.options = options
        self.device = device
        self.settled = settled
        self.faults = Faults(options.on_fault)
        self.on_ready: Callable[[], None] | None = None
        self.open_inodes = OpenInodes() if settled.passthrough else None
        self.serving_since: float | None = None
        self.refusal: BootseerError | None = None

    def run(
        self,
        patience: Patience,
        on_ready: Callable[[], None] | None,
        on_death: Callable[[int], None] | None,
    ) -> None:
        deaths = 0
        self.on_ready = on_ready
        with _signals() as asked:
            while True:
                self.serving_since = None
                pid, ready = self._fork(took_over=deaths > 0)
                status = self._watch(pid, ready, asked, patience.ready_s)
                if status == GONE:
                    return
                if self.refusal is not None:
                    raise self.refusal
                if on_death is not None:
                    on_death(pid)
                said = _describe(status)
                self.faults.say(f"worker {said}", f"the server of {self.mountpoint} {said}")
                since = self.serving_since
                young = since is None or time.monotonic() - since < patience.young_s
                deaths = deaths + 1 if young else 1
                if deaths >= patience.deaths or not self.settled.resend:
                    raise StoreUnavailableError(self._gave_up(said, deaths))
                time.sleep(patience.pause_s * (deaths - 1))

    def _gave_up(self, said: str, deaths: int) -> str:
        if not self.settled.resend:
            return (
                f"the server of {self.mountpoint} {said}, and this kernel (before 6.9) cannot "
                "hand its readers to another one: unmounted; mount again"
            )
        return (
            f"the server of {self.mountpoint} died {deaths} times in a row "
            f"soon after its start (at last it {said}): unmounted; see the event fuse.fault, "
            "then mount again"
        )

    def _fork(self, *, took_over: bool) -> tuple[int, int]:
        """Start a worker; returns its process id and a pipe that it writes to when it serves."""
        ready, tell = os.pipe()
        supervisor = os.getpid()
        # A signal to the child must not reach our own pipe before the child has its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        pid = fork()
        if pid == 0:
            os.close(ready)
            self._work(supervisor, tell, took_over)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(tell)
        return pid, ready

    def _work(self, supervisor: int, tell: int, took_over: bool) -> NoReturn:
        """The child: never returns into the code that called the supervisor."""
        code = FAILED
        try:
            code = _serve(self, supervisor, tell, took_over)
        except BootseerError as error:
            self.faults.say(f"the server {type(error).__name__}", str(error))
            if not took_over:
                os.write(tell, f"{type(error).__name__} {error}".encode()[:_MOST_SAID_BYTES])
        except BaseException as error:
            # A border: whatever it is, this process is the worker's and must end here.
            self.faults.failed("the server", error)
        finally:
            os._exit(code)

    def _watch(self, pid: int, ready: int, asked: int, ready_s: float) -> int:
        """Until the worker ended; returns its wait status. A signal to us ends both."""
        limit_ms: float | None = ready_s * 1000
        process = os.pidfd_open(pid)
        watched = select.poll()
        for descriptor in (process, ready, asked):
            watched.register(descriptor, select.POLLIN)
        try:
            while True:
                events = dict(watched.poll(limit_ms))
                if not events:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                if ready in events:
                    limit_ms = None
                    watched.unregister(ready)
                    self._hear(os.read(ready, _MOST_SAID_BYTES))
                if asked in events:
                    return self._stop(pid, process)
                if process in events:
                    return os.waitpid(pid, 0)[1]
        finally:
            os.close(process)
            os.close(ready)

    def _hear(self, said: bytes) -> None:
        """What a worker says of its start: that it serves, or why it never will; "" = it died."""
        if said == _SERVING:
            self.serving_since = time.monotonic()
            if self.on_ready is not None:
                self.on_ready()
                self.on_ready = None
        elif said:
            name, _, text = said.decode(errors="replace").partition(" ")
            self.refusal = getattr(errors, name, BootseerError)(text)

    def _stop(self, pid: int, process: int) -> int:
        """Have the worker unmount and end; it is killed when it does not."""
        signal.pidfd_send_signal(process, signal.SIGTERM)
        limit_s = self.options.unmount_grace_s + _LAST_S
        if not readable(process, timeout_s=limit_s):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.waitpid(pid, 0)
        return GONE


def _serve(supervisor: _Supervisor, parent: int, tell: int, took_over: bool) -> int:
    """Build, serve, and end with the mount, with a signal, or with the supervisor."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)
    with _signals((signal.SIGTERM,)) as asked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        mount = Mount(supervisor.build(), supervisor.mountpoint, options=supervisor.options)
        if took_over:
            # Before anything is received here, or that would come a second time.
            Notifier(Device(supervisor.device)).resend()
            if supervisor.open_inodes is not None:
                supervisor.open_inodes.take_over()
        mount.adopt(
            supervisor.device,
            supervisor.settled,
            open_inodes=supervisor.open_inodes,
            on_death=lambda: os._exit(FAILED),
        )
        ended, end = os.pipe()
        try:
            overseer = os.pidfd_open(parent)
        except ProcessLookupError:
            overseer = ended
        if os.getppid() != parent:
            os.write(end, b"1")  # it ended before we could ask to be told
        os.write(tell, _SERVING)
        os.close(tell)

        def tell_end() -> None:
            mount.wait()
            os.write(end, b"1")

        threading.Thread(target=tell_end, name="fuse-end", daemon=True).start()
        readable(asked, overseer, ended)
        # The mount is gone soon; operations that do not end must not keep the process.
        limit = threading.Timer(supervisor.options.unmount_grace_s + _LAST_S, os._exit, (GONE,))
        limit.daemon = True
        limit.start()
        mount.close()
        return GONE


@contextlib.contextmanager
def _signals(numbers: tuple[signal.Signals, ...] = _ENDING) -> Iterator[int]:
    """A descriptor that becomes readable when one of these signals comes."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before_fd = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield readable
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(readable)
        os.close(writable)


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with code {os.WEXITSTATUS(status)}"
