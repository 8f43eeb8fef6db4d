"""Recordings whose server dies: the next one goes on, and nothing that was recorded is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.trace.recorder import Recorder
from bootseer.blocks.trace.trace_file import Trace
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.record.touch_journal import TouchJournal
from bootseer.imageprefetch.record.trace_store import TraceStore
from tests.support.mounts.images import Mounts, Published, mounts_below, publish, some_files
from tests.support.waiting import until

FILES = some_files(12, 60_000)
EARLY, BEFORE, AFTER, LATE = sorted(FILES)[:4]
PAGE = 4096


def recorder(**options: Any) -> Recorder:
    return Recorder("x", 1000 * PAGE - 7, **options)


def test_a_journal_holds_all_touches_and_one_that_grew(tmp_path: Path) -> None:
    first, journal = recorder(), TouchJournal(str(tmp_path / "touches"))
    journal.create()
    for number in range(6):
        first.touch(number * PAGE, PAGE)  # one touch that grows
        journal.save(first)
    for number in (500, 300, 999):
        first.touch(number * PAGE, PAGE)
    journal.save(first)
    journal.save(first)
    next_ = TouchJournal(str(tmp_path / "touches"))
    touches = next_.resume()
    assert touches is not None
    assert next_.begun_ns == journal.begun_ns
    second = recorder(elapsed_s=next_.elapsed_s)
    second.restore(touches)
    second.touch(0, PAGE)  # it is known
    assert pages(second.trace(full=False)) == pages(first.trace(full=False))
    assert len(second.since(0)) == len(first.since(0))
    second.touch(700 * PAGE, PAGE)
    next_.save(second)
    last = rows_of(tmp_path / "touches", tmp_path / "copy")
    assert last is not None
    assert (700, 1) in {row[:2] for row in last}


def rows_of(path: Path, copy: Path) -> list[tuple[int, int, int]] | None:
    """A journal's rows, from a copy: to resume is to cut off what its server writes meanwhile."""
    copy.write_bytes(path.read_bytes())
    journal = TouchJournal(str(copy))
    try:
        return journal.resume()
    finally:
        journal.remove()


def pages(trace: Trace) -> set[int]:
    return {p for e in trace.extents for p in range(e.offset, e.offset + e.length, PAGE)}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path, cut: int) -> None:
    first, path = recorder(), tmp_path / "touches"
    journal = TouchJournal(str(path))
    journal.create()
    for number in (500, 300):
        first.touch(number * PAGE, PAGE)
    journal.save(first)
    path.write_bytes(path.read_bytes()[:-cut])
    found = TouchJournal(str(path)).resume()
    whole = [row for at, row in enumerate(first.since(0)) if cut <= 20 * (1 - at)]
    assert found == (None if cut > 40 else whole)
    resumed = TouchJournal(str(path))
    if resumed.resume() is not None:
        resumed.save(first)  # rows lie where rows belong, though the last one was torn
        again = rows_of(path, tmp_path / "copy")
        assert again is not None
        assert again[len(whole) :] == first.since(0)


def test_rows_of_nowhere_and_a_journal_of_something_else_do_no_harm(tmp_path: Path) -> None:
    one = recorder()
    one.restore([(998, 50, 3), (5_000, 2, 4), (1 << 63, 1 << 62, 5)])
    assert pages(one.trace(full=False)) == {998 * PAGE, 999 * PAGE}
    path = tmp_path / "touches"
    path.write_bytes(b"x" * 100)
    assert TouchJournal(str(path)).resume() is None
    assert TouchJournal(str(tmp_path / "none")).resume() is None
    nowhere = TouchJournal(str(tmp_path / "no" / "folder"))
    nowhere.create()
    nowhere.save(one)
    nowhere.remove()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("record-on/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"))


def killed_with(mounts: Mounts, image: Published, *paths: str) -> None:
    """Kill the server when its journal has the touches of these files."""
    server = mounts.server()
    wanted = read_pages(image, *paths)

    def touched() -> bool:
        with contextlib.suppress(FileNotFoundError):
            rows = rows_of(Path(server.state, "touches"), mounts.folder / "copy") or []
            return wanted <= {PAGE * p for first, n, _ in rows for p in range(first, first + n)}
        return False

    until(touched)
    before = mounts.worker(server)
    os.kill(before, signal.SIGKILL)

    def another() -> bool:
        with contextlib.suppress(IndexError, OSError):
            return mounts.worker(server) != before
        return False

    until(another)


def read_pages(image: Published, *paths: str) -> set[int]:
    found = set()
    for path in paths:
        start = image.data_offset(path) // PAGE * PAGE
        found |= set(range(start, image.data_offset(path) + len(FILES[path]), PAGE))
    return found


def kept(mounts: Mounts, image: Published) -> Trace | None:
    return TraceStore(ImageCache(str(mounts.cache)).trace_folder(image.digest)).load()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_who_takes_over_records_on(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref, record=True)
    (Path(mounted.directory) / EARLY).read_bytes()
    (Path(mounted.directory) / BEFORE).read_bytes()
    killed_with(mounts, image, EARLY, BEFORE)
    (Path(mounted.directory) / AFTER).read_bytes()
    killed_with(mounts, image, EARLY, BEFORE, AFTER)
    (Path(mounted.directory) / LATE).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    trace = kept(mounts, image)
    assert trace is not None
    assert trace.starts == 0  # what was touched at a death is not known for certain
    assert pages(trace) == read_pages(image, EARLY, BEFORE, AFTER, LATE)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_a_first_step_told_around_the_death_ends_the_recording(
    mounts: Mounts, image: Published, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    mounted = mounts.mount(image.ref, record=True, events_dir=str(events))
    server = mounts.server()
    supervisor = server.supervisor
    (Path(mounted.directory) / EARLY).read_bytes()
    threading.Event().wait(0.5)
    os.kill(supervisor, signal.SIGSTOP)  # nobody takes over yet
    os.kill(mounts.worker(server), signal.SIGKILL)
    now_ns = time.time_ns()
    line = f'{{"v":1,"event":"point","name":"first_step","time_unix_nano":{now_ns}}}\n'
    (events / "rank.jsonl").write_text(line)
    os.kill(supervisor, signal.SIGCONT)
    until(lambda: kept(mounts, image) is not None)
    (Path(mounted.directory) / LATE).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    trace = kept(mounts, image)
    assert trace is not None
    assert pages(trace) == read_pages(image, EARLY)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("docker-registry")
def test_a_recording_that_was_over_does_not_begin_again(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref, record=True, record_window_s=1.0)
    (Path(mounted.directory) / EARLY).read_bytes()
    server = mounts.server()
    until(lambda: not Path(server.state, "touches").exists())
    before = kept(mounts, image)
    assert before is not None
    os.kill(mounts.worker(server), signal.SIGKILL)
    (Path(mounted.directory) / LATE).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    assert kept(mounts, image) == before
