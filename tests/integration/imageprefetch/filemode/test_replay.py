"""File mode's replay: exactly what was recorded, and nothing else whatever a trace claims."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.blocks.extents import covered_bytes
from bootseer.errors import CorruptDataError, UsageError
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace import FileTrace, Touch, TracedFile
from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore
from bootseer.imageprefetch.filemode.replay import (
    STEP_BYTES,
    ReplaySettings,
    free_bytes,
    plan,
    replay,
)
from bootseer.imageprefetch.filemode.roots import FileOpener
from bootseer.imageprefetch.filemode.trace_names import check_image, image_here, object_name
from tests.support.commands.filemode import PAGE, cold, resident
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("page_cache_stays")


def traced(*touches: tuple[Path | str, int, int], **claimed: int) -> FileTrace:
    """A trace of (path, first page, pages), of files as they are or as `claimed`."""
    files = {}
    for path, _, _ in touches:
        try:
            status = os.stat(path)
            size, mtime = status.st_size or 10 * PAGE, status.st_mtime_ns
        except OSError:
            size, mtime = 10 * PAGE, 1
        files[str(path)] = TracedFile(
            str(path), claimed.get("size", size), claimed.get("mtime", mtime)
        )
    said = [
        Touch(str(path), first * PAGE, count * PAGE, number)
        for number, (path, first, count) in enumerate(touches)
    ]
    return filetraces.trace_of_touches(files, said, "", full=True)


def within(tmp_path: Path, **more: int | float) -> ReplaySettings:
    return ReplaySettings(roots=(str(tmp_path),), **more)


def wait_for_pages(count: int, *paths: Path) -> None:
    """What was asked for may still be on its way from the disk."""
    until(lambda: sum(covered_bytes(resident(path)) for path in paths) >= count * PAGE)


def test_exactly_the_recorded_pages_come(tmp_path: Path) -> None:
    one, two = cold(tmp_path / "one", 3 << 20), cold(tmp_path / "two", 100)
    cold(tmp_path / "three", PAGE)
    done = replay(traced((one, 5, 200), (two, 0, 1), (one, 600, 3)), within(tmp_path))
    assert (done.files, done.size_bytes, done.skipped) == (2, 203 * PAGE + 100, {})
    wait_for_pages(204, one, two)
    assert resident(one) == [(5 * PAGE, 200 * PAGE), (600 * PAGE, 3 * PAGE)]
    assert resident(two) == [(0, PAGE)]
    assert resident(tmp_path / "three") == []


def test_a_file_that_changed_is_skipped(tmp_path: Path) -> None:
    for name, claimed in (("longer", {"size": 5 * PAGE}), ("touched", {"mtime": 1_000_000_007})):
        path = cold(tmp_path / name, 4 * PAGE)
        os.utime(path, ns=(9, 2_000_000_001))
        done = replay(traced((path, 0, 4), **claimed), within(tmp_path))
        assert (done.files, done.skipped) == (0, {"changed": 1})
        assert resident(path) == []
    done = replay(traced((tmp_path / "gone", 0, 4)), within(tmp_path))
    assert done.skipped == {"gone": 1}


def test_a_trace_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symlinks, pipes, sockets, devices and places that were not named; nothing hangs."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    secret = cold(outside / "secret", 10 * PAGE)
    (inside / "link").symlink_to(secret)
    (inside / "folder").symlink_to(outside)
    (inside / "directory").mkdir()
    os.mkfifo(inside / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(inside)  # a socket's path must be short
        server.bind("socket")
        names = ["link", "folder/secret", "directory", "pipe", "socket"]
        paths = [*(inside / name for name in names), secret, Path("/dev/zero"), Path("/proc/stat")]
        done = replay(traced(*((path, 0, 5) for path in paths)), within(inside))
    assert done.files == 0
    assert sum(done.skipped.values()) == len(paths)
    assert resident(secret) == []


@pytest.mark.root
def test_devices_and_other_mounts_are_not_opened(tmp_path: Path) -> None:
    os.mknod(tmp_path / "device", 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    (tmp_path / "mount").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "mount"], check=True)
    try:
        (tmp_path / "mount" / "f").write_bytes(bytes(10 * PAGE))
        paths = (tmp_path / "device", tmp_path / "mount" / "f")
        done = replay(traced(*((path, 0, 5) for path in paths)), within(tmp_path))
        assert done.skipped == {"not a file below the directories named": 2}
        with FileOpener([str(tmp_path), str(tmp_path / "mount")]) as opener:
            os.close(opener.open(str(tmp_path / "mount" / "f"))[0])  # named, it is one of ours
    finally:
        subprocess.run(["umount", "-l", tmp_path / "mount"], check=True)


@pytest.mark.parametrize("spelling", ["./folder/f", "/folder/f", "folder/../folder/f"])
def test_only_a_path_as_the_folder_is_spelled_lies_below_it(tmp_path: Path, spelling: str) -> None:
    folder = tmp_path / "folder"
    (folder / "folder").mkdir(parents=True)
    for file in (folder / "f", folder / "folder" / "f"):
        file.touch()
    refused = r"not below the directories that were named|cross-device"
    with FileOpener([str(folder)]) as opener, pytest.raises(OSError, match=refused):
        opener.open(f"{tmp_path}/{spelling}")


def test_without_openat2_symlinks_are_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "unknown")
    one = cold(tmp_path / "one", PAGE)
    (tmp_path / "link").symlink_to(one)
    done = replay(traced((one, 0, 1), (tmp_path / "link", 0, 1)), within(tmp_path))
    assert (done.files, sum(done.skipped.values())) == (1, 1)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    one = cold(tmp_path / "one", 2 << 20)
    done = replay(traced((one, 0, 512)), within(tmp_path, most_bytes=10 * PAGE))
    assert done.size_bytes == 10 * PAGE
    wait_for_pages(10, one)
    assert resident(one) == [(0, 10 * PAGE)]
    assert 0 < free_bytes() < 1 << 45


def test_what_few_starts_read_is_not_read_ahead(tmp_path: Path) -> None:
    one, two = cold(tmp_path / "one", PAGE), cold(tmp_path / "two", PAGE)
    kept = filetraces.merge([traced((one, 0, 1), (two, 0, 1)), *[traced((one, 0, 1))] * 4])
    assert replay(kept, within(tmp_path, share=0.5)).files == 1
    wait_for_pages(1, one)
    assert (resident(one), resident(two)) == ([(0, PAGE)], [])


def test_a_replay_can_be_stopped(tmp_path: Path) -> None:
    one = cold(tmp_path / "one", PAGE)
    assert replay(traced((one, 0, 1)), within(tmp_path), stop=lambda _: True).files == 0
    assert resident(one) == []


def test_a_plan_is_in_order_cut_and_bounded() -> None:
    files = {"/a": TracedFile("/a", 3 * STEP_BYTES, 1), "/b": TracedFile("/b", 5, 1)}
    said = [Touch("/a", 0, 3 * STEP_BYTES, 0), Touch("/b", 0, 5, 1)]
    trace = filetraces.trace_of_touches(files, said, "", full=True)
    turns = plan(trace, 0.0, 1 << 40)
    assert [[(r.file, r.offset, r.length) for r in turn] for turn in turns] == [
        [(0, n * STEP_BYTES, STEP_BYTES) for n in range(3)],
        [(1, 0, 5)],
    ]
    cut = plan(trace, 0.0, STEP_BYTES + 7)
    assert [r.length for turn in cut for r in turn] == [STEP_BYTES, 7]
    assert plan(trace, 0.0, 0) == []


# --- where traces lie ------------------------------------------------------------------------


def test_starts_of_a_node_merge_into_one_trace(tmp_path: Path) -> None:
    code = """
