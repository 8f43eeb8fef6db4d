"""Unpack a checked archive into fresh private directories, by several processes.

Order: directories, files (in workers, as soon as their directories stand), then hard links,
symlinks, and last the directories' own metadata. Nothing here is visible to others: the callers
hand in directories of mode 0700 and rename them when all is well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bootseer import errors
from bootseer.depsnap.format import index as index_format
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.restore import unpack_worker
from bootseer.depsnap.restore.isolated_work import read_apart
from bootseer.depsnap.shared_tree import packed_mount as sharing
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, SYMLINK, Digest, Limits
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NoSpaceError,
    from_os_error,
)
from bootseer.system.fork import end_with_parent, fork
from bootseer.system.interpreter import command_for
from bootseer.system.regular_files import open_to_read

if TYPE_CHECKING:
    import subprocess

_READ_AHEAD = 8 << 20
_FRAMES_END = struct.Struct("<Q")
_MOST_POLL_MS = (1 << 31) - 1
_END_S = 1.0
"""How long a killed process may take to go."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an archive may do here. `owners` None: whatever it says (for root alone)."""

    jobs: int
    allow_setuid: bool = False
    owners: frozenset[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What could not or must not be restored."""

    lost_xattrs: int
    dropped_privileges: int


def default_jobs() -> int:
    """Decoding and creating files keep a core busy each; more than 8 only fight over the disk."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def unpack(
    path: str,
    index: Index,
    destinations: Sequence[str],
    policy: Policy,
    *,
    limits: Limits,
    keep_open: Sequence[int] = (),
    packed: bool = False,
    stall_s: float | None = None,
    beat: int = -1,
) -> Counts:
    """Fill `destinations` (one private directory a root, empty). Returns what was left out.

    `packed`: into the two files of a packed tree instead, in the only destination.
    Forks workers when this process has one thread, else does all in a fresh interpreter, since
    a forked child of a threaded process may inherit locks nobody will release. `keep_open` are
    locks that must outlive this process for as long as a worker runs. With `stall_s` it is a fresh
    interpreter too, which can be left behind where reading the archive hangs: it is given up once
    no frame was read for so long. `beat`: see `unpack_worker.Job`. Raises CorruptDataError,
    NoSpaceError, AccessDeniedError, DeadlineError; the destinations are then to be thrown away.
    """
    _check_owners(index, policy)
    _check_space(index, destinations, packed)
    if threading.active_count() > 1 or stall_s is not None:
        return _in_fresh_process(
            path, index, destinations, policy, limits, keep_open, packed, stall_s
        )
    kind = _Packing if packed else _Unpacking
    try:
        with kind(path, index, destinations, policy, beat) as work:
            return work.run()
    except OSError as error:
        place = destinations[0] if error.filename is None else f"{error.filename!r}"
        raise from_os_error(error, f"restore {place}") from error


def _check_owners(index: Index, policy: Policy) -> None:
    if os.geteuid() != 0 or policy.owners is None:
        return
    foreign = index.owners() - policy.owners
    if foreign:
        named = ", ".join(f"{uid}:{gid}" for uid, gid in sorted(foreign)[:5])
        raise CorruptDataError(
            f"the archive holds files of owners its record does not name ({named}); do not use it"
        )


def _check_space(index: Index, destinations: Sequence[str], packed: bool) -> None:
    """Fail before the first byte where the file system plainly has no room."""
    status = os.statvfs(destinations[0])
    free = status.f_bavail * status.f_frsize
    if index.raw_bytes > free:
        raise NoSpaceError(
            f"cannot restore below {destinations[0]}: {index.raw_bytes} bytes needed, {free} free; "
            "free space or choose another file system"
        )
    if not packed and status.f_files and index.entries > status.f_favail:
        raise NoSpaceError(
            f"cannot restore below {destinations[0]}: {index.entries} files needed, "
            f"{status.f_favail} inodes free; free some or choose another file system"
        )


