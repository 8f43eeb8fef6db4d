"""Which pages of mapped files a tree of processes has touched, by /proc/PID/pagemap.

This works for files of other owners, of which mincore(2) reveals nothing: the page tables of one's
own processes can always be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from bootseer.blocks.extents import PAGE_BYTES, Extent, union
from bootseer.imageprefetch.filemode.mincore import page_runs
from bootseer.system.processes import LIMIT_S, call_within, read_proc

_ENTRY_BYTES = 8
# In the last byte of an entry: bit 7 present, bit 6 swapped out.
_TOUCHED = bytes(1 if value & 0xC0 else 0 for value in range(256))
MAX_PROCESSES = 256
MAX_PAGES = 1 << 20  # of one mapping: a data set of terabytes is not read ahead


def process_tree(pid: int) -> list[int]:
    """A process and its descendants, as far as their parents still live."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            parent = _parent(name)
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    out: list[int] = []
    waiting = [pid]
    while waiting and len(out) < MAX_PROCESSES:
        next_pid = waiting.pop()
        out.append(next_pid)
        waiting += children.get(next_pid, [])
    return out


def _parent(name: str) -> int | None:
    try:
        # Not `stat`, on which the kernel blocks while the process is in execve(2).
        with open(f"/proc/{name}/status", "rb", buffering=0) as file:
            return int(file.read(4096).partition(b"\nPPid:")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return None


def read_bytes(pids: Iterable[int]) -> int:
    """The bytes that block devices read for these processes and those that they waited for."""
    total = 0
    for pid in pids:
        try:
            for line in read_proc(f"/proc/{pid}/io").splitlines():
                if line.startswith(b"read_bytes:"):
                    total += int(line.split()[1])
        except (OSError, ValueError):
            continue  # it has ended, or its figures are not ours to read
    return total


class MappedPages:
    """Collects, sample by sample, the touched pages of files that processes map."""

    def __init__(self) -> None:
        self.first_s: dict[str, float] = {}
        self._pages: dict[str, list[Extent]] = {}
        self._hanging: set[int] = set()

    def look(self, pids: Iterable[int], now_s: float) -> None:
        """Add what these processes have in their page tables now."""
        for pid in pids:
            if pid in self._hanging:
                continue
            try:
                for path, runs in call_within(LIMIT_S, _touched_pages, pid):
                    self.first_s.setdefault(path, now_s)
                    self._pages[path] = union([*self._pages.get(path, []), *runs])
            except TimeoutError:
                self._hanging.add(pid)
            except OSError:
                continue  # it has ended, or its tables are not ours to read

    def pages(self) -> Mapping[str, list[Extent]]:
        """The touched pages of each path; the last one of a file may reach beyond its end."""
        return self._pages


def _touched_pages(pid: int) -> list[tuple[str, list[Extent]]]:
    """The file of each mapping of a process, and the pages that are in its page table."""
    out = []
    with open(f"/proc/{pid}/maps", "rb") as file:
        maps = file.read()
    table = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for path, start, end, offset in file_maps(maps):
            count = min((end - start) // PAGE_BYTES, MAX_PAGES)
            at = start // PAGE_BYTES * _ENTRY_BYTES
            marks = os.pread(table, count * _ENTRY_BYTES, at)[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
            runs = page_runs(marks.translate(_TOUCHED), offset)
            if runs:
                out.append((path, runs))
    finally:
        os.close(table)
    return out


def mapping_order(pids: Iterable[int]) -> dict[str, int]:
    """The rank of each file that processes map, in about the order in which they mapped them.

    The kernel places each mapping below the previous one.
    """
    out: dict[str, int] = {}
    for pid in pids:
        try:
            mappings = sorted(file_maps(read_proc(f"/proc/{pid}/maps")), key=lambda one: -one[2])
        except OSError:
            continue  # it has ended, or its mappings are not ours to read
        for path, *_ in mappings:
            out.setdefault(path, len(out))
    return out


def file_maps(maps: bytes) -> Iterator[tuple[str, int, int, int]]:
    """(path, first address, end address, file offset) of every file that `maps` lists. Pure."""
    for line in maps.splitlines():
        fields = line.split(b" ", 5)
        if len(fields) < 6 or fields[4] == b"0":
            continue
        path = fields[5].lstrip()
        if path.startswith(b"/") and not path.endswith(b" (deleted)"):
            start, _, end = fields[0].partition(b"-")
            yield os.fsdecode(path), int(start, 16), int(end, 16), int(fields[2], 16)
