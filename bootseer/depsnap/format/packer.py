"""The members of an archive: chosen, read, checked and compressed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from bootseer.depsnap.capture.entries import Entry, RootDelta
from bootseer.depsnap.format import tar_writer
from bootseer.depsnap.format.tree_digest import TreeHasher
from bootseer.depsnap.format.unit_layout import (
    FramePlan,
    Segment,
    Unit,
    block_digest,
    content_digest,
    units,
)
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, OTHER, SYMLINK, Digest
from bootseer.errors import BusyError, UsageError, from_os_error


class Member(NamedTuple):
    """One archive member: its root's number, the entry as scanned, and what archiving adds."""

    root: int
    entry: Entry
    kind: str
    link: str
    segments: tuple[Segment, ...] | None


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """One compressed frame, as in `index_records.Frame`, and its blocks' (entry, block, sha256).

    `stored` is emptied once written.
    """

    stored: bytes
    size: int
    raw: int
    digest: str
    upto: int
    units: list[int]
    digests: list[tuple[int, int, bytes]]


def _archive_order(entry: Entry) -> str:
    return entry.path.replace("/", "\0")


def collect_members(roots: Sequence[RootDelta]) -> tuple[list[Member], list[str]]:
    """All members in archive order (depth first, by name), and paths that cannot be archived."""
    members: list[Member] = []
    skipped: list[str] = []
    for number, root in enumerate(roots):
        first: dict[tuple[int, int], str] = {}
        directories: set[str] = set()
        for entry in sorted(root.entries, key=_archive_order):
            if entry.kind == OTHER:
                skipped.append(f"{root.root.rstrip('/')}/{entry.path}")
                continue
            if entry.path and entry.path.rpartition("/")[0] not in directories:
                raise UsageError(f"{entry.path!r} below {root.root} comes without its directory")
            if entry.kind == DIRECTORY:
                directories.add(entry.path)
            members.append(_member(number, root.root, entry, first))
        if "" not in directories:
            raise UsageError(f"root {root.root} comes without its own directory")
    return members, skipped


def _member(number: int, root: str, entry: Entry, first: dict[tuple[int, int], str]) -> Member:
    if entry.kind == SYMLINK:
        return Member(number, entry, SYMLINK, entry.target, None)
    if entry.kind == FILE:
        if entry.nlink > 1:
            original = first.setdefault((entry.dev, entry.ino), entry.path)
            if original != entry.path:
                return Member(number, entry, HARDLINK, original, None)
        if entry.blocks * 512 < entry.size:
            segments = _find_data(os.path.join(root, entry.path), entry.size)
            return Member(number, entry, FILE, "", segments)
    return Member(number, entry, entry.kind, "", None)


def _find_data(path: str, size: int) -> tuple[Segment, ...] | None:
    """Where a file holds data, or None when it has no holes after all (compressed, inline)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
    out: list[Segment] = []
    at = 0
    try:
        while at < size:
            try:
                start = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
            if start >= size:
                break
            out.append((start, at - start))
    finally:
        os.close(descriptor)
    return None if out == [(0, size)] else tuple(out)


def units_of_member(number: int, member: Member) -> list[Unit]:
    """The units of a file's data; none of another member."""
    if member.kind != FILE:
        return []
    return units(number, member.entry.size, member.segments)


