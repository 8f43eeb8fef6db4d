"""When recording a start ends, and what is kept of it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from bootseer.blocks.trace.recorder import Recorder
from bootseer.events.writer import Writer
from bootseer.imageprefetch.record.first_step import FirstStepWatch
from bootseer.imageprefetch.record.start_recording import StartRecording
from bootseer.imageprefetch.record.trace_store import TraceStore

PAGE = 4096
SIZE = 100 * PAGE


def recorder(**options: Any) -> Recorder:
    return Recorder("image", SIZE, "train", **options)


def test_a_first_step_written_from_now_on_is_seen(tmp_path):
    with Writer(str(tmp_path), {}) as old:
        old.point("first_step")
    watch = FirstStepWatch.begin(tmp_path)
    assert not watch.was_reached()
    with Writer(str(tmp_path), {}) as writer:
        writer.point("loaded", attributes={"text": 'said "first_step" only'})
        assert not watch.was_reached()
        writer.point("first_step")
        assert watch.was_reached()
        assert not watch.was_reached()


def test_a_first_step_counts_when_it_is_done(tmp_path):
    """As in the report: what it imports and reads until then belongs to the start."""
    watch = FirstStepWatch.begin(tmp_path)
    with Writer(str(tmp_path), {}) as writer:
        failed = writer.begin("first_step")
        assert not watch.was_reached()
        writer.end(failed, "first_step", "error")
        assert not watch.was_reached()
        span = writer.begin("first_step")
        assert not watch.was_reached()
        writer.end(span, "first_step")
        assert watch.was_reached()


def test_half_a_line_is_read_when_it_is_whole(tmp_path):
    watch = FirstStepWatch.begin(tmp_path / "later")
    assert not watch.was_reached()
    (tmp_path / "later").mkdir()
    line = json.dumps({"event": "point", "name": "first_step"}) + "\n"
    path = tmp_path / "later" / "rank0.jsonl"
    for cut in (5, 30, len(line) - 1):
        path.write_text(line[:cut])
        assert not watch.was_reached()
    path.write_text(line)
    assert watch.was_reached()
    path.write_text("")  # a file that was begun anew
    assert not watch.was_reached()
    path.write_bytes(b"\xff{broken first_step\n" + line.encode())
    assert watch.was_reached()


def test_recording_ends_at_the_first_step(tmp_path):
    store, ended = TraceStore(tmp_path / "traces"), threading.Event()
    (tmp_path / "events").mkdir()
    some = recorder()
    recording = StartRecording(
        some,
        store,
        full=lambda: True,
        events_dir=str(tmp_path / "events"),
        ended=lambda trace: ended.set(),
    )
    with recording, Writer(str(tmp_path / "events"), {}) as writer:
        some.touch(0, PAGE)
        writer.point("first_step")
        assert ended.wait(30)
        assert not some.recording
        some.touch(8 * PAGE, PAGE)
        kept = store.load("train")
    assert kept is not None
    assert [(e.offset, e.length) for e in kept.extents] == [(0, PAGE)]
    assert (kept.starts, recording.why) == (1, "first step")
    assert store.load("train") == kept  # closing adds nothing again


def test_recording_ends_with_its_window(tmp_path):
    store, ended, some = TraceStore(tmp_path), threading.Event(), recorder(window_s=0.05)
    some.touch(0, 1)
    with StartRecording(
        some, store, full=lambda: True, ended=lambda trace: ended.set()
    ) as recording:
        assert ended.wait(30)
    assert recording.why == "window"


@pytest.mark.parametrize("watched", [True, False])
def test_a_window_begins_with_the_first_touch(tmp_path, watched):
    store, ended, now = TraceStore(tmp_path / "traces"), threading.Event(), [0.0]
    some = recorder(window_s=120.0, clock=lambda: now[0])
    recording = StartRecording(
        some,
        store,
        full=lambda: True,
        events_dir=str(tmp_path) if watched else "",
        ended=lambda trace: ended.set(),
    )
    with recording:
        for at_s in (119.0, 130.0, 4_000.0):  # mounted long before anybody comes
            now[0] = at_s
            assert not ended.wait(0.12)
        some.touch(0, PAGE)
        now[0] += 120.0
        some.touch(2 * PAGE, PAGE)
        now[0] += 1.0
        some.touch(4 * PAGE, PAGE)
    kept = store.load("train")
    assert kept is not None
    assert [(e.offset // PAGE, e.first_touch_ms) for e in kept.extents] == [(0, 0), (2, 120_000)]


def test_a_first_step_without_any_touch_ends_it_too(tmp_path):
    (tmp_path / "events").mkdir()
    ended = threading.Event()
    recording = StartRecording(
        recorder(),
        TraceStore(tmp_path / "traces"),
        full=lambda: False,
        events_dir=str(tmp_path / "events"),
        ended=lambda trace: ended.set(),
    )
    with recording, Writer(str(tmp_path / "events"), {}) as writer:
        writer.point("first_step")
        assert ended.wait(30)
    assert recording.why == "first step"


def test_an_unmount_keeps_what_was_touched_and_closing_twice_is_safe(tmp_path):
    store, some = TraceStore(tmp_path), recorder()
    recording = StartRecording(some, store, full=lambda: False).start()
    some.touch(PAGE, 1)
    recording.close()
    recording.close()
    kept = store.load("train")
    assert kept is not None
    assert (kept.starts, recording.why) == (0, "unmount")


def started(store: TraceStore, *pages: int, why: str = "unmount") -> None:
    """A cold start that reads these pages and ends so."""
    ended, some = threading.Event(), recorder(window_s=120.0 if why == "unmount" else 0.05)
    recording = StartRecording(some, store, full=lambda: True, ended=lambda trace: ended.set())
    for page in pages:
        some.touch(page * PAGE, PAGE)
    with recording:
        assert why == "unmount" or ended.wait(30)
    assert recording.why == why


def test_a_look_at_a_file_is_no_start(tmp_path):
    store = TraceStore(tmp_path)
    started(store, *range(20))
    for page in (70, 71, 70):
        started(store, page)
    kept = store.load("train")
    assert kept is not None
    assert (kept.starts, kept.replays) == (1, 0)
    assert sum(e.length for e in kept.select_hot(0.5).extents) == 20 * PAGE
    for _ in range(2):  # as little, but up to the window's end; and enough
        started(store, 80, why="window")
        started(store, 90, 91)
    kept = store.load("train")
    assert kept is not None
    assert kept.starts == 5


def test_one_scan_that_came_first_does_not_fix_the_hot_set(tmp_path):
    store = TraceStore(tmp_path)
    started(store, *range(100), why="window")
    for _ in range(9):
        started(store, *range(5), why="window")
    kept = store.load("train")
    assert kept is not None
    assert kept.starts == 10
    assert sum(e.length for e in kept.select_hot(0.5).extents) == 5 * PAGE


def test_nothing_touched_is_nothing_kept(tmp_path):
    with StartRecording(recorder(), TraceStore(tmp_path), full=lambda: True):
        pass
    assert TraceStore(tmp_path).workloads() == []


@pytest.mark.parametrize("fault", ["a file", "no room"])
def test_a_trace_that_cannot_be_kept_is_told_and_hurts_nobody(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events"))
    (tmp_path / "events").mkdir()
    (tmp_path / "blocked").write_text("")
    folder = tmp_path / "blocked" if fault == "a file" else "/dev/full/traces"
    some = recorder()
    with StartRecording(some, TraceStore(folder), full=lambda: True):
        some.touch(0, 1)
    lines = [
        json.loads(line)
        for path in (tmp_path / "events").iterdir()
        for line in path.read_text().splitlines()
    ]
    (told,) = [line for line in lines if line.get("name") == "image.record"]
    assert told["status"] == "fallback"
    assert "traces" in told["attributes"]["bootseer.reason"]


def test_times_count_from_the_first_touch(tmp_path):
    now = [50.0]
    some = Recorder("image", SIZE, "train", clock=lambda: now[0])
    with StartRecording(some, TraceStore(tmp_path), full=lambda: True):
        for page, at_s in ((3, 80.0), (1, 80.5)):
            now[0] = at_s
            some.touch(page * PAGE, PAGE)
    kept = TraceStore(tmp_path).load("train")
    assert kept is not None
    assert [(e.offset // PAGE, e.first_touch_ms) for e in kept.extents] == [(3, 0), (1, 500)]
