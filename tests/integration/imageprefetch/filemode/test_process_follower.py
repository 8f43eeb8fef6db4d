"""Recording a start that runs already: what is told afterwards, and what it costs until then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.imageprefetch.filemode import mincore, pagemap, process_follower, rate_limit
from bootseer.imageprefetch.filemode.file_trace import FileTrace
from bootseer.imageprefetch.filemode.process_follower import ProcessFollower
from tests.support.commands.filemode import (
    AS_NOBODY,
    PAGE,
    PYTHON,
    cold,
    everybodys,
    reader,
    resident,
)

pytestmark = pytest.mark.usefixtures("page_cache_stays")


@contextmanager
def reading(path: Path, *pages: int) -> Iterator[int]:
    """A process that has read these pages and lives on; yields its id."""
    code = f"read({str(path)!r}, *{pages!r}); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(reader(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_follower, "may_trace", lambda: False)


def pages_of(trace: FileTrace) -> dict[str, list[tuple[int, int]]]:
    out: dict[str, list[tuple[int, int]]] = {}
    for one in trace.ranges():
        name = os.path.basename(trace.files[one.file].path)
        out.setdefault(name, []).append((one.offset // PAGE, -(-one.length // PAGE)))
    return out


def test_what_came_before_anybody_looked_is_told_as_well(tmp_path: Path) -> None:
    big = cold(tmp_path / "big", 400 * PAGE)
    cold(tmp_path / "untouched", PAGE)
    with reading(big, *range(300)) as pid, ProcessFollower([str(tmp_path)], "", pid) as followed:
        trace = followed.finish(full=True)
    assert pages_of(trace) == {"big": [(0, 300)]}
    assert trace.trace.starts == 1
    assert resident(tmp_path / "untouched") == []


def test_what_was_in_memory_before_is_neither_told_nor_believed(tmp_path: Path) -> None:
    big = cold(tmp_path / "big", 4000 * PAGE)
    big.read_bytes()
    with reading(big, *range(30)) as pid, ProcessFollower([str(tmp_path)], "", pid) as followed:
        trace = followed.finish(full=True)
    assert pages_of(trace) == {}
    assert trace.trace.starts == 0


def test_what_was_replayed_is_left_out_and_lowers_nothing(tmp_path: Path) -> None:
    big = cold(tmp_path / "big", 400 * PAGE)
    with reading(big, *range(300)) as pid, ProcessFollower([str(tmp_path)], "", pid) as followed:
        trace = followed.finish(full=True, replayed={str(big): [(0, 200 * PAGE)]})
    assert pages_of(trace) == {"big": [(200, 100)]}
    assert trace.trace.starts == 0


def test_of_a_lazily_loaded_file_system_the_containers_memory_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injection: its reads are no disk's; the group's growth is given by hand."""
    big = cold(tmp_path / "big", 400 * PAGE)
    monkeypatch.setattr(process_follower, "read_bytes", lambda pids: 0)
    told = {}
    with reading(big, *range(300)) as pid:
        for grown in (300, 10, 4000):
            monkeypatch.setattr(rate_limit, "cache_bytes", lambda: 7_000_000)
            with ProcessFollower([str(tmp_path)], "", pid) as followed:
                more = 7_000_000 + grown * PAGE
                monkeypatch.setattr(rate_limit, "cache_bytes", lambda more=more: more)
                told[grown] = pages_of(followed.finish(full=True))
    # Much more than all files in memory is data that was read, and tells nothing.
    assert told == {300: {"big": [(0, 300)]}, 10: {}, 4000: {}}


def test_files_are_not_looked_at_while_the_start_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = cold(tmp_path / "big", 40 * PAGE)
    looked: list[str] = []

    def look(asker: mincore.ResidencyProbe, path: str) -> mincore.FileState | None:
        looked.append(path)
        return mincore.probe_file(asker, path)

    monkeypatch.setattr(process_follower, "probe_file", look)
    with reading(big, 3) as pid, ProcessFollower([str(tmp_path)], "", pid) as followed:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            followed.sample()
            time.sleep(0.05)
        assert looked == []
        followed.finish(full=True)
    assert looked == [str(big)]


@pytest.mark.root
def test_of_other_peoples_files_openings_are_heard_near_what_the_job_has_mapped(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = Path(f"/tmp/bootseer-{os.getpid()}-{time.monotonic_ns()}")
    try:
        site = everybodys(place)
        files = place / "files"
        files.mkdir(mode=0o755)
        late, big = cold(files / "late", 2 * PAGE), cold(files / "big", 2 << 20)
        code = f"""
import mmap, os, subprocess, sys, time
from bootseer.imageprefetch.filemode.process_follower import ProcessFollower
job = subprocess.Popen([sys.executable, "-c", '''
import mmap, sys, time
big = open({str(big)!r}, "rb")
mapped = mmap.mmap(big.fileno(), 0, prot=mmap.PROT_READ); mapped[5 << 12]
for line in sys.stdin: open({str(late)!r}, "rb").read()
'''], stdin=subprocess.PIPE, text=True)
with ProcessFollower([{str(files)!r}], "", job.pid) as followed:
    until = time.monotonic() + 60
    while {str(late)!r} not in followed._opens.first_s and time.monotonic() < until:
        followed.sample(); time.sleep(.05)
        job.stdin.write("\\n"); job.stdin.flush()
    trace = followed.finish(full=True)
job.communicate()
print(sorted(os.path.basename(f.path) for f in trace.files), trace.trace.starts)
"""
        done = subprocess.run(
            [*AS_NOBODY, PYTHON, "-c", code],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "['big', 'late'] 0\n", done.stderr
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_work_beside_a_start_takes_a_small_part_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's own, on which each step takes a millisecond."""
    done: list[int] = []
    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: len(done) / 1000)

    def steps() -> Iterator[None]:
        for number in range(100_000):
            done.append(number)
            yield

    work = rate_limit.LimitedWork(steps())
    work.go_on(0.5)
    assert 20 <= len(done) <= 21
    before = len(done)
    work.go_on(0.5)  # no more has gone by
    assert before <= len(done) <= before + 1
    work.go_on(1.0)
    assert 40 <= len(done) <= 42


def test_mappings_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("m", "a", "z")]
    for path in names:
        path.write_bytes(bytes(PAGE))
    code = f"""
import mmap, sys
files = [open(path, "rb") for path in {[str(path) for path in names]}]
kept = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
print(flush=True); sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        ranks = pagemap.mapping_order([process.pid])
    finally:
        process.communicate()
    found = sorted((rank, path) for path, rank in ranks.items() if path.startswith(str(tmp_path)))
    assert [path for _, path in found] == [str(path) for path in names]


def test_reading_ahead_goes_on_only_where_a_disk_answers(tmp_path: Path) -> None:
    big = cold(tmp_path / "big", 1 << 20)
    watch = rate_limit.DiskWatch.begin(grace_s=0.0)
    big.read_bytes()
    assert not watch.none_read(1)
    assert not watch.none
    watch = rate_limit.DiskWatch.begin(grace_s=0.0)
    big.read_bytes()  # from memory, as from a file system that is no disk
    assert not watch.none_read(0), "nothing was asked for, however long that took"
    assert watch.none_read(1)
    assert watch.none
    assert not rate_limit.DiskWatch.begin(grace_s=600.0).none_read(1)
