"""Copy a command's output through, byte for byte, and give a copy of it to the log rules.

Only `run --log-rules` needs this. Standard output and error that lead to one place share one
pipe, so their order is kept; a terminal is replaced by a pseudo terminal in raw mode, so the
command still sees one and the real one does all processing. Standard input stays as it is: the
real terminal, with its job control. The rules are matched in a process of their own, fed without
ever blocking: what it cannot take is dropped and counted.

When the command ends while other processes still hold its output, a fork of this process goes on
copying for them, and the exit code is not delayed. When our reader closes its end, the command
gets SIGPIPE at its next write, as it would without us.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time

from bootseer.entrypoint import job_process
from bootseer.system.readiness import writable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Mapping, Sequence

    from bootseer.events.writer import AnyWriter
else:
    import _signal

READ_BYTES = 65536  # = FRAME_MAX_BYTES of the matcher's frames
SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE)
LAST_BYTES = 1 << 17  # most bytes copied after the command's end: more than its pipe can hold
MATCHER_END_S = 2.0  # how long the matcher may work on after the last byte
FEED_PIPE_BYTES = 1 << 20
_MATCHER_HELD = (
    _signal.SIGINT,
    _signal.SIGTERM,
    _signal.SIGHUP,
    _signal.SIGQUIT,
    _signal.SIGTSTP,
)


class Feed:
    """The matcher process and the pipe to it. No method raises; `close` is bounded in time."""

    def __init__(self) -> None:
        self.fault = ""
        self.dropped_bytes = 0
        self._lock = threading.Lock()
        self._pending = b""  # the rest of a frame, to be written before the next one
        self._missed = {1: 0, 2: 0}
        self._wait_status: int | None = None
        self._fd = -1
        self.pid = 0

    def start(self, rules: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the matcher, or set `fault`."""
        try:
            self._spawn(rules, environ)
        except Exception as error:  # the job runs without a matcher, and the report says why
            self.fault = f"the log rules' matcher did not start: {error}"

    def _spawn(self, rules: Sequence[str], environ: Mapping[str, str]) -> None:
        import fcntl

        from bootseer.profiler.collect.log_rules import matcher_process

        self._matcher = matcher_process
        command = matcher_process.command(rules)
        if not command[0]:
            raise OSError("this Python does not know its own path")
        read_end, write_end = os.pipe()
        opened = [read_end]
        try:
            os.set_blocking(write_end, False)
            opened.append(null := os.open(os.devnull, os.O_RDWR))
            # Above 2, or one of the copies below would overwrite the other's source.
            opened.append(source := fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, 3))
            opened.append(sink := fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 3))
            actions = [(os.POSIX_SPAWN_DUP2, source, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, sink, 1), (os.POSIX_SPAWN_DUP2, sink, 2)]
            self.pid = os.posix_spawn(
                command[0], command, environ, file_actions=actions, setsigmask=_MATCHER_HELD
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            _close_all(opened)
        self._fd = write_end
        try:
            fcntl.fcntl(self._fd, 1031, FEED_PIPE_BYTES)  # F_SETPIPE_SZ, named from 3.10 on
        except OSError:
            pass  # over the user's limit: the usual 64 KiB then

    def note_end(self, pid: int, status: int) -> None:
        """Take the wait status of the matcher, if this child is it."""
        if pid == self.pid:
            self._wait_status = status

    def offer(self, stream: int, data: bytes) -> None:
        """Give output to the matcher, or drop it if the matcher is behind."""
        now, mono = time.time_ns(), time.monotonic_ns()
        with self._lock:
            if self._fd < 0:
                return
            if self._flush():
                frames = self._matcher.encode_frame(stream, now, mono, data)
                for missed, count in self._missed.items():
                    if count:
                        frames = self._matcher.encode_dropped(missed, count) + frames
                        self._missed[missed] = 0
                self._pending = frames
                self._flush()
            else:
                self._missed[stream] += len(data)
                self.dropped_bytes += len(data)

    def _flush(self) -> bool:
        """Write what is pending; return True when nothing is left."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._fd, self._pending) :]
        except BlockingIOError:
            return False
        except OSError:
            self._close_pipe()  # the matcher has ended
            return True
        return True

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._pending = b""

    def close(self) -> None:
        """Let the matcher finish, for MATCHER_END_S at most, then kill it."""
        if not self.pid:
            return
        deadline = time.monotonic() + MATCHER_END_S
        with self._lock:
            while self._fd >= 0 and not self._flush() and time.monotonic() < deadline:
                writable(self._fd, timeout_s=0.05)
            self._close_pipe()
        while self._wait_status is None and time.monotonic() < deadline:
            self._collect_matcher(os.WNOHANG)
            if self._wait_status is None:
                time.sleep(0.002)
        if self._wait_status is None:
            self.fault = f"the log rules' matcher was still busy after {MATCHER_END_S:.0f} s"
            os.kill(self.pid, _signal.SIGKILL)
            self._collect_matcher(0)
        elif self._wait_status not in (0, 1 << 8):  # exit code 1: it has reported the fault itself
            self.fault = f"the log rules' matcher died, wait status {self._wait_status}"

    def _collect_matcher(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:
            pid, status = self.pid, 0
        self.note_end(pid, status)


class Channel:
    """A copy of one of the command's outputs to ours, made by a thread.

    The thread is started before the command: a running command cannot be given its own output
    back if no thread, pipe or pseudo terminal can be made.
    """

    def __init__(self, streams: Sequence[int]) -> None:
        self.streams = streams
        self.out = streams[0]
        self.is_terminal = False
        self._feed: Feed | None = None
        self._never_runs = False
        self._may_copy = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake = (-1, -1)
        self._source = self.inner = -1

    def open(self) -> None:
        """Make the pipe or terminal, and the thread; nothing of it is left where one fails.

        Raises OSError, termios.error or RuntimeError for want of one.
        """
        self.is_terminal = os.isatty(self.out)
        self._wake = os.pipe()
        try:
            if self.is_terminal:
                self._source, self.inner = _open_raw_terminal(self.out)
            else:
                self._source, self.inner = os.pipe()
            self._start_thread()
        except BaseException:
            _close_all([fd for fd in (*self._wake, self._source, self.inner) if fd >= 0])
            raise

    def spawn_actions(self) -> list[tuple[int, int, int]]:
        """Return the spawn actions that connect the command's streams to this channel."""
        return [(os.POSIX_SPAWN_DUP2, self.inner, stream) for stream in self.streams]

    def close_inner(self) -> None:
        """Close our copy of the end that the command writes to."""
        os.close(self.inner)

    def close(self) -> None:
        """Close the end that we read; for a channel that never ran."""
        self._never_runs = True
        self._may_copy.set()
        self.drain()
        _close_all([self._source, *self._wake])

    def start(self, feed: Feed | None) -> None:
        """Begin to copy."""
        self._feed = feed
        self._may_copy.set()

    def _start_thread(self) -> None:
        """Start the thread that copies, deaf to signals; raises RuntimeError where none starts."""
        self._thread = threading.Thread(target=self._copy, daemon=True)
        before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        try:
            self._thread.start()
        finally:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)

    def _copy(self) -> None:
        self._may_copy.wait()
        if self._never_runs:
            return
        feed = self._feed
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        after_end_bytes = 0
        while after_end_bytes < LAST_BYTES:
            ready = [fd for fd, _ in poll.poll()]
            if self._source not in ready:
                return  # the command ended and nothing is left in the pipe
            try:
                data = os.read(self._source, READ_BYTES)
            except OSError:  # EIO: the last holder of the pseudo terminal has closed it
                data = b""
            if not data or not self._write(data):
                break
            if feed is not None:
                feed.offer(self.out, data)
            if self._wake[0] in ready:
                after_end_bytes += len(data)
        else:
            return
        # With this end closed, a writer gets SIGPIPE, as it would from our reader without us.
        os.close(self._source)
        self._source = -1

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.out, view) :]
            except BlockingIOError:  # another process made our output non-blocking
                writable(self.out)
            except OSError:
                return False
        return True

    def finish(self) -> bool:
        """After the command's end, copy what it wrote; return whether no writer is left."""
        assert self._thread is not None
        os.write(self._wake[1], b"1")
        self._thread.join()
        for fd in self._wake:
            os.close(fd)
        return self._source < 0

    def restart(self) -> None:
        """Go on copying in a fork, which has none of the threads."""
        self._wake = os.pipe()
        self._feed = None
        self._start_thread()

    def drain(self) -> None:
        """Wait until all writers have closed the channel."""
        assert self._thread is not None
        self._thread.join()

    def resize(self) -> None:
        """Give the pseudo terminal the size of the real one."""
        if self.is_terminal and self._source >= 0:
            _copy_size(self.out, self._source)


