"""Small block images made from nothing, for tests of what works on traces and file maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bootseer.blockimage import pack_format
from bootseer.blockimage.build import Built, build
from bootseer.blockimage.tree_entries import Entry, Kind
from bootseer.blocks.table import TableSource, digest_of
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.storage.local import LocalStore

PAGE = 4096


@dataclass
class Held:
    """Content in memory."""

    data: bytes
    segments: None = None

    def chunks(self, size_bytes: int) -> Iterable[bytes]:
        for at in range(0, len(self.data), size_bytes):
            yield self.data[at : at + size_bytes]


class Tree:
    """A block image of some files, built below a folder."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        folder.mkdir(parents=True)
        self.contents = dict(files)
        entries = [Entry(path=b"", kind=Kind.DIRECTORY, mode=0o755)]
        parents = {str(p) for path in files for p in Path(path).parents if str(p) != "."}
        entries += [
            Entry(path=path.encode(), kind=Kind.DIRECTORY, mode=0o755) for path in sorted(parents)
        ]
        for path, data in files.items():
            held = Held(data) if data else None
            entries.append(
                Entry(path=path.encode(), kind=Kind.FILE, size_bytes=len(data), content=held)
            )
        self.built: Built = build(entries, str(folder))
        data_path = Path(self.built.data_path)
        self.source = TableSource(
            self.built.table, LocalStore(str(data_path.parent)), data_path.name
        )
        self.meta = Path(self.built.meta_path).read_bytes()
        self.table = self.built.table.serialise()

    @property
    def files(self):
        return self.built.files

    @property
    def key(self) -> str:
        return self.source.key

    def read_raw(self, offset: int, buffer: memoryview) -> None:
        """The data's bytes, block by block, verified."""
        block_bytes, table = self.source.block_bytes, self.built.table
        while len(buffer):
            index, within = divmod(offset, block_bytes)
            place = self.source.locate(index)
            stored = bytearray(place.length)
            self.source.store.read_range(place.part, place.offset, stored)
            size = min(block_bytes, table.size_bytes - index * block_bytes)
            raw = stored if self.source.in_place else bytearray(size)
            self.source.open_block(index, memoryview(stored), memoryview(raw))
            assert digest_of(table.kind, raw) == table[index].digest
            part = min(len(raw) - within, len(buffer))
            buffer[:part] = raw[within : within + part]
            buffer, offset = buffer[part:], offset + part

    def touched(self, *reads: tuple[str, int, int], starts: int = 1, step_ms: int = 100) -> Trace:
        """The trace of a start that read these pages (path, first page, pages) in turn."""
        places = {file.path.decode(): file for file in self.files.files}
        rows: list[Touched] = []
        taken: set[int] = set()
        for number, (path, first, count) in enumerate(reads):
            for extent in places[path].extents:
                start = extent.data_offset + first * PAGE - extent.file_offset
                end = min(start + count * PAGE, extent.data_offset + extent.length)
                end = min(-(-end // PAGE) * PAGE, self.built.table.size_bytes)
                for at in range(start, end, PAGE):
                    if at not in taken:
                        taken.add(at)
                        rows.append(Touched(at, PAGE, number * step_ms, 1))
        return Trace(self.key, self.built.table.size_bytes, "", starts, tuple(rows))

    def read_files(self, trace: Trace) -> dict[str, bytes]:
        """Path → the touched bytes of it, in the order of the trace."""
        got: dict[str, bytes] = {}
        for one in self.files.ranges((e.offset, e.length) for e in trace.extents):
            path = one.path.decode()
            data = self.contents[path][one.offset : one.offset + one.length]
            got[path] = got.get(path, b"") + data
        return got


def unpack_frame(frame: pack_format.Frame, stored: bytes | bytearray | memoryview) -> bytearray:
    """The bytes of a frame of a pack, verified."""
    raw = bytearray(frame.raw_bytes)
    pack_format.open_frame(frame, stored, memoryview(raw))
    return raw
