"""File mode's recorders: which pages of which files a command made the kernel read."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import NotSupportedError
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode import pagemap, tracefs
from bootseer.imageprefetch.filemode.file_trace import FileTrace
from bootseer.imageprefetch.filemode.mincore import page_runs
from bootseer.imageprefetch.filemode.pagemap import file_maps
from bootseer.imageprefetch.filemode.recorder import (
    CommandRecording,
    FileRecordSettings,
    Method,
    Recording,
)
from bootseer.imageprefetch.filemode.roots import folders, resolve_roots
from bootseer.imageprefetch.filemode.tracefs import PageAdded, Tracer, parse_lines
from tests.support.commands.filemode import (
    PAGE,
    PYTHON,
    as_nobody,
    cold,
    everybodys,
    evict,
    reader,
    resident,
)

pytestmark = pytest.mark.usefixtures("page_cache_stays")

ROOT = pytest.mark.root
METHODS = [pytest.param("residency"), pytest.param("tracefs", marks=ROOT)]


def record(root: Path, method: Method, command: list[str], **more: object) -> FileTrace:
    settings = FileRecordSettings(roots=(str(root),), method=method)
    with Recording(settings, os.getpid()) as recording:
        recording.survey()
        with CommandRecording(recording, **more) as watched:
            done = subprocess.run(command, check=False)
        return watched.trace(succeeded=done.returncode == 0)


def read(trace: FileTrace, root: Path) -> dict[str, list[tuple[int, int]]]:
    """File name → (first page, pages), in the order of first touch."""
    out: dict[str, list[tuple[int, int]]] = {}
    for one in trace.ranges():
        path = os.path.relpath(trace.files[one.file].path, root)
        out.setdefault(path, []).append((one.offset // PAGE, -(-one.length // PAGE)))
    return out


@pytest.mark.parametrize("method", METHODS)
def test_the_pages_that_were_read_and_no_others(tmp_path: Path, method: Method) -> None:
    big, small = cold(tmp_path / "big", 100 * PAGE + 50), cold(tmp_path / "small", 10)
    cold(tmp_path / "untouched", PAGE)
    (tmp_path / "empty").touch()
    code = f"read({str(big)!r}, 7, 50, 51, 100); read({str(small)!r}, 0)"
    trace = record(tmp_path, method, reader(code))
    found = {name: sorted(pages) for name, pages in read(trace, tmp_path).items()}
    assert found == {"big": [(7, 1), (50, 2), (100, 1)], "small": [(0, 1)]}
    assert (trace.trace.starts, trace.recordings) == (1, 1)
    assert resident(tmp_path / "untouched") == []


@ROOT
@pytest.mark.parametrize("method", METHODS)
def test_on_overlayfs_where_containers_run(tmp_path: Path, method: Method) -> None:
    """The kernel names the lower file system there, and cachestat(2) would see nothing."""
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    for name in ("lower/d", "upper", "work", "merged"):
        (tmp_path / name).mkdir(parents=True)
    cold(lower / "d" / "f", 40 * PAGE)
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "none", "-o", options, merged], check=True)
    try:
        trace = record(merged, method, reader(f"read({str(merged / 'd/f')!r}, 3, 30)"))
        assert sorted(read(trace, merged)["d/f"]) == [(3, 1), (30, 1)]
        assert trace.files[0].path == str(merged / "d" / "f")
    finally:
        subprocess.run(["umount", "-l", merged], check=True)


@pytest.mark.parametrize("method", METHODS)
def test_files_come_in_the_order_of_their_use(tmp_path: Path, method: Method) -> None:
    names = ["m", "a", "z", "b"]
    for name in names:
        cold(tmp_path / name, PAGE)
    settings = FileRecordSettings(roots=(str(tmp_path),), method=method)
    with Recording(settings, os.getpid()) as recording:
        recording.survey()
        with CommandRecording(recording) as watched:
            reading = reader("for line in sys.stdin: read(line[:-1], 0); print(flush=True)")
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with subprocess.Popen(reading, **pipes) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                for path in [str(tmp_path / name) for name in names]:
                    print(path, file=process.stdin, flush=True)
                    assert process.stdout.readline() == "\n"
                    # Openings that are heard at once have one time.
                    while method == "residency" and path not in recording._opens.first_s:
                        time.sleep(0.01)
                    time.sleep(0.01)
        trace = watched.trace(succeeded=process.returncode == 0)
    assert [trace.files[one.file].path for one in trace.ranges()] == [
        str(tmp_path / name) for name in names
    ]


@pytest.mark.parametrize("method", METHODS)
def test_twenty_warm_starts_tell_nothing_and_lower_nothing(tmp_path: Path, method: Method) -> None:
    big = cold(tmp_path / "big", 64 * PAGE)
    command = reader(f"read({str(big)!r}, *range(40))")
    kept = record(tmp_path, method, command)
    assert kept.trace.starts == 1
    before = read(kept, tmp_path)
    for _ in range(20 if method == "residency" else 3):
        warm = record(tmp_path, method, ["true"])
        assert warm.trace.starts == 0
        kept = filetraces.merge([kept, warm])
    assert read(kept, tmp_path) == before
    assert kept.trace.starts == 1


def test_a_start_half_warm_adds_and_lowers_nothing(tmp_path: Path) -> None:
    big = cold(tmp_path / "big", 64 * PAGE)
    subprocess.run(reader(f"read({str(big)!r}, *range(40))"), check=True)
    trace = record(tmp_path, "residency", reader(f"read({str(big)!r}, *range(35, 45))"))
    assert read(trace, tmp_path) == {"big": [(40, 5)]}
    assert trace.trace.starts == 0


@pytest.mark.parametrize("method", METHODS)
def test_what_the_start_itself_made_is_left_out(tmp_path: Path, method: Method) -> None:
    changed = cold(tmp_path / "changed", 4 * PAGE)
    kept = cold(tmp_path / "kept", 4 * PAGE)
    code = (
        f"read({str(kept)!r}, 0); open({str(tmp_path / 'made')!r}, 'w').write('x')\n"
        f"read({str(changed)!r}, 1); open({str(changed)!r}, 'r+b').write(b'y')"
    )
    trace = record(tmp_path, method, reader(code))
    found = read(trace, tmp_path)
    assert found["kept"] == [(0, 1)]
    # By tracefs it was read as it is named, and the replay will see that it changed.
    assert set(found) - {"kept"} <= ({"changed"} if method == "tracefs" else set())


def test_a_command_that_failed_tells_nothing_about_what_it_left_out(tmp_path: Path) -> None:
    cold(tmp_path / "f", PAGE)
    trace = record(tmp_path, "residency", reader(f"read({str(tmp_path / 'f')!r}, 0); sys.exit(3)"))
    assert set(read(trace, tmp_path)) == {"f"}
    assert trace.trace.starts == 0


@pytest.mark.parametrize("method", METHODS)
def test_recording_ends_at_the_first_step(tmp_path: Path, method: Method) -> None:
    files, events = tmp_path / "files", tmp_path / "events"
    files.mkdir()
    early, late = cold(files / "early", PAGE), cold(files / "late", PAGE)
    code = f"""
