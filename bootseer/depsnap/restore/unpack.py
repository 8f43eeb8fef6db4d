"""Unpack a checked archive into fresh private directories, by several processes.

Order: directories, files (in workers, as soon as their directories exist), then hard links,
symlinks, and last the directories' own metadata. Nothing here is visible to others: the callers
give directories of mode 0700 and rename them when all is done.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from bootseer.depsnap.format.index import read_index
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.restore import unpack_worker
from bootseer.depsnap.types import (
    DIRECTORY,
    FILE,
    HARDLINK,
    PACKED_DATA,
    PACKED_META,
    SYMLINK,
    Limits,
    Omissions,
    UnpackPolicy,
)
from bootseer.errors import BootseerError, CorruptDataError, NoSpaceError, from_os_error
from bootseer.system.child_processes import fork, has_threads
from bootseer.system.regular_files import open_to_read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.restore.unpack_process import Order

_READ_AHEAD = 8 << 20
_ECHILD = 10
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def default_jobs() -> int:
    """How many workers to use: each keeps a core busy, and more than 8 contend for the disk."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def unpack(
    path: str,
    index: Index,
    destinations: Sequence[str],
    policy: UnpackPolicy,
    *,
    limits: Limits,
    keep_open: Sequence[int] = (),
    packed: bool = False,
    stall_s: float | None = None,
) -> Omissions:
    """Fill `destinations` (one private directory a root, empty); return what was left out.

    `packed`: into the two files of a packed tree instead, in the only destination. `keep_open` are
    locks that must outlive this process for as long as a worker runs.

    Workers are forked when this process has one thread. Else all is done in a fresh interpreter: a
    forked child of a threaded process may inherit locks that nothing releases. With `stall_s` too,
    since reading the archive may hang: that process is given up, and left behind, once it has read
    no frame for so long. Raises CorruptDataError, NoSpaceError, AccessDeniedError, DeadlineError;
    the destinations are then to be thrown away.
    """
    _check(index, destinations, policy, packed)
    if has_threads() or stall_s is not None:
        from bootseer.depsnap.restore import unpack_process  # `subprocess` costs 20 ms

        order = unpack_process.Order(path, index.digest, list(destinations), policy, limits, packed)
        return unpack_process.unpack_in_process(
            __name__, order, len(index.frames), keep_open, stall_s
        )
    return _unpack_here(path, index, destinations, policy, packed)


def main() -> None:
    """The fresh process of `unpack_process`."""
    from bootseer.depsnap.restore import unpack_process

    unpack_process.serve(_carry_out)


def _carry_out(order: Order, beat: int) -> Omissions:
    index = read_index(order.path, expected_digest=order.digest, limits=order.limits)
    _check(index, order.destinations, order.policy, order.packed)
    return _unpack_here(
        order.path, index, order.destinations, order.policy, order.packed, beat=beat
    )


def _unpack_here(
    path: str,
    index: Index,
    destinations: Sequence[str],
    policy: UnpackPolicy,
    packed: bool,
    *,
    beat: int = -1,
) -> Omissions:
    kind = _Packing if packed else _Unpacking
    try:
        with kind(path, index, destinations, policy, beat) as unpacking:
            return unpacking.run()
    except OSError as error:
        place = destinations[0] if error.filename is None else f"{error.filename!r}"
        raise from_os_error(error, f"restore {place}") from error