def _open_raw_terminal(real: int) -> tuple[int, int]:
    import termios

    outer, inner = os.openpty()
    try:
        modes = termios.tcgetattr(real)
        modes[1] &= ~termios.OPOST  # the real terminal does this once
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(inner, termios.TCSANOW, modes)
        _copy_size(real, outer)
    except BaseException:
        _close_all([outer, inner])
        raise
    return outer, inner


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _copy_size(real: int, to: int) -> None:
    import fcntl
    import termios

    try:
        size = fcntl.ioctl(real, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(to, termios.TIOCSWINSZ, size)
    except OSError:
        pass  # a terminal without a size


def _make_channels() -> list[Channel]:
    """Make a channel for each place that our standard output and error lead to, or none.

    Raises OSError, termios.error or RuntimeError for want of a pipe, a terminal or a thread.
    """
    places: dict[tuple[int, int, int], list[int]] = {}
    for stream in (1, 2):
        try:
            status = os.fstat(stream)
        except OSError:
            continue  # closed, as it shall be for the command
        places.setdefault((status.st_dev, status.st_ino, status.st_rdev), []).append(stream)
    channels: list[Channel] = []
    try:
        for streams in places.values():
            channel = Channel(streams)
            channel.open()
            channels.append(channel)
    except BaseException:
        for channel in channels:
            channel.close()
            channel.close_inner()
        raise
    return channels


def run_tapped(
    command: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
    rules: Sequence[str],
    writer: AnyWriter,
) -> job_process.Result:
    """Run a command with its output tapped; raises OSError when it cannot be executed."""
    try:
        channels = _make_channels()
    except Exception as error:
        return _run_untapped(command, environ, added, writer, error)
    try:
        child = _start(command, environ, added, channels)
    except OSError as error:
        if error.errno not in SCARCE:
            raise
        scarcity = error  # what the channels held may be all that it lacked
    else:
        feed = Feed()
        feed.start(rules, {**environ, **added})
        return _copy_to_end(child, channels, feed, writer)
    return _run_untapped(command, environ, added, writer, scarcity)


def _start(
    command: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
    channels: Sequence[Channel],
) -> job_process.Child:
    """Start a command on its channels; raises OSError, with these closed, when it cannot."""

    def on_signal(number: int) -> bool:
        if number != _signal.SIGWINCH or not any(channel.is_terminal for channel in channels):
            return False
        for channel in channels:
            channel.resize()
        # The terminal has signalled the command already, which may have read the size too early.
        try:
            os.kill(child.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # as where any signal is passed on
        return True

    actions = [action for channel in channels for action in channel.spawn_actions()]
    try:
        child = job_process.start(command, environ, added, actions, on_signal)
    except OSError:
        for channel in channels:
            channel.close()
        raise
    finally:
        for channel in channels:
            channel.close_inner()
    return child


def _copy_to_end(
    child: job_process.Child, channels: Sequence[Channel], feed: Feed, writer: AnyWriter
) -> job_process.Result:
    for channel in channels:
        channel.start(feed)
    result = child.wait(feed.note_end)
    open_channels = [channel for channel in channels if not channel.finish()]
    feed.close()
    if feed.fault:
        _report_fault(writer, feed.fault, feed.dropped_bytes)
    if open_channels:
        _fork_copier(open_channels, child)
    return result


def _run_untapped(
    command: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
    writer: AnyWriter,
    cause: Exception,
) -> job_process.Result:
    """Run a command without the rules, and report why. Raises OSError as `run_tapped` does."""
    _report_fault(writer, f"the command's output cannot be read: {cause}")
    return job_process.start(command, environ, added).wait()


def _report_fault(writer: AnyWriter, fault: str, dropped_bytes: int = 0) -> None:
    attributes = {
        "bootseer.source": "log",
        "bootseer.reason": fault,
        "bootseer.bytes": dropped_bytes,
    }
    writer.point("log_rules", "fallback", attributes)


def _fork_copier(channels: Sequence[Channel], child: job_process.Child) -> None:
    """Fork a process that copies for the processes that still hold the command's output."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        if os.fork():
            return
    except OSError:
        return  # their writes fail, as if our reader had ended; the command's exit code stands
    try:
        child.release()
        for channel in channels:
            channel.restart()
        for channel in channels:
            channel.drain()
    finally:
        os._exit(0)
