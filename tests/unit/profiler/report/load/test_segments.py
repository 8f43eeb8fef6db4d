"""Files read as columns, and by several processes, give what reading event by event gives."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import CorruptDataError
from bootseer.profiler.report.load import load as loading
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.load.segments import Segment, pack_events
from bootseer.profiler.report.load.spans import Loaded
from tests.support.examples import examples
from tests.support.samples.event_files import EventFile

NAMES = ("imports", "deps.install", "deps.install.unpack", "rendezvous", "job", "compile")
SEEDS = st.integers(0, 1 << 30)


def one_writer(rng: random.Random, number: int) -> list[str]:
    """The lines of a writer, now and then with something in them that no sound writer leaves."""
    node, trace = rng.choice("ab"), rng.choice(("1" * 32, "1" * 32, "2" * 32))
    at_s = rng.uniform(0.0, 5.0)
    file = EventFile(node, number, trace=trace, ahead_s=rng.choice((0.0, 0.0, 3.0)))
    for _ in range(rng.randrange(5)):
        begin_s, at_s = at_s, at_s + rng.uniform(0.0, 3.0)
        end_s = rng.choice((at_s, at_s, at_s, None, begin_s - 0.5))
        about = rng.choice(({}, {}, {"bootseer__bytes": 5}))
        within = rng.choice((None, file.last))
        status = rng.choice(("ok", "ok", "error"))
        name, wait = rng.choice(NAMES), rng.random() < 0.3
        file.span(name, begin_s, end_s, wait=wait, status=status, within=within, **about)
        if rng.random() < 0.1:
            file.ahead_s += rng.choice((-2.0, 2.0))
    if rng.random() < 0.7:
        file.point("first_step", at_s)
    lines = file.lines
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        place = rng.randrange(len(lines))
        lines[place:place] = rng.choice(
            (
                [rng.choice(lines)],
                [lines[place][: rng.randrange(len(lines[place]))] + "\n"],
                [lines[place].replace('"mono_nano": ', '"mono_nano": null, "was": ')],
                [lines[place].replace('"v": 1', '"v": 2')],
                [lines[place].replace(file.prefix, "f" * 10)],
                ["[]\n"],
            )
        )
        if rng.random() < 0.5:
            del lines[place + 1 : place + 2]
    return lines


def make(folder: Path, seed: int) -> None:
    """Files of one writer or of several, one after the other or mixed, now and then a copy."""
    rng = random.Random(seed)
    EventFile.count = 0
    folder.mkdir(parents=True)
    kept: list[str] = []
    for number in range(rng.randrange(1, 6)):
        writers = [one_writer(rng, 8 * number + n) for n in range(rng.choice((1, 1, 2, 3)))]
        lines = [line for writer in writers for line in writer]
        if rng.random() < 0.15:
            rng.shuffle(lines)
        if rng.random() < 0.1:
            lines = kept or lines
        kept = lines
        (folder / f"n-{number}-0.jsonl").write_text("".join(lines), encoding="utf-8")


def read(folder: Path) -> Loaded | str:
    try:
        return load([str(folder)])
    except CorruptDataError as error:
        return str(error)


def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with how many segments each block came to; 0: it went event by event."""
    counts: list[int] = []

    def noted(events: list[object], *, whole: bool) -> list[Segment] | None:
        found = pack_events(events, whole=whole)
        counts.append(len(found or ()))
        return found

    monkeypatch.setattr(loading, "pack_events", noted)
    return counts


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEEDS)
def test_columns_give_what_single_events_give(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "events"
    try:
        make(folder, seed)
        by_columns = read(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "pack_events", lambda events, whole: None)
            assert read(folder) == by_columns
    finally:
        shutil.rmtree(folder)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEEDS, st.integers(300, 3000))
def test_files_of_several_blocks(tmp_path: Path, seed: int, block: int) -> None:
    folder = tmp_path / "events"
    try:
        make(folder, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "_FIRST_BYTES", block)
            patch.setattr(loading, "_BLOCK_BYTES", block)
            by_columns = read(folder)
            patch.setattr(loading, "pack_events", lambda events, whole: None)
            assert read(folder) == by_columns
    finally:
        shutil.rmtree(folder)


def test_the_file_of_a_node_is_one_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = taken(monkeypatch)
    ranks = [EventFile("a", n).span("imports", 0, 1 + n).point("first_step", 9) for n in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(line for each in ranks for line in each.lines))
    (start,) = load([str(tmp_path)]).starts
    assert counts == [8]
    assert [(s.identity.rank, s.events, len(s.spans)) for s in start.sources] == [
        (n, 3, 2) for n in range(8)
    ]


def test_a_copy_of_a_columns_file_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = taken(monkeypatch)
    file = EventFile("a", 0).span("imports", 0, 1).point("first_step", 2)
    file.write(tmp_path / "1")
    file.write(tmp_path / "2")
    loaded = load([str(tmp_path)])
    assert counts == [1, 1]  # the second fitted by itself, but not beside the first
    assert [problem.kind for problem in loaded.problems] == ["duplicate-file"]
    assert [source.events for source in loaded.starts[0].sources] == [3]


SCRIPT = """
import os, signal, sys
from bootseer.profiler.report.load import load as loading, readers
folder, deaths, least = sys.argv[1:]
own, received = os.getpid(), []
pack_file, of_pipes = loading._pack_file, readers._receive_files

def packed(path, templates):
    assert os.getpid() != own
    if path.endswith("/n-70-0.jsonl") and deaths != "-":
        os.close(os.open(deaths, os.O_CREAT | os.O_WRONLY | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)
    return pack_file(path, templates)

def noted(chunks, pipes):
    for found in of_pipes(chunks, pipes):
        received.append(found is not None)
        yield found

loading._pack_file, readers._receive_files = packed, noted
readers.LEAST_BYTES = int(least)
os.sched_getaffinity = lambda _: {0, 1}
loaded = loading.load([folder])
print(sum(received))
print(loaded)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no process left")
"""


def by_processes(folder: Path, *, deaths: Path | None = None, least: int = 0) -> list[str]:
    """How many files other processes handed over, what was loaded, and what is left of them."""
    words = [sys.executable, "-c", SCRIPT, str(folder), str(deaths or "-"), str(least)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred files, a quarter of which must be read event by event."""
    folder = tmp_path_factory.mktemp("many")
    rng = random.Random(17)
    EventFile.count = 0
    for number in range(100):
        lines = one_writer(rng, number)
        (folder / f"n-{number}-0.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_several_processes_give_what_one_gives(many: Path) -> None:
    alone, several = by_processes(many, least=1 << 40), by_processes(many)
    assert alone[0] == "0"
    assert 50 < int(several[0]) < 100
    assert several[1:] == alone[1:]
    assert several[-1] == "no process left"


def test_a_killed_reader_costs_nothing_but_time(many: Path, tmp_path: Path) -> None:
    whole = by_processes(many)
    struck = by_processes(many, deaths=tmp_path / "killed")
    assert (tmp_path / "killed").exists()
    assert 0 < int(struck[0]) < int(whole[0])
    assert struck[1:] == whole[1:]
