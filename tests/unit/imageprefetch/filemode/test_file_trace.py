"""Traces of files: written, read, merged over starts and over files that changed."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.extents import union
from bootseer.errors import CorruptDataError, UsageError
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch, TracedFile

PAGE = 4096
SIZES = {"/a": 10 * PAGE, "/b/c": 3 * PAGE + 5, "/d": 1}


def of(*touches: tuple[str, int, int, int], full: bool = True, **changed: int) -> FileTrace:
    """One start's trace of (path, offset, length, milliseconds); `changed` gives other times."""
    files = {
        path: TracedFile(path, size, changed.get(path.strip("/").replace("/", "_"), 1_500_000_007))
        for path, size in SIZES.items()
    }
    return filetraces.trace_of_touches(files, [Touch(*t) for t in touches], "w", full=full)


def hot(trace: FileTrace, share: float = 0.0) -> dict[str, list[tuple[int, int]]]:
    """Path → what is read ahead of it."""
    out: dict[str, list[tuple[int, int]]] = {}
    for one in trace.ranges(share):
        out.setdefault(trace.files[one.file].path, []).append((one.offset, one.length))
    return {path: [tuple(e) for e in union(ranges)] for path, ranges in out.items()}


touches = st.lists(
    st.tuples(
        st.sampled_from([*SIZES, "/unlisted"]),
        st.integers(0, 11 * PAGE),
        st.integers(0, 4 * PAGE),
        st.integers(0, 3).map(lambda n: n * 100),
    ),
    max_size=12,
)