class Packer:
    """Reads, checks and compresses frames in threads; only `run` writes to the archive."""

    def __init__(self, roots: Sequence[RootDelta], members: list[Member], level: int) -> None:
        self._roots = [r.root.rstrip("/") for r in roots]
        self._members = members
        self._level = level
        self._local = threading.local()
        self._digests: dict[int, dict[int, bytes]] = {}
        self.raw_bytes = 0

    def run(
        self, write: Callable[[bytes], None], plan: list[FramePlan], workers: int
    ) -> list[PackedFrame]:
        """Write all frames and the tar's end; at most two frames a worker are in memory."""
        done: list[PackedFrame] = []
        waiting: deque[Future[PackedFrame]] = deque()

        def finish(packed: PackedFrame) -> None:
            write(packed.stored)
            for entry, block, digest in packed.digests:
                self._digests.setdefault(entry, {})[block] = digest
            done.append(dataclasses.replace(packed, stored=b"", digests=[]))

        with ThreadPoolExecutor(workers) as pool:
            try:
                for frame in plan:
                    if len(waiting) >= 2 * workers:
                        finish(waiting.popleft().result())
                    waiting.append(pool.submit(self._pack, frame))
                while waiting:
                    finish(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()
        finish(self._compress([tar_writer.END], len(self._members), [], []))
        return done

    def _pack(self, frame: FramePlan) -> PackedFrame:
        parts: list[bytes] = []
        flat: list[int] = []
        digests: list[tuple[int, int, bytes]] = []
        at = 0
        for number, unit in frame:
            member = self._members[number]
            if unit is None or is_first(member, unit):
                parts.append(header(self._roots[member.root], member))
                at += len(parts[-1])
            if unit is None:
                continue
            data = self._read(member, unit)
            flat += (number, unit.block, at)
            digests.append((number, unit.block, block_digest(member.entry.size, unit, data)))
            parts.append(data)
            at += len(data)
            if is_last(member, unit):
                parts.append(tar_writer.padding(data_size(member)))
                at += len(parts[-1])
        return self._compress(parts, frame[-1][0] + 1, flat, digests)

    def _compress(
        self,
        parts: list[bytes],
        upto: int,
        flat: list[int],
        digests: list[tuple[int, int, bytes]],
    ) -> PackedFrame:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
            self._local.compressor = compressor
        raw = b"".join(parts)
        stored = compressor.compress(raw)
        digest = hashlib.sha256(stored).hexdigest()
        return PackedFrame(stored, len(stored), len(raw), digest, upto, flat, digests)

    def _read(self, member: Member, unit: Unit) -> bytes:
        """One unit's bytes; before and after reading, the file must be the one that was scanned."""
        path = f"{self._roots[member.root]}/{member.entry.path}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        try:
            _check_same(path, member.entry, os.fstat(descriptor))
            data = b"".join([os.pread(descriptor, n, o) for o, n in unit.segments])
            _check_same(path, member.entry, os.fstat(descriptor))
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        finally:
            os.close(descriptor)
        if len(data) != unit.size:
            raise changed_error(path)
        return data

    def tree_digest(self) -> Digest:
        """The digest of all members and contents; see `tree_digest.TreeHasher`."""
        hasher = TreeHasher()
        current = -1
        for number, member in enumerate(self._members):
            if member.root != current:
                current = member.root
                hasher.add_root(self._roots[current] or "/")
            entry = member.entry
            content = b""
            if member.kind == FILE:
                content = content_digest(entry.size, self._digests[number])
                self.raw_bytes += data_size(member)
            hasher.add_entry(entry._replace(kind=member.kind, target=member.link), content)
        return hasher.digest()


def is_first(member: Member, unit: Unit) -> bool:
    """Whether a unit is the first of its file."""
    if member.segments:
        return unit.segments[0][0] == member.segments[0][0]
    return unit.block == 0


def is_last(member: Member, unit: Unit) -> bool:
    """Whether a unit is the last of its file."""
    if not unit.segments:
        return True
    end = member.segments[-1] if member.segments else (0, member.entry.size)
    return sum(unit.segments[-1]) == sum(end)


def data_size(member: Member) -> int:
    """Bytes of data in the archive; a sparse member's map, padded on its own, not counted."""
    if member.segments is None:
        return member.entry.size
    return sum(length for _, length in member.segments)


def header(root: str, member: Member) -> bytes:
    """The tar header of one member; names are the absolute ones without the leading slash."""
    entry = member.entry
    base = root.strip("/")
    path = "/".join(filter(None, (base, entry.path))) or "."
    link = member.link
    if member.kind == HARDLINK:
        link = "/".join(filter(None, (base, link)))
    return tar_writer.member(
        path,
        member.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        size=entry.size,
        link=link,
        xattrs=() if member.kind == HARDLINK else entry.xattrs,
        segments=member.segments,
    )


def _check_same(path: str, entry: Entry, now: os.stat_result) -> None:
    seen = (now.st_size, now.st_mtime_ns, now.st_ino, now.st_dev)
    if seen != (entry.size, entry.mtime_ns, entry.ino, entry.dev):
        raise changed_error(path)
    # A ctime also changes when another program makes a hard link, which leaves the file as it is.
    if now.st_nlink == entry.nlink == 1 and now.st_ctime_ns != entry.ctime_ns:
        raise changed_error(path)


def changed_error(path: str) -> BusyError:
    """The error of packing a file that is being changed."""
    return BusyError(f"{path} changed while it was being packed; wait until nothing writes there")