class _Unpacking:
    """One unpacking in this process: descriptors, the plan for the workers, the workers."""

    def __init__(
        self, path: str, index: Index, destinations: Sequence[str], policy: Policy, beat: int
    ) -> None:
        self._path = path
        self._index = index
        self._jobs = max(1, min(policy.jobs, len(index.frames)))
        self._pids: list[int] = []
        self._open: list[int] = []
        self._archive = self._keep(open_to_read(path))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        roots = tuple(self._keep(os.open(d, flags)) for d in destinations)
        self._root_of: list[int] = []
        for number, root in enumerate(index.roots):
            self._root_of += [number] * root.count
        self._dropped = 0
        self._job = unpack_worker.Job(
            archive=self._archive,
            index=index,
            roots=roots,
            root_of=self._root_of,
            mode=self._modes(policy.allow_setuid),
            owner=self._owners(),
            xattrs=self._xattrs(policy.allow_setuid),
            split=self._split(),
            now_ns=unpack_worker.now_ns(),
            packed=self._packed(destinations),
            beat=beat,
        )

    def __enter__(self) -> _Unpacking:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pids.clear()
        while self._open:
            os.close(self._open.pop())

    def _packed(self, _destinations: Sequence[str]) -> unpack_worker.Packed | None:
        return None

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor

    def _drop(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def _modes(self, allow_setuid: bool) -> list[int]:
        index = self._index
        if allow_setuid:
            return index.mode
        out = list(index.mode)
        for number, mode in enumerate(out):
            # On a directory setgid only hands down a group, which is no privilege.
            if mode & 0o6000 and index.kind[number] == FILE:
                out[number] = mode & 0o1777
                self._dropped += 1
        return out

    def _owners(self) -> list[tuple[int, int] | None]:
        """Owners to set: none where a new file has the right one already, or without privilege."""
        index = self._index
        mine = (os.geteuid(), os.getegid())
        if mine[0] != 0:
            return [None] * index.entries
        pairs = zip(index.uid, index.gid, strict=True)
        return [None if pair == mine else pair for pair in pairs]

    def _xattrs(self, allow_setuid: bool) -> dict[int, Any]:
        if allow_setuid:
            return self._index.xattrs
        out = {}
        for number, xattrs in self._index.xattrs.items():
            kept = tuple(x for x in xattrs if x[0] != "security.capability")
            self._dropped += len(xattrs) - len(kept)
            out[number] = kept
        return out

    def _split(self) -> frozenset[int]:
        index = self._index
        large = {n for n, size in enumerate(index.size) if size > BLOCK}
        return frozenset(n for n in large if len(index.units_of(n)) > 1)

    def run(self) -> Counts:
        tickets_out, tickets_in = map(self._keep, os.pipe())
        results_out, results_in = map(self._keep, os.pipe())
        failed = mmap.mmap(-1, 1)
        try:
            for _ in range(self._jobs):
                pid = fork()
                if pid == 0:
                    os.close(tickets_in)
                    unpack_worker.child(self._job, tickets_out, results_in, failed)
                self._pids.append(pid)
            self._drop(tickets_out)
            self._drop(results_in)
            try:
                self._feed(tickets_in)
            except BrokenPipeError:
                pass  # all workers have failed; they say why below
            lost = self._gather(results_out)
        finally:
            failed.close()
        lost += self._finish()
        return Counts(lost, self._dropped)

    def _feed(self, tickets: int) -> None:
        """Make directories in order; hand out each frame as soon as its directories stand."""
        index, job = self._index, self._job
        ahead = done = 0
        for number, frame in enumerate(index.frames):
            while ahead < index.stored_bytes and ahead < frame.offset + 4 * _READ_AHEAD:
                os.posix_fadvise(self._archive, ahead, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
                ahead += _READ_AHEAD
            for entry in range(done, min(frame.upto, index.entries)):
                root = job.roots[self._root_of[entry]]
                if index.kind[entry] == DIRECTORY and index.parent[entry] >= 0:
                    os.mkdir(index.path[entry], 0o700, dir_fd=root)
                elif entry in job.split:
                    self._make_large(entry, root)
            done = max(done, frame.upto)
            os.write(tickets, unpack_worker.TICKET.pack(number))
        os.write(tickets, unpack_worker.TICKET.pack(unpack_worker.STOP) * self._jobs)

    def _make_large(self, entry: int, root: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._index.path[entry], flags, 0o600, dir_fd=root)
        try:
            os.ftruncate(descriptor, self._index.size[entry])
        finally:
            os.close(descriptor)

    def _gather(self, results: int) -> int:
        """Wait for all workers; raise what the first unlucky one met."""
        codes = []
        while self._pids:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(self._pids[0], 0)[1]))
            self._pids.pop(0)
        text = b""
        while part := os.read(results, 1 << 16):
            text += part
        reports = [json.loads(line) for line in text.splitlines()]
        for report in reports:
            _raise_reported(self._path, report)
        if any(codes) or len(reports) != len(codes):
            raise BootseerError(f"a restoring process died (exit codes {codes}); try again")
        return sum(report["lost"] for report in reports)

    def _finish(self) -> int:
        """Large files' metadata, hard links, symlinks, directories; attributes lost."""
        index, job = self._index, self._job
        lost = 0
        for entry in sorted(job.split):
            lost += self._with_descriptor(entry)
        for kind in (HARDLINK, SYMLINK):
            for entry in (n for n, k in enumerate(index.kind) if k == kind):
                self._link(entry, kind)
        for entry in range(index.entries - 1, -1, -1):
            if index.kind[entry] == DIRECTORY:
                lost += self._directory(entry)
        return lost

    def _with_descriptor(self, entry: int) -> int:
        root = self._job.roots[self._root_of[entry]]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._index.path[entry] or ".", flags, dir_fd=root)
        try:
            return unpack_worker.set_metadata(self._job, entry, descriptor)
        finally:
            os.close(descriptor)

    def _link(self, entry: int, kind: str) -> None:
        index = self._index
        root = self._job.roots[self._root_of[entry]]
        path, target = index.path[entry], index.link[entry]
        if kind == HARDLINK:
            os.link(target, path, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
            return
        os.symlink(target, path, dir_fd=root)
        owner = self._job.owner[entry]
        if owner is not None:
            os.chown(path, *owner, dir_fd=root, follow_symlinks=False)
        times = (self._job.now_ns, index.mtime_ns[entry])
        os.utime(path, ns=times, dir_fd=root, follow_symlinks=False)

    def _directory(self, entry: int) -> int:
        index, job = self._index, self._job
        lost = self._with_descriptor(entry) if entry in job.xattrs else 0
        root = job.roots[self._root_of[entry]]
        path = index.path[entry] or "."
        owner = job.owner[entry]
        if owner is not None:
            os.chown(path, *owner, dir_fd=root, follow_symlinks=False)
        os.chmod(path, job.mode[entry], dir_fd=root)
        times = (job.now_ns, index.mtime_ns[entry])
        os.utime(path, ns=times, dir_fd=root, follow_symlinks=False)
        return lost


class _Packing(_Unpacking):
    """The same into one file: while the workers write its content, its metadata is made here."""

    def _packed(self, destinations: Sequence[str]) -> unpack_worker.Packed:
        (self._folder,) = destinations
        self._places, self._length = sharing.layout(self._index)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        path = os.path.join(self._folder, sharing.DATA)
        descriptor = self._keep(os.open(path, flags, 0o600))
        os.ftruncate(descriptor, self._length)
        return unpack_worker.Packed(descriptor, self._places)

    def _feed(self, tickets: int) -> None:
        job, index = self._job, self._index
        for number, frame in enumerate(index.frames):
            os.posix_fadvise(self._archive, frame.offset, frame.stored, os.POSIX_FADV_WILLNEED)
            os.write(tickets, unpack_worker.TICKET.pack(number))
        os.write(tickets, unpack_worker.TICKET.pack(unpack_worker.STOP) * self._jobs)
        content, self._lost = sharing.metadata(
            index, self._places, self._length, job.mode, job.xattrs
        )
        with open(os.path.join(self._folder, sharing.META), "xb") as file:
            file.write(content)

    def _finish(self) -> int:
        return self._lost


def _raise_reported(path: str, report: dict[str, Any]) -> None:
    if "corrupt" in report:
        raise CorruptDataError(f"archive {path}: {report['corrupt']}; fetch or make it again")
    if "errno" in report and report["errno"] != 10:  # ECHILD: it only saw us stop
        raise OSError(report["errno"], report["text"], report["file"] or None)
    if "crash" in report:
        raise BootseerError(f"a restoring process failed: {report['crash']}")


def _in_fresh_process(
    path: str,
    index: Index,
    destinations: Sequence[str],
    policy: Policy,
    limits: Limits,
    keep_open: Sequence[int],
    packed: bool,
    stall_s: float | None,
) -> Counts:
    order = {
        "path": path,
        "digest": index.digest,
        "destinations": list(destinations),
        "jobs": policy.jobs,
        "allow_setuid": policy.allow_setuid,
        "owners": None if policy.owners is None else sorted(policy.owners),
        "limits": dataclasses.asdict(limits),
        "packed": packed,
    }
    import subprocess  # costs 20 ms, and few come here

    beat_out, beat_in = os.pipe()
    try:
        child = subprocess.Popen(
            command_for(__name__, str(os.getpid()), str(beat_in)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One that is left behind must not hold our standard error open for whoever reads it.
            stderr=None if stall_s is None else subprocess.DEVNULL,
            pass_fds=(*keep_open, beat_in),
            start_new_session=True,  # its workers end with it, wherever they hang
        )
    finally:
        os.close(beat_in)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as stream:
            stream.write(json.dumps(order).encode())
        answer = _read_answer(child.stdout.fileno(), beat_out, path, len(index.frames), stall_s)
    finally:
        os.close(beat_out)
        if child.stdout is not None:
            child.stdout.close()
        if child.poll() is None:
            _end(child)
    reply: dict[str, Any] = {"error": "BootseerError", "text": "the restoring process died"}
    if answer:
        reply = json.loads(answer)
    if "error" in reply:
        raise getattr(errors, reply["error"])(reply["text"])
    return Counts(reply["lost_xattrs"], reply["dropped_privileges"])


def _read_answer(answer: int, beat: int, path: str, frames: int, stall_s: float | None) -> bytes:
    """All that the fresh process says; raises DeadlineError where its reads of `path` stall."""
    waiting = select.poll()
    waiting.register(answer, select.POLLIN)
    waiting.register(beat, select.POLLIN)
    text, left = b"", frames
    while True:
        is_read = frames > 0 and left <= 0
        limit_ms = None if stall_s is None or is_read else min(stall_s * 1000, _MOST_POLL_MS)
        ready = [descriptor for descriptor, _ in waiting.poll(limit_ms)]
        if not ready:
            raise DeadlineError(
                f"reading {path} brought nothing for {stall_s:g} s, with {frames - left} of "
                f"{frames} frames read"
            )
        if beat in ready:
            beats = len(os.read(beat, 1 << 16))
            left -= beats
            if not beats:  # all workers ended
                waiting.unregister(beat)
        if answer in ready:
            part = os.read(answer, 1 << 16)
            if not part:
                return text
            text += part


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the fresh process with its workers; one that hangs in the kernel is left behind."""
    import subprocess

    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def read_index(path: str, digest: Digest, limits: Limits, stall_s: float | None) -> Index:
    """An archive's index. Raises DeadlineError where it takes longer than `stall_s`, and what
    `index.read` raises."""
    if stall_s is None:
        return index_format.read(path, expected_digest=digest, limits=limits)

    def read() -> bytes:
        stored, frames_end = index_format.load(path, limits)
        return _FRAMES_END.pack(frames_end) + stored

    reply = read_apart(read, stall_s, path)
    (frames_end,) = _FRAMES_END.unpack_from(reply)
    return index_format.decode(path, reply[_FRAMES_END.size :], frames_end, digest, limits)


def main() -> None:
    """The fresh process: one order on standard input, one answer on standard output."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # who started us
        return
    order = json.load(sys.stdin)
    beat = int(sys.argv[2])
    owners = order["owners"]
    policy = Policy(
        order["jobs"],
        order["allow_setuid"],
        None if owners is None else frozenset((uid, gid) for uid, gid in owners),
    )
    limits = Limits(**order["limits"])
    try:
        index = index_format.read(order["path"], expected_digest=order["digest"], limits=limits)
        packed: bool = order["packed"]
        places: list[str] = order["destinations"]
        counts = unpack(
            order["path"], index, places, policy, limits=limits, packed=packed, beat=beat
        )
        reply: dict[str, object] = dataclasses.asdict(counts)
    except BootseerError as error:
        reply = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps(reply))