def _check(index: Index, destinations: Sequence[str], policy: UnpackPolicy, packed: bool) -> None:
    """Refuse an archive with foreign owners, and fail early where there is plainly no room."""
    if os.geteuid() == 0 and policy.owners is not None:
        foreign = index.owners() - policy.owners
        if foreign:
            named = ", ".join(f"{uid}:{gid}" for uid, gid in sorted(foreign)[:5])
            raise CorruptDataError(
                f"the archive holds files of owners its record does not name ({named}); "
                "do not use it"
            )
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
    """Unpacking in this process: directories and links are made here, files by forked workers."""

    _job: unpack_worker.Job

    def __init__(
        self,
        path: str,
        index: Index,
        destinations: Sequence[str],
        policy: UnpackPolicy,
        beat: int,
    ) -> None:
        self._path = path
        self._index = index
        self._destinations = destinations
        self._allow_setuid = policy.allow_setuid
        self._jobs = max(1, min(policy.jobs, len(index.frames)))
        self._beat = beat
        self._pids: list[int] = []
        self._open: list[int] = []
        self._dropped = 0

    def __enter__(self) -> _Unpacking:
        try:
            self._prepare()
        except BaseException:  # a signal too: nothing else closes what is open already
            self._close_all()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pids.clear()
        self._close_all()

    def _prepare(self) -> None:
        index = self._index
        self._job = unpack_worker.Job(
            archive=self._keep(open_to_read(self._path)),
            index=index,
            roots=tuple(self._keep(os.open(d, _FOLDER)) for d in self._destinations),
            root_of=[n for n, root in enumerate(index.roots) for _ in range(root.count)],
            mode=self._modes(),
            owner=self._owners(),
            xattrs=self._xattrs(),
            split=self._files_of_several_units(),
            now_ns=time.time_ns(),
            packed=self._open_packed_file(),
            beat=self._beat,
        )

    def _open_packed_file(self) -> unpack_worker.PackedFile | None:
        return None

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def _modes(self) -> list[int]:
        """The mode to set of each entry."""
        index = self._index
        if self._allow_setuid:
            return index.mode
        out = list(index.mode)
        for number, mode in enumerate(out):
            # On a directory setgid only passes on a group, which is no privilege.
            if mode & 0o6000 and index.kind[number] == FILE:
                out[number] = mode & 0o1777
                self._dropped += 1
        return out

    def _owners(self) -> list[tuple[int, int] | None]:
        """Owners to set: None where a new file has the right one already, or without privilege."""
        index = self._index
        mine = (os.geteuid(), os.getegid())
        if mine[0] != 0:
            return [None] * index.entries
        pairs = zip(index.uid, index.gid, strict=True)
        return [None if pair == mine else pair for pair in pairs]

    def _xattrs(self) -> dict[int, Any]:
        """The extended attributes to set, by entry."""
        if self._allow_setuid:
            return self._index.xattrs
        out = {}
        for number, xattrs in self._index.xattrs.items():
            kept = tuple(x for x in xattrs if x[0] != "security.capability")
            self._dropped += len(xattrs) - len(kept)
            out[number] = kept
        return out

    def _files_of_several_units(self) -> frozenset[int]:
        index = self._index
        large = {n for n, size in enumerate(index.size) if size > BLOCK}
        return frozenset(n for n in large if len(index.units_of(n)) > 1)

    def run(self) -> Omissions:
        """Do all of it."""
        tickets_out, tickets_in = map(self._keep, os.pipe())
        results_out, results_in = map(self._keep, os.pipe())
        failed = mmap.mmap(-1, 1)
        try:
            for _ in range(self._jobs):
                pid = fork()
                if pid == 0:
                    os.close(tickets_in)
                    unpack_worker.work(self._job, tickets_out, results_in, failed)
                self._pids.append(pid)
            self._close(tickets_out)
            self._close(results_in)
            try:
                self._hand_out_frames(tickets_in)
            except BrokenPipeError:
                pass  # all workers have failed; they say why below
            lost = self._wait_for_workers(results_out)
        finally:
            failed.close()
        lost += self._finish()
        return Omissions(lost, self._dropped)

    def _hand_out_frames(self, tickets: int) -> None:
        """Make directories in order; hand out each frame as soon as its directories exist."""
        index, job = self._index, self._job
        ahead = done = 0
        for number, frame in enumerate(index.frames):
            while ahead < index.stored_bytes and ahead < frame.offset + 4 * _READ_AHEAD:
                os.posix_fadvise(job.archive, ahead, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
                ahead += _READ_AHEAD
            for entry in range(done, min(frame.upto, index.entries)):
                root = job.roots[job.root_of[entry]]
                if index.kind[entry] == DIRECTORY and index.parent[entry] >= 0:
                    os.mkdir(index.path[entry], 0o700, dir_fd=root)
                elif entry in job.split:
                    self._make_large_file(entry, root)
            done = max(done, frame.upto)
            os.write(tickets, unpack_worker.TICKET.pack(number))
        self._hand_out_stops(tickets)

    def _hand_out_stops(self, tickets: int) -> None:
        os.write(tickets, unpack_worker.TICKET.pack(unpack_worker.STOP) * self._jobs)

    def _make_large_file(self, entry: int, root: int) -> None:
        descriptor = os.open(self._index.path[entry], _NEW_FILE, 0o600, dir_fd=root)
        try:
            os.ftruncate(descriptor, self._index.size[entry])
        finally:
            os.close(descriptor)

    def _wait_for_workers(self, results: int) -> int:
        """How many attributes all workers lost; raises what one of them met."""
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
        """Set large files' metadata, make hard links and symlinks, set directories' metadata;
        return how many attributes were lost."""
        index, job = self._index, self._job
        lost = 0
        for entry in sorted(job.split):
            lost += self._set_metadata(entry)
        for kind in (HARDLINK, SYMLINK):
            for entry in (n for n, k in enumerate(index.kind) if k == kind):
                self._make_link(entry, kind)
        for entry in range(index.entries - 1, -1, -1):
            if index.kind[entry] == DIRECTORY:
                lost += self._set_directory_metadata(entry)
        return lost

    def _set_metadata(self, entry: int) -> int:
        root = self._job.roots[self._job.root_of[entry]]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._index.path[entry] or ".", flags, dir_fd=root)
        try:
            return unpack_worker.set_metadata(self._job, entry, descriptor)
        finally:
            os.close(descriptor)

    def _make_link(self, entry: int, kind: str) -> None:
        index = self._index
        root = self._job.roots[self._job.root_of[entry]]
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

    def _set_directory_metadata(self, entry: int) -> int:
        index, job = self._index, self._job
        lost = self._set_metadata(entry) if entry in job.xattrs else 0
        root = job.roots[job.root_of[entry]]
        path = index.path[entry] or "."
        owner = job.owner[entry]
        if owner is not None:
            os.chown(path, *owner, dir_fd=root, follow_symlinks=False)
        os.chmod(path, job.mode[entry], dir_fd=root)
        times = (job.now_ns, index.mtime_ns[entry])
        os.utime(path, ns=times, dir_fd=root, follow_symlinks=False)
        return lost


