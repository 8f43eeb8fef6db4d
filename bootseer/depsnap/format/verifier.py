"""Read a whole archive against its index: digests, tar headers, contents, tree digest."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import zstandard

from bootseer.depsnap.format import tar_writer
from bootseer.depsnap.format.frames import read_frame
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.format.packer import Member, data_size, header, is_first, is_last
from bootseer.depsnap.format.tree_digest import TreeHasher
from bootseer.depsnap.format.unit_layout import FramePlan, Unit, block_digest, content_digest
from bootseer.depsnap.types import FILE, Digest
from bootseer.errors import CorruptDataError, from_os_error
from bootseer.system.regular_files import open_to_read


def verify(path: str, index: Index, *, threads: int | None = None) -> Digest:
    """Read the whole archive; return its tree digest.

    Every byte is checked against its digest, the tar headers against the index and the content
    against the tree digest: what plain `tar` would unpack is what the index says. Raises
    CorruptDataError.
    """
    workers = threads or len(os.sched_getaffinity(0))
    try:
        descriptor = open_to_read(path)
        try:
            return _Verifier(descriptor, index).run(workers)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, f"read the archive {path}") from error
    except CorruptDataError as error:
        raise CorruptDataError(f"archive {path}: {error}; fetch or make it again") from error


class _Verifier:
    def __init__(self, descriptor: int, index: Index) -> None:
        self._descriptor = descriptor
        self._index = index
        self._local = threading.local()
        self._root_of: list[int] = []
        for number, root in enumerate(index.roots):
            self._root_of += [number] * root.count
        self._digests: dict[int, dict[int, bytes]] = {}
        self._expected: list[FramePlan] = []

    def _plan_frames(self) -> list[FramePlan]:
        """What each frame must hold. Raises CorruptDataError where an entry is in none."""
        index = self._index
        out: list[FramePlan] = []
        blocks: dict[int, dict[int, Unit]] = {}
        following = 0
        for frame in index.frames:
            content: FramePlan = []
            for entry, block in zip(frame.units[::3], frame.units[1::3], strict=True):
                content += [(n, None) for n in range(following, entry)]
                following = max(following, entry + 1)
                if entry not in blocks:
                    blocks[entry] = {u.block: u for u in index.units_of(entry)}
                content.append((entry, blocks[entry][block]))
            content += [(n, None) for n in range(following, frame.upto)]
            following = max(following, frame.upto)
            out.append(content)
        if following != index.entries:
            raise CorruptDataError("not every entry stands in a frame")
        return out

    def run(self, workers: int) -> Digest:
        self._expected = self._plan_frames()
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for number in range(len(self._index.frames)):
                    if len(waiting) >= 2 * workers:
                        waiting.popleft().result()
                    waiting.append(pool.submit(self._check_frame, number))
                while waiting:
                    waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
        digest = self._tree_digest()
        if digest != self._index.tree_digest:
            raise CorruptDataError(
                f"the content has tree digest {digest}, the index says {self._index.tree_digest}"
            )
        return digest

    def _check_frame(self, number: int) -> None:
        decoder = getattr(self._local, "decoder", None)
        if decoder is None:
            decoder = self._local.decoder = zstandard.ZstdDecompressor()
        frame = self._index.frames[number]
        data = memoryview(read_frame(self._descriptor, frame, decoder))
        if number == len(self._index.frames) - 1:
            if data != tar_writer.END:
                raise CorruptDataError("the tar stream does not end as it should")
            return
        self._check_members(number, data)

    def _check_members(self, number: int, data: memoryview) -> None:
        """Compare a frame's headers and places with the index, and hash its contents."""
        frame = self._index.frames[number]
        places = iter(frame.units[2::3])
        at = 0
        for entry, unit in self._expected[number]:
            member = self._member(entry)
            if unit is None and member.kind != FILE:
                at = self._expect(data, at, self._header(member))
                continue
            if unit is None:
                raise CorruptDataError(f"{member.entry.path!r} has no data where it should")
            if is_first(member, unit):
                at = self._expect(data, at, self._header(member))
            if next(places) != at:
                raise CorruptDataError(f"{member.entry.path!r} is not where the index says")
            content = data[at : at + unit.size]
            digest = block_digest(member.entry.size, unit, content)
            self._digests.setdefault(entry, {})[unit.block] = digest
            at += unit.size
            if is_last(member, unit):
                at = self._expect(data, at, tar_writer.padding(data_size(member)))
        if at != len(data):
            raise CorruptDataError("a frame holds more than the index says")

    def _expect(self, data: memoryview, at: int, wanted: bytes) -> int:
        end = at + len(wanted)
        if data[at:end] != wanted:
            raise CorruptDataError("a tar header differs from the index")
        return end

    def _member(self, number: int) -> Member:
        index = self._index
        entry = index.entry(number)
        segments = index.segments.get(number)
        return Member(self._root_of[number], entry, entry.kind, entry.target, segments)

    def _header(self, member: Member) -> bytes:
        return header(self._index.roots[member.root].root, member)

    def _tree_digest(self) -> Digest:
        hasher = TreeHasher()
        index = self._index
        starts = {root.first: root.root for root in index.roots}
        for number, kind in enumerate(index.kind):
            if number in starts:
                hasher.add_root(starts[number])
            content = b""
            if kind == FILE:
                content = content_digest(index.size[number], self._digests.get(number, {}))
            hasher.add_entry(index.entry(number), content)
        return hasher.digest()
