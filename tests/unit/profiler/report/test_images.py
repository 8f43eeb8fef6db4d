"""What the report says of images: how they were mounted, and what their programs waited for."""

from __future__ import annotations

import json
import time
from pathlib import Path

from bootseer.events.writer import Writer
from bootseer.profiler.render import html
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import ImageUse, Report

TRACE = "12" * 16
ABOUT = {
    "bootseer.image.ref": "registry.example/team/train:v3",
    "bootseer.image.workload": "train",
}
MOUNTED = {**ABOUT, "bootseer.image.mode": "lazy", "bootseer.image.hot_set": "used"}
READS = {
    "bootseer.image.demand_reads": 20,
    "bootseer.image.demand_misses": 5,
    "bootseer.image.demand_bytes": 40960,
    "bootseer.image.blocked_s": 0.012,
    "bootseer.image.bytes.boot": 3,
    "bootseer.image.bytes.hot": 1000,
    "bootseer.image.bytes.cold": 7,
    "bootseer.image.bytes.fill": 9,
    "bootseer.image.bytes.cache": 0,
}
Told = tuple[str, dict[str, object]]


def written(folder: Path, *points: Told, spans: tuple[Told, ...] = ()) -> Report:
    """The report of one process's points, and of spans of 50 ms each."""
    with Writer(str(folder), {"host.name": "n1"}, TRACE, None) as writer:
        for name, attributes in spans:
            wall, mono = time.time_ns(), time.monotonic_ns()
            span = writer.begin(name, time_unix_nano=wall, mono_nano=mono)
            wall, mono = wall + 50_000_000, mono + 50_000_000
            writer.end(span, name, "ok", attributes, time_unix_nano=wall, mono_nano=mono)
        for name, attributes in points:
            writer.point(name, attributes=attributes)
    return analysis.analyse(load([str(folder)]))


def test_a_mounted_image_is_told_with_what_was_waited_for(tmp_path):
    replayed = {**ABOUT, "bootseer.bytes": 1000, "bootseer.duration_ms": 200}
    report = written(
        tmp_path,
        ("image.record", {"bootseer.bytes": 8192, "bootseer.image.workload": "train"}),
        ("image.reads", {**READS, "bootseer.image.demand_reads": 1}),
        ("image.reads", READS),
        ("image.fault", {"error.type": "note"}),
        ("image.replay", replayed),
        spans=(("image.mount", MOUNTED),),
    )
    assert report.images == (
        ImageUse(
            node="n1",
            ref="registry.example/team/train:v3",
            workload="train",
            mode="lazy",
            hot_set="used",
            ready_s=0.05,
            replay_s=0.2,
            replay_bytes=1000,
            reads=20,
            read_bytes=40960,
            missed_reads=5,
            blocked_s=0.012,
            boot_bytes=3,
            hot_bytes=1000,
            cold_bytes=7,
            fill_bytes=9,
            cache_bytes=0,
            recorded_bytes=8192,
            faults=1,
        ),
    )
    assert json.loads(json.dumps(report.to_json()))["images"][0]["missed_reads"] == 5
    assert "image.mount" in {phase.name for phase in report.phases}
    page = html.render(report)
    assert "registry.example/team/train:v3" in page.replace("<wbr>", "")
    assert "5 of 20" in page


def test_no_hot_set_and_files_read_ahead_are_told_apart(tmp_path):
    none = {**MOUNTED, "bootseer.image.hot_set": "none", "bootseer.image.mode": "cache"}
    (use,) = written(tmp_path / "none", spans=(("image.mount", none),)).images
    assert (use.hot_set, use.mode, use.replay_bytes, use.reads) == ("none", "cache", None, None)
    files = {"bootseer.image.mode": "files", "bootseer.bytes": 5, "bootseer.duration_ms": 70}
    (use,) = written(tmp_path / "files", ("image.replay", files)).images
    assert (use.mode, use.hot_set, use.replay_bytes, use.replay_s) == ("files", "used", 5, 0.07)
    assert use.ready_s is None


def test_starts_without_images_have_none_and_rubbish_breaks_nothing(tmp_path):
    assert written(tmp_path / "other", ("loaded", {})).images == ()
    (use,) = written(
        tmp_path / "rubbish",
        ("image.mount", {"bootseer.image.ref": 5, "bootseer.duration_ms": "soon"}),
        ("image.reads", {"bootseer.image.demand_reads": -1, "bootseer.image.blocked_s": True}),
    ).images
    assert (use.ref, use.ready_s, use.reads, use.blocked_s) == (None, None, None, None)
