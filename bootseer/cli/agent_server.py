"""The image agent: a Python that has imported everything, and forks for each command."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys

from bootseer.cli.agent_client import INTERRUPTED, MOUNTING, REFUSED, SOCKET, parse
from bootseer.errors import BusyError, from_os_error
from bootseer.system.readiness import readable

COMMANDS = (["image", "mount"], ["image", "umount"])
MODULES = (
    "bootseer.cli.root",
    "bootseer.cli.image.group",
    "bootseer.cli.image.direct",
    "bootseer.cli.image.mount",
    "bootseer.cli.image.outcome",
    "bootseer.cli.image.umount",
    "bootseer.imageprefetch.mount.mount",
    "bootseer.imageprefetch.mount.serverless_choice",
    "bootseer.imageprefetch.run.image_config",
    "bootseer.imageprefetch.run.interrupts",
    "bootseer.imageprefetch.hotset.local_hotsets",
    "bootseer.imageprefetch.mount.temporary_mounts",
    "bootseer.imageprefetch.mount.mount_worker",
    "bootseer.imageprefetch.record.start_recording",
    "bootseer.imageprefetch.record.trace_store",
    "bootseer.fuse.serve.handover",
    "bootseer.blockimage.serve.background_fill",
    "bootseer.blockimage.serve.image_server",
    "bootseer.blockimage.serve.page_cache_warmer",
    "bootseer.blocks.cache.node_cache",
    "bootseer.blocks.fetch.fetcher",
    "bootseer.blocks.trace.recorder",
    "bootseer.blocks.cache.sealed_objects",
    "bootseer.blocks.table",
    "bootseer.storage.store",
    "bootseer.storage.oci.registry_repository",
    "bootseer.storage.oci.layout_repository",
    # What these import when they are first used: a tenth of a mount's time.
    "bootseer.config.loading",
    "bootseer.events.resource",
    "encodings.ascii",
    "encodings.idna",
    "shutil",
    "tomllib",
)
MOST_REQUEST_BYTES = 4 << 20
_TAKEN_S = 5.0
_CREDENTIALS = struct.Struct("=3i")
_STREAMS = 4  # standard streams and the working directory


def serve(runtime: str) -> None:
    """Serve until SIGTERM or SIGINT. Raises BusyError where an agent serves already."""
    from bootseer.config.loading import default_runtime

    path = os.path.join(os.path.abspath(runtime or default_runtime()), SOCKET)
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all of it
    with contextlib.ExitStack() as stack:
        lock, listening = _listen(path, stack)
        namespace = os.readlink("/proc/self/ns/mnt")
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        while True:
            ready = readable(listening.fileno(), woken)
            if woken in ready and _asked_to_end(os.read(woken, 4096)):
                return
            _reap()
            if listening.fileno() in ready:
                with contextlib.suppress(OSError):
                    link, _ = listening.accept()
                    with link:
                        _handle(link, namespace, (lock, listening.fileno()))


def _listen(path: str, stack: contextlib.ExitStack) -> tuple[int, socket.socket]:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"an agent serves at {path} already; end that one first") from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        before = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(before)
        stack.callback(_unlink, path)
        listening.listen(64)
        return lock, listening
    except OSError as error:
        raise from_os_error(error, f"listen at {path}") from error


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _asked_to_end(signals: bytes) -> bool:
    return any(number != signal.SIGCHLD for number in signals)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _handle(link: socket.socket, namespace: str, ours: tuple[int, int]) -> None:
    """Fork for one request; whatever it says, the agent goes on."""
    pid = os.fork()
    if pid:
        return
    code = REFUSED
    try:
        for fd in ours:  # or a mount's server would hold our place when we have ended
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = _run(link, namespace)
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):  # nobody is there to hear of it
        code = INTERRUPTED
    except BaseException as error:  # a border: this process ends here, and the caller hears of it
        code = 1
        with contextlib.suppress(OSError):
            os.write(2, f"bootseer: the agent failed: {error!r}\n".encode())
    finally:
        try:
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            _leave(link, code)
        finally:
            os._exit(0)


def _heed_hang_up(link: socket.socket) -> None:
    """Who asked is gone, or was interrupted: that interrupts us, once.

    Its streams are given up at once, as whoever reads them waits for the last who could write.
    """

    def look(*_: object) -> None:
        try:
            if link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return  # it waits
        except OSError:
            pass  # gone without a word
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)
        raise KeyboardInterrupt

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
    look()  # it may have gone before we listened


def _leave(link: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        link.sendall(bytes([code & 255]))


def _run(link: socket.socket, namespace: str) -> int:
    """Run the command of a request as its caller would have; returns its exit code."""
    link.settimeout(_TAKEN_S)
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    body, fds = _receive(link)
    if len(fds) != _STREAMS or uid != os.geteuid() or _namespace_of(pid) != namespace:
        return REFUSED
    args, environ = parse(body)
    if args[:2] not in (*COMMANDS, MOUNTING):
        return REFUSED
    os.environ.clear()
    os.environ.update(environ)
    os.fchdir(fds[3])
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    link.settimeout(None)
    _heed_hang_up(link)
    if args[:2] == MOUNTING:
        return _mount(args[2])
    if args[:2] == ["image", "mount"]:
        from bootseer.cli.image import direct

        ended = direct.command(args, helped=False)
        if ended is not None:
            return ended
    from bootseer.cli import root

    return root.main(args)


def _mount(settings: str) -> int:
    """Mount for a process that goes on by itself, which is told by a line on standard output."""
    from bootseer.errors import BootseerError
    from bootseer.fuse.serve import daemon
    from bootseer.imageprefetch.mount import mount

    wanted = mount.absolute(mount.decoded(settings))
    made = False
    try:
        try:
            answer = dataclasses.asdict(mount.mount(wanted))
            made = True
        except Exception as error:  # the border: this child ends here, who asked hears why
            answer = daemon.encode_error(error)
        os.write(1, json.dumps(answer).encode() + b"\n")
    except BaseException:  # nobody was told
        if made:
            with contextlib.suppress(BootseerError):
                mount.umount(wanted.directory, lazily=True, runtime_dir=wanted.runtime)
        raise
    return 0


def _namespace_of(pid: int) -> str:
    """The mount namespace of a process, by the kernel's word; "" where it cannot be told."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(link, 1 << 16, _STREAMS)
    for fd in fds:
        os.set_inheritable(fd, False)
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], sys.byteorder):
        if len(data) > MOST_REQUEST_BYTES:
            raise OSError(errno.EMSGSIZE, "a request that has no end")
        more = link.recv(1 << 16)
        if not more:
            raise OSError(errno.EPIPE, "a request that was cut")
        data += more
    return data[4:], fds