class _Packing(_Unpacking):
    """Unpacking into a packed tree: the workers write all contents into one file, and its metadata
    is made here meanwhile."""

    _lost = 0

    def _open_packed_file(self) -> unpack_worker.PackedFile:
        from bootseer.depsnap.format import packed_tree  # other unpacking needs no EROFS

        (folder,) = self._destinations
        places, length = packed_tree.lay_out(self._index)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = self._keep(os.open(os.path.join(folder, PACKED_DATA), flags, 0o600))
        os.ftruncate(descriptor, length)
        return unpack_worker.PackedFile(descriptor, places, length)

    def _hand_out_frames(self, tickets: int) -> None:
        from bootseer.depsnap.format import packed_tree

        job, index = self._job, self._index
        assert job.packed is not None
        for number, frame in enumerate(index.frames):
            os.posix_fadvise(job.archive, frame.offset, frame.stored, os.POSIX_FADV_WILLNEED)
            os.write(tickets, unpack_worker.TICKET.pack(number))
        self._hand_out_stops(tickets)
        content, self._lost = packed_tree.make_metadata(
            index, job.packed.places, job.packed.length, job.mode, job.xattrs
        )
        with open(os.path.join(self._destinations[0], PACKED_META), "xb") as file:
            file.write(content)

    def _finish(self) -> int:
        return self._lost


def _raise_reported(path: str, report: dict[str, Any]) -> None:
    if "corrupt" in report:
        raise CorruptDataError(f"archive {path}: {report['corrupt']}; fetch or make it again")
    if "errno" in report and report["errno"] != _ECHILD:  # it only saw us stop
        raise OSError(report["errno"], report["text"], report["file"] or None)
    if "crash" in report:
        raise BootseerError(f"a restoring process failed: {report['crash']}")
