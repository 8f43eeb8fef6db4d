"""Traces kept on a node: merged over starts, whatever lies there already."""

from __future__ import annotations

import pytest

from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.errors import CorruptDataError, UsageError
from bootseer.imageprefetch.record.trace_store import TraceStore, fit_limits
from bootseer.imageprefetch.workloads import check_workload

PAGE = 4096
SIZE = 1000 * PAGE


def of(starts: int, *rows: tuple[int, int, int], workload: str = "w", about: str = "image"):
    extents = tuple(Touched(page * PAGE, n * PAGE, at, 1) for page, n, at in rows)
    return Trace(about, SIZE, workload, starts, extents)


def test_starts_are_merged_one_by_one(tmp_path):
    store = TraceStore(tmp_path / "traces")
    assert store.load("w") is None
    assert store.workloads() == []
    store.add(of(1, (0, 4, 0), (8, 2, 50)))
    merged = store.add(of(1, (0, 4, 10)))
    assert store.load("w") == merged
    assert [(e.offset // PAGE, e.starts_seen) for e in merged.extents] == [(0, 2), (8, 1)]
    store.add(of(1, (1, 1, 0), workload=""))
    assert store.workloads() == ["", "w"]
    assert sorted(p.name for p in store.folder.iterdir()) == [".lock", "_default.trace", "w.trace"]


def test_twenty_starts_from_a_warm_page_cache_leave_the_hot_set_as_it_was(tmp_path):
    store = TraceStore(tmp_path)
    cold = store.add(of(1, (0, 4, 0), (100, 50, 30), (8, 2, 50)))
    for turn in range(20):
        # What a warm start still reads: little, at other moments, once something of its own.
        own = [(500 + turn, 1, 5)] if turn % 3 else []
        store.add(of(0, (8, 1, 0), *own))
    kept = store.load("w")
    assert kept is not None
    assert kept.starts == 1
    assert kept.replays == 20
    assert pages(kept.select_hot(0.5)) == pages(cold)


def test_one_odd_page_of_each_replayed_start_is_not_hot(tmp_path):
    store = TraceStore(tmp_path)
    cold = store.add(of(1, (0, 4, 0)))
    for turn in range(5):
        kept = store.add(of(0, (100, 1, 5), (500 + turn, 1, 5)))
        # What every one of them misses belongs to it, from the second on.
        assert pages(kept.select_hot(0.5)) == pages(cold) + ([100] if turn else [])


def pages(trace: Trace) -> list[int]:
    return [
        page
        for e in trace.extents
        for page in range(e.offset // PAGE, (e.offset + e.length) // PAGE)
    ]


@pytest.mark.parametrize("left", [b"", b"rubbish", "cut"])
def test_a_damaged_trace_is_told_and_does_not_stop_recording(tmp_path, left):
    store = TraceStore(tmp_path)
    whole = traces.serialise(of(3, (0, 1, 0)))
    store.path("w").write_bytes(whole[:-5] if left == "cut" else left)
    with pytest.raises(CorruptDataError, match=r"w\.trace"):
        store.load("w")
    assert store.add(of(1, (5, 1, 0))) == store.load("w")
    assert (tmp_path / "w.damaged").exists()


def test_a_trace_of_other_bytes_is_replaced(tmp_path):
    store = TraceStore(tmp_path)
    store.add(of(1, (0, 1, 0), about="made by older rules"))
    kept = store.add(of(1, (5, 1, 0)))
    assert kept == store.load("w")
    assert kept.object == "image"
    assert pages(kept) == [5]


def test_a_name_that_could_be_anything_else_is_refused(tmp_path):
    for name in ("a/b", "..", ".hidden", "_default", "x" * 101, "a b", "\n"):
        with pytest.raises(UsageError):
            TraceStore(tmp_path).path(name)
    assert check_workload("torch-2.13_train.v2") == "torch-2.13_train.v2"


def test_what_does_not_fit_goes_by_how_few_starts_saw_it():
    rows = (Touched(0, PAGE, 0, 1), Touched(8 * PAGE, PAGE, 1, 3), Touched(4 * PAGE, PAGE, 2, 2))
    kept = fit_limits(Trace("image", SIZE, "", 3, rows), most_extents=2)
    assert [(e.offset // PAGE, e.starts_seen) for e in kept.extents] == [(8, 3), (4, 2)]
