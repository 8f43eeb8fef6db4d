"""Traces carried to an image's next version, and what of a hot set is shown."""

from __future__ import annotations

import io
import random

import pytest

from bootseer.blockimage import pack_format
from bootseer.blockimage.pack_writer import build_pack, owners
from bootseer.blocks.extents import Extent
from bootseer.imageprefetch.hotset.carry_over import carry
from bootseer.imageprefetch.hotset.summary import PADDING, package_of, summarise
from tests.support.trees.hotsets import PAGE, Tree, unpack_frame

SITE = "usr/lib/python3/site-packages"


def noise(pages: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(pages * PAGE - 100)


OLD = {
    "usr/bin/tool": noise(10, 1),
    f"{SITE}/numpy/core.so": noise(90, 2),
    f"{SITE}/numpy/__init__.py": noise(3, 3),
    f"{SITE}/gone/__init__.py": noise(4, 4),
    "etc/motd": b"hello",
    "usr/share/doc/a": b"same words",
    "usr/share/doc/b": b"same words",
}
NEW = {
    "opt/first": noise(33, 9),  # everything lies elsewhere now
    "usr/bin/tool": noise(10, 7),  # other content
    f"{SITE}/numpy/core.so": OLD[f"{SITE}/numpy/core.so"],
    f"{SITE}/renamed/start.py": OLD[f"{SITE}/numpy/__init__.py"],
    "etc/motd": b"hello",
    "usr/share/doc/b": b"same words",
}


def test_what_did_not_change_is_carried_over_wherever_it_lies_now(tmp_path):
    old, new = Tree(tmp_path / "old", OLD), Tree(tmp_path / "new", NEW)
    trace = old.touched(
        (f"{SITE}/numpy/__init__.py", 1, 2),
        ("usr/bin/tool", 0, 5),
        (f"{SITE}/numpy/core.so", 60, 20),
        (f"{SITE}/numpy/core.so", 3, 7),
        (f"{SITE}/gone/__init__.py", 0, 4),
    )
    carried = carry(trace, old.files, new.files, new.key)
    assert carried.trace.object == new.key
    assert carried.trace.starts == trace.starts
    before, after = old.read_files(trace), new.read_files(carried.trace)
    core = f"{SITE}/numpy/core.so"
    assert after == {
        f"{SITE}/renamed/start.py": before[f"{SITE}/numpy/__init__.py"],
        core: before[core],  # and in the same order
    }
    assert carried.old_bytes == 38 * PAGE
    assert carried.carried_bytes == 29 * PAGE
    assert carried.share == pytest.approx(29 / 38)


def test_between_equal_images_everything_is_carried_over(tmp_path):
    old, new = Tree(tmp_path / "old", OLD), Tree(tmp_path / "new", OLD)
    trace = old.touched(*((path, 0, 100) for path in OLD))
    carried = carry(trace, old.files, new.files, new.key)
    assert old.key == new.key
    assert carried.share == 1.0
    assert old.read_files(carried.trace) == old.read_files(trace)


def test_nothing_in_common_is_an_empty_trace(tmp_path):
    old, new = Tree(tmp_path / "old", OLD), Tree(tmp_path / "new", {"x": noise(5, 50)})
    carried = carry(old.touched(("usr/bin/tool", 0, 9)), old.files, new.files, new.key)
    assert carried.trace.extents == ()
    assert carried.share == 0.0


def test_a_pack_of_a_real_image_holds_and_warms_what_was_touched(tmp_path):
    tree = Tree(tmp_path / "tree", OLD)
    trace = tree.touched((f"{SITE}/numpy/core.so", 80, 10), ("usr/bin/tool", 2, 3))
    out = io.BytesIO()
    info = build_pack(
        trace,
        meta=tree.meta,
        table=tree.table,
        key=tree.key,
        block_bytes=tree.source.block_bytes,
        files=owners(tree.files, [(e.offset, e.length) for e in trace.extents]),
        read_raw=tree.read_raw,
        out=out,
    )
    boot = pack_format.parse_boot(out.getvalue()[: info.boot_length])
    (frame,) = boot.index().frames
    raw = unpack_frame(frame, out.getvalue()[info.boot_length :])
    paths = boot.index().paths
    warmed = [
        tree.contents[paths[w.path].decode()][w.offset : w.offset + w.length] for w in frame.warm
    ]
    assert [len(one) for one in warmed] == [10 * PAGE - 100, 3 * PAGE]
    assert raw == warmed[0] + bytes(100) + warmed[1]


def test_of_files_with_equal_content_those_beside_touched_ones_are_warmed(tmp_path):
    same = noise(2, 1)
    files = {f"d{n}/LICENSE": same for n in range(9)} | {"d5/own": noise(3, 2), "d7/own": noise(3)}
    tree = Tree(tmp_path / "tree", files)

    def likely(*reads: tuple[str, int, int]) -> list[str]:
        extents = [Extent(e.offset, e.length) for e in tree.touched(*reads).extents]
        found = owners(tree.files, extents).ranges(extents)
        return sorted({one.path.decode() for one in found})

    assert likely(("d0/LICENSE", 0, 2)) == ["d0/LICENSE"]
    assert likely(("d0/LICENSE", 0, 2), ("d7/own", 0, 1)) == ["d7/LICENSE", "d7/own"]


# --- what is shown -------------------------------------------------------------------------------


def test_a_summary_counts_every_byte_once_and_says_whose_it_is(tmp_path):
    tree = Tree(tmp_path / "tree", OLD)
    trace = tree.touched(
        ("usr/bin/tool", 0, 5),
        (f"{SITE}/numpy/core.so", 60, 30),
        (f"{SITE}/numpy/__init__.py", 0, 3),
        ("usr/share/doc/a", 0, 1),
    )
    shown = summarise(trace, tree.files, buckets=4)
    assert shown.hot_bytes == trace.touched_bytes() == sum(b.touched_bytes for b in shown.buckets)
    for parts in (shown.directories, shown.files):
        assert sum(part.touched_bytes for part in parts) == shown.hot_bytes
    assert shown.hot_files == 4
    assert shown.image_files == len(OLD)
    packages = {part.name: part for part in shown.packages}
    numpy = packages["numpy"]
    assert (numpy.touched_bytes, numpy.files, numpy.first_touch_ms) == (33 * PAGE - 200, 2, 100)
    assert numpy.size_bytes == 93 * PAGE - 200
    assert shown.files[0].name == f"{SITE}/numpy/core.so"
    assert [b.start_ms for b in shown.buckets] == [0, 76, 152, 228]
    assert {part.name for part in shown.directories} > {"usr/bin", f"{SITE}/numpy", PADDING}


def test_an_empty_hot_set_has_a_summary(tmp_path):
    tree = Tree(tmp_path / "tree", OLD)
    shown = summarise(tree.touched(), tree.files)
    assert (shown.hot_bytes, shown.duration_ms, shown.packages, shown.directories) == (0, 0, (), ())
    assert shown.as_dict()["over_time"] == []


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("usr/lib/python3/dist-packages/numpy/core/a.py", "numpy"),
        ("opt/v/lib/python3.11/site-packages/Py_Yaml-6.0.dist-info/RECORD", "py_yaml"),
        ("opt/v/lib/python3.11/site-packages/numpy.libs/libopenblas.so", "numpy"),
        ("opt/v/lib/python3.11/site-packages/six.py", "six"),
        ("usr/lib/python3.11/json/decoder.py", "Python's standard library"),
        ("usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30", "libstdc++"),
        ("lib/x86_64-linux-gnu/libc.so.6", "libc"),
        ("usr/share/zoneinfo/UTC", "zoneinfo"),
        ("usr/lib/x86_64-linux-gnu/gconv/UTF-16.so.data", "gconv"),
        ("usr/bin/env", "usr/bin/"),
        ("vmlinuz", ""),
    ],
)
def test_a_path_tells_its_package(path, package):
    assert package_of(path) == package