@given(touches, st.booleans())
def test_a_trace_comes_back_and_holds_whole_pages(some: Any, full: bool) -> None:
    trace = of(*some, full=full)
    assert filetraces.parse(filetraces.serialise(trace)) == trace
    wanted: dict[str, list[tuple[int, int]]] = {}
    for path, offset, length, _ in some:
        if path in SIZES and offset < SIZES[path] and length:
            start = offset // PAGE * PAGE
            end = min(-(-min(offset + length, SIZES[path]) // PAGE) * PAGE, SIZES[path])
            wanted.setdefault(path, []).append((start, end - start))
    assert hot(trace) == {path: [tuple(e) for e in union(r)] for path, r in wanted.items()}
    assert {file.path for file in trace.files} == set(wanted)


def test_ranges_come_in_the_order_of_first_touch() -> None:
    trace = of(("/d", 0, 1, 300), ("/a", 8 * PAGE, 10, 200), ("/a", 0, 10, 100), ("/a", 0, 9, 400))
    shown = [(trace.files[r.file].path, r.offset, r.length) for r in trace.ranges()]
    assert shown == [("/a", 0, PAGE), ("/a", 8 * PAGE, PAGE), ("/d", 0, 1)]


def test_a_name_that_is_no_utf8_comes_back() -> None:
    path = "/\udcff\udc80"
    file = TracedFile(path, 5, 7)
    trace = filetraces.trace_of_touches({path: file}, [Touch(path, 0, 5, 0)], "", full=True)
    assert filetraces.parse(filetraces.serialise(trace)).files == (file,)


def test_a_cut_or_flipped_trace_is_refused() -> None:
    trace = of(("/a", 0, 9999, 0), ("/d", 0, 1, 7))
    data = filetraces.serialise(trace)
    refused = 0
    for at in range(len(data)):
        with pytest.raises(CorruptDataError):
            filetraces.parse(data[:at])
        for bit in (1, 128):
            flipped = bytearray(data)
            flipped[at] ^= bit
            try:
                assert filetraces.parse(bytes(flipped)) == trace  # a bit that means nothing
            except CorruptDataError:
                refused += 1
    assert refused > 2 * len(data) - 8
    with pytest.raises(CorruptDataError):
        filetraces.parse(data + b"\0")


def forged(files: object, trace: bytes | None = None, **more: object) -> bytes:
    """A trace whose list of files is this."""
    document = {"version": 1, "recordings": 1, "files": files, **more}
    listed = zstandard.ZstdCompressor(write_checksum=True).compress(json.dumps(document).encode())
    whole = filetraces.serialise(of(("/a", 0, 1, 0)))
    (length,) = struct.unpack_from("<I", whole, 8)
    return (
        filetraces.MAGIC + struct.pack("<I", len(listed)) + listed + (trace or whole[12 + length :])
    )


@pytest.mark.parametrize(
    "files",
    [
        [["a", 1, 1]],
        [["/a/../etc/shadow", 1, 1]],
        [["/a//b", 1, 1]],
        [["/", 1, 1]],
        [["/a\0b", 1, 1]],
        [["/" + "a" * 5000, 1, 1]],
        [["/\ud800", 1, 1]],
        [["/a", 0, 1]],
        [["/a", -1, 1]],
        [["/a", 1 << 60, 1]],
        [["/a", 1.5, 1]],
        [["/a", 1, 1 << 70]],
        [["/a", 1, 1], ["/a", 1, 1]],
        [["/a", 1]],
        [7],
        7,
        None,
        [["/other", 10 * PAGE, 1]],
    ],
)
def test_a_forged_list_of_files_is_refused(files: object) -> None:
    with pytest.raises(CorruptDataError):
        filetraces.parse(forged(files))


def test_what_claims_to_be_huge_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filetraces, "MAX_FILES", 1000)
    monkeypatch.setattr(filetraces, "MAX_LIST_BYTES", 1 << 20)
    bomb = zstandard.ZstdCompressor().compress(bytes(filetraces.MAX_LIST_BYTES + 1))
    with pytest.raises(CorruptDataError, match="unpacks to more"):
        filetraces.parse(filetraces.MAGIC + struct.pack("<I", len(bomb)) + bomb)
    with pytest.raises(CorruptDataError, match="recordings"):
        filetraces.parse(forged([["/a", 10 * PAGE, 1_500_000_007]], recordings=1 << 30))
    many = [[f"/{number}", 1, 1] for number in range(filetraces.MAX_FILES + 1)]
    with pytest.raises(CorruptDataError, match="too many"):
        filetraces.parse(forged(many))


@given(st.lists(st.tuples(touches, st.booleans()), min_size=1, max_size=4))
def test_merging_keeps_all_that_any_start_read(starts: Any) -> None:
    several = [of(*some, full=full) for some, full in starts]
    merged = filetraces.merge(several)
    assert merged.recordings == len(several)
    assert merged.trace.starts == sum(full for _, full in starts)
    together = of(*[touch for some, _ in starts for touch in some])
    assert hot(merged) == hot(together)
    assert filetraces.parse(filetraces.serialise(merged)) == merged


def test_twenty_warm_starts_leave_the_hot_set_as_it_was() -> None:
    kept = of(("/a", 0, 4 * PAGE, 0), ("/b/c", 0, 100, 50))
    before = hot(kept, 0.5)
    for _ in range(20):
        kept = filetraces.merge([kept, of(("/d", 0, 1, 10), full=False)])
    assert {path: ranges for path, ranges in hot(kept, 0.5).items() if path != "/d"} == before
    assert kept.trace.starts == 1


def test_what_few_starts_read_is_left_out() -> None:
    common = ("/a", 0, PAGE, 0)
    kept = filetraces.merge([of(common, ("/d", 0, 1, 5)), of(common), of(common), of(common)])
    assert set(hot(kept, 0.5)) == {"/a"}
    assert set(hot(kept, 0.25)) == {"/a", "/d"}
    assert [file.path for file in filetraces.prune(kept, 0.5).files] == ["/a"]


def test_of_a_file_that_changed_the_newer_start_is_believed() -> None:
    old = of(("/a", 0, PAGE, 0), ("/d", 0, 1, 5))
    new = of(("/a", 5 * PAGE, PAGE, 0), a=9_000_000_001)
    merged = filetraces.merge([old, new])
    assert hot(merged) == {"/a": [(5 * PAGE, PAGE)], "/d": [(0, 1)]}
    assert {f.path: f.mtime_ns for f in merged.files}["/a"] == 9_000_000_001


def test_merging_needs_traces_of_one_workload() -> None:
    with pytest.raises(UsageError, match="no trace"):
        filetraces.merge([])
    other = filetraces.trace_of_touches({}, [], "other", full=True)
    with pytest.raises(UsageError, match="different workloads"):
        filetraces.merge([of(("/a", 0, 1, 0)), other])


def test_times_of_whole_seconds_equal_any_within() -> None:
    fine = TracedFile("/a", 5, 3_000_000_007)
    assert fine.is_same(5, 3_000_000_007)
    assert fine.is_same(5, 3_000_000_000)
    assert not fine.is_same(5, 3_000_000_008)
    assert not fine.is_same(6, 3_000_000_007)
    assert not fine.is_same(5, 4_000_000_000)
    assert TracedFile("/a", 5, 3_000_000_000).is_same(5, 3_999_999_999)