import sys
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore
name = sys.argv[2]
files = {name: filetraces.TracedFile(name, 5, 7)}
with FileTraceStore.open(sys.argv[1]) as keeper:
    for _ in range(5):
        touch = filetraces.Touch(name, 0, 5, 1)
        keeper.add("sha256:00", filetraces.trace_of_touches(files, [touch], "w", full=True))
"""
    commands = [[sys.executable, "-c", code, tmp_path / "t", f"/{n}"] for n in range(4)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0] * 4
    with FileTraceStore.open(str(tmp_path / "t")) as keeper:
        kept = keeper.load("sha256:00", "w")
        assert kept is not None
        assert (kept.recordings, kept.trace.starts) == (20, 20)
        assert [file.path for file in kept.files] == ["/0", "/1", "/2", "/3"]
        assert keeper.load("sha256:00") is None
        assert keeper.load("sha256:01", "w") is None


def test_a_damaged_trace_is_told_and_replaced(tmp_path: Path) -> None:
    with FileTraceStore.open(str(tmp_path)) as keeper:
        path = tmp_path / object_name("i", "")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"BSFILES\x01damaged")
        with pytest.raises(CorruptDataError):
            keeper.load("i")
        one = traced((cold(tmp_path / "one", PAGE), 0, 1))
        assert keeper.add("i", one) == one
        assert keeper.load("i") == one


def test_names_of_images() -> None:
    assert check_image("sha256:00ff") == "sha256-00ff"
    assert check_image("registry.example/team/train@sha256:00").startswith("registry.example_team")
    for bad in ("", "../x", "a b", "a" * 200, "a\0"):
        with pytest.raises(UsageError):
            check_image(bad)
    assert check_image(image_here()) == image_here()
