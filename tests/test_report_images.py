"""What the report says of images: how they were mounted, and what their programs waited for."""

from __future__ import annotations

import json
from pathlib import Path

from bootseer.profiler.events import Writer
from bootseer.profiler.render import html
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load
from bootseer.profiler.report.model import ImageUse, Report

TRACE = "12" * 16
ABOUT = {
    "bootseer.image.ref": "registry.example/team/train:v3",
    "bootseer.image.workload": "train",
    "bootseer.image.hot_set": "sha256:12",
    "bootseer.image.offline": False,
    "bootseer.duration_ns": 45_000_000,
}
READS = {
    "bootseer.image.reads": 10,
    "bootseer.image.bytes": 40960,
    "bootseer.image.waits": 3,
    "bootseer.image.blocked_ns": 12_000_000,
    "bootseer.image.replayed_bytes": 1000,
}


def written(folder: Path, *points: tuple[str, dict[str, object]], node: str = "n1") -> Report:
    with Writer(str(folder), {"host.name": node}, TRACE, None) as writer:
        for name, attributes in points:
            writer.point(name, attributes=attributes)
    return analysis.analyse(load([str(folder)]))


def test_a_mounted_image_is_told_with_what_was_waited_for(tmp_path):
    report = written(
        tmp_path,
        ("image.mount", ABOUT),
        ("image.replay", {**ABOUT, "bootseer.duration_ns": 200_000_000, **READS}),
        ("image.record", {"bootseer.bytes": 8192, "bootseer.image.workload": "train"}),
        ("image.reads", {**READS, "bootseer.image.reads": 20, "bootseer.image.waits": 5}),
        ("image.fault", {"error.type": "note"}),
        ("fetch.stats", {"bootseer.source_class": "image", "bootseer.demand_bytes": 7}),
        ("fetch.stats", {"bootseer.source_class": "image", "bootseer.background_bytes": 9}),
        ("fetch.stats", {"bootseer.source_class": "checkpoint", "bootseer.demand_bytes": 99}),
    )
    assert report.images == (
        ImageUse(
            node="n1",
            ref="registry.example/team/train:v3",
            workload="train",
            mode="mounted",
            hot_set=True,
            offline=False,
            ready_s=0.045,
            replay_s=0.2,
            replay_bytes=1000,
            reads=20,
            read_bytes=40960,
            waits=5,
            blocked_s=0.012,
            demand_bytes=7,
            hot_bytes=0,
            fill_bytes=9,
            cache_bytes=0,
            recorded_bytes=8192,
            faults=1,
        ),
    )
    assert json.loads(json.dumps(report.to_json()))["images"][0]["waits"] == 5
    page = html.render(report)
    assert "registry.example/team/train:v3" in page.replace("<wbr>", "")
    assert "5 of 20" in page


def test_no_hot_set_and_files_read_ahead_are_told_apart(tmp_path):
    (use,) = written(
        tmp_path / "none", ("image.mount", {**ABOUT, "bootseer.image.hot_set": ""})
    ).images
    assert (use.hot_set, use.replay_bytes, use.reads) == (False, None, None)
    (use,) = written(
        tmp_path / "files",
        (
            "image.replay",
            {"bootseer.image.mode": "files", "bootseer.bytes": 5, "bootseer.duration_ms": 70},
        ),
    ).images
    assert (use.mode, use.replay_bytes, use.replay_s, use.ready_s) == ("files", 5, 0.07, None)


def test_starts_without_images_have_none_and_rubbish_breaks_nothing(tmp_path):
    assert written(tmp_path / "other", ("loaded", {})).images == ()
    (use,) = written(
        tmp_path / "rubbish",
        ("image.mount", {"bootseer.image.ref": 5, "bootseer.duration_ns": "soon"}),
        ("image.reads", {"bootseer.image.reads": -1, "bootseer.image.waits": True}),
    ).images
    assert (use.ref, use.ready_s, use.reads, use.waits) == (None, None, None, None)