read({str(early)!r}, 0)
import bootseer
bootseer.event("first_step")
time.sleep(1.5)
read({str(late)!r}, 0)
"""
    command = ["env", f"BOOTSEER_EVENTS={events}", *reader(code)]
    trace = record(files, method, command, events_dir=str(events))
    assert set(read(trace, files)) == {"early"}


def test_the_window_ends_a_recording(tmp_path: Path) -> None:
    cold(tmp_path / "f", PAGE)
    settings = FileRecordSettings(roots=(str(tmp_path),), method="residency")
    now_s = [0.0]
    code = f"read({str(tmp_path / 'f')!r}, 0); print(flush=True); sys.stdin.read()"
    with Recording(settings) as recording:
        recording.survey()
        with CommandRecording(recording, window_s=10.0, clock=lambda: now_s[0]) as watched:
            process = subprocess.Popen(reader(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            now_s[0] = 10.0
            while watched.ended_by != "window":
                time.sleep(0.01)
            process.communicate()
        assert watched.trace(succeeded=False).trace.starts == 1


# --- other people's files --------------------------------------------------------------------


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that user 65534 reads, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp(prefix="bootseer-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@ROOT
def test_user_65534_without_any_privilege_records_and_replays(open_place: Path) -> None:
    """Nothing to write to but one file, and all files root's: the hardest case of a container."""
    site = everybodys(open_place)
    files, out = open_place / "files", open_place / "out"
    files.mkdir(mode=0o755)
    out.mkdir()
    os.chown(out, 65534, 65534)
    big, small = cold(files / "big", 4 << 20), cold(files / "small", 2 * PAGE)
    untouched = cold(files / "untouched", PAGE)
    code = f"""
import mmap
file = open({str(big)!r}, "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
mapped[0]; mapped[2 << 20]
read({str(small)!r}, 0)
time.sleep(1)
"""
    trace = out / "trace"
    words = ["image", "files", "record", "-f", trace, "--path", files, "--"]
    done = as_nobody(site, [*words, *reader(code, PYTHON)])
    assert done.returncode == 0, done.stderr
    assert "Operation not permitted" in done.stderr  # said why it is not tracefs
    found = filetraces.parse(trace.read_bytes())
    pages = read(found, files)
    assert pages["small"] == [(0, 2)]
    touched = {page for first, count in pages["big"] for page in range(first, first + count)}
    assert {0, (2 << 20) // PAGE} <= touched
    assert len(touched) <= 64  # the kernel maps some around a fault
    assert set(pages) == {"big", "small"}
    assert found.trace.starts == 0
    for path in (big, small, untouched):
        evict(path)
    done = as_nobody(site, ["image", "files", "replay", "-f", trace, "--path", files])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 files, ")
    assert resident(small)
    assert resident(big)
    assert not resident(untouched)


@pytest.mark.parametrize("words", [["record"], ["show"]])
def test_a_trace_file_is_no_address(tmp_path: Path, words: list[str]) -> None:
    """`record` wrote to the store of a URL, without its options; `show` looked for a local file."""
    address = f"file://{tmp_path}/trace"
    more = ["--path", str(tmp_path), "--", "true"] if words == ["record"] else []
    command = [sys.executable, "-m", "bootseer", "image", "files", *words, "-f", address, *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"bootseer: {address} is an address; name a file"
    )
    assert list(tmp_path.iterdir()) == []


# One that holds SIGCHLD back and looks for it later, as who waits for a command does at times.
WAITING = """
import os, signal, sys, time
from bootseer.imageprefetch.filemode.recorder import CommandRecording, FileRecordSettings, Recording
settings = FileRecordSettings(roots=(sys.argv[1],), method=sys.argv[2])
with Recording(settings, os.getpid()) as recording, CommandRecording(recording):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    heard = 0
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGCHLD)
        time.sleep(0.01)
        heard += signal.sigtimedwait({signal.SIGCHLD}, 0) is not None
print(heard)
"""


@pytest.mark.parametrize("method", METHODS)
def test_the_end_of_a_command_is_heard_by_who_waits_for_it(tmp_path: Path, method: Method) -> None:
    words = [sys.executable, "-c", WAITING, tmp_path, method]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout == "20\n"


# --- the parts -------------------------------------------------------------------------------


def test_a_method_that_is_not_to_be_had_is_an_error_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise NotSupportedError("no tracing of the page cache: cannot open tracefs: refused")

    monkeypatch.setattr("bootseer.imageprefetch.filemode.tracefs._open_tracefs", refused)
    with pytest.raises(NotSupportedError, match="refused"):
        Recording(FileRecordSettings(roots=(str(tmp_path),), method="tracefs")).start()
    with Recording(FileRecordSettings(roots=(str(tmp_path),))) as recording:
        assert recording.method == "residency"
        assert "refused" in recording.why


@ROOT
def test_a_tracer_leaves_no_instance_even_after_a_kill(tmp_path: Path) -> None:
    code = """
import os, sys
from bootseer.imageprefetch.filemode import tracefs
tracer = tracefs.Tracer().start()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        dead = f"bootseer-{int(process.stdout.readline())}-"
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
    with Tracer() as tracer:
        folder = os.open("instances", os.O_RDONLY, dir_fd=tracer._root)
        names = os.listdir(folder)
        assert not [name for name in names if name.startswith(dead)]
        ours = f"bootseer-{os.getpid()}-"
        assert [name for name in names if name.startswith(ours)]
        tracer.close()
        assert not [name for name in os.listdir(folder) if name.startswith(ours)]
        os.close(folder)


@ROOT
def test_a_busy_machine_takes_no_memory_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracefs, "MOST_BYTES", 1000)
    file = cold(tmp_path / "file", 64 * PAGE)
    with Tracer() as tracer:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for page in range(64):
            os.pread(fd, 1, page * PAGE)
        os.close(fd)
        tracer.close()
        assert len(tracer.events()) < 64
        assert tracer.lost


def test_of_a_huge_mapping_only_the_beginning_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagemap, "MAX_PAGES", 4)
    file = tmp_path / "file"
    file.write_bytes(bytes(16 * PAGE))
    seen = pagemap.MappedPages()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert not any(pages[page * PAGE] for page in range(16))
        seen.look([os.getpid()], 1.0)
    assert sum(extent.length for extent in seen.pages()[str(file)]) == 4 * PAGE


def test_lines_of_the_kernels_trace() -> None:
    text = b"""\
          cat-17 [000] ..... 24010.450044: mm_filemap_add_to_page_cache: dev 254:3 ino 20a0c5 \
pfn=0x333133 ofs=5242880 order=0
CPU:1 [LOST 12 EVENTS]
 Some Name-9 [001] d..1. 24011.000002: mm_filemap_add_to_page_cache: dev 0:5 ino 1 pfn=0x1 \
ofs=0 order=2
  old kernel-9 [001] d..1. 24012.000000: mm_filemap_add_to_page_cache: dev 0:5 ino ff page=0x1 \
pfn=7 ofs=4096
 x-1 [000] ..... 1.000000: sched_switch: prev_comm=x
"""
    added, lost = parse_lines(text)
    assert added == [
        PageAdded(os.makedev(254, 3), 0x20A0C5, 5242880, 4096, 24010.450044),
        PageAdded(os.makedev(0, 5), 1, 0, 16384, 24011.000002),
        PageAdded(os.makedev(0, 5), 255, 4096, 4096, 24012.0),
    ]
    assert lost == 12


def test_runs_of_pages() -> None:
    assert page_runs(b"", 0) == []
    assert page_runs(b"\0\0", 0) == []
    assert page_runs(b"\1", 8192) == [(8192, 4096)]
    assert page_runs(b"\1\1\0\1\0", 0) == [(0, 8192), (12288, 4096)]


def test_lines_of_a_processs_maps() -> None:
    maps = b"""\
558a5000-558a9000 r--p 00002000 fe:00 1311 /usr/bin/a name with  spaces
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000001000-7f0000002000 rw-p 00000000 00:00 0 [heap]
7f0000002000-7f0000003000 r--p 00000000 fe:00 12 /gone (deleted)
"""
    path = "/usr/bin/a name with  spaces"
    assert list(file_maps(maps)) == [(path, 0x558A5000, 0x558A9000, 0x2000)]


def test_places_are_walked_without_leaving_them(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").touch()
    (tmp_path / "a" / "b" / "g").touch()
    os.mkfifo(tmp_path / "a" / "pipe")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "h").touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "out")
    (tmp_path / "a" / "file").symlink_to(tmp_path / "out" / "h")
    root = str(tmp_path / "a")
    found = {folder: sorted(entry.name for entry in files) for folder, files in folders([root])}
    assert found == {root: ["f"], f"{root}/b": ["g"]}
    assert resolve_roots([root, f"{root}/b", f"{root}/link", f"{root}/none"]) == (
        root,
        str(tmp_path / "out"),
    )
