"""The history as commands: what they add, report, leave out and refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from bootseer.profiler.history import store as history_store
from tests.support.samples.history_records import names, record, write_events


def bootseer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "directory"])
def test_a_damaged_file_is_named_and_skipped(tmp_path, damage):
    for number in (1, 2):
        history_store.add(str(tmp_path), record(number))
    bad = tmp_path / "history" / f"{1:032x}.parquet"
    data = bytearray(bad.read_bytes())
    if damage == "truncated":
        bad.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[-20] ^= 0xFF
        bad.write_bytes(data)
    elif damage == "empty":
        bad.write_bytes(b"")
    elif damage == "text":
        bad.write_text("hello")
    else:
        bad.unlink()
        bad.mkdir()
    records, problems = history_store.read_all(str(tmp_path))
    assert records == [record(2)]
    assert [p.path for p in problems] == [str(bad)]
    assert problems[0].reason
    result = bootseer("history", "report", "--store", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Files left out (1)" in result.stdout


def test_a_newer_record_keeps_no_other_start_out(tmp_path, monkeypatch):
    events, trace = tmp_path / "events", f"{1:032x}"
    events.mkdir()
    for number in range(3):
        write_events(events / f"n-{number}-0.jsonl", f"{number + 1:032x}", [("job", 0, 10)])
    monkeypatch.setattr(history_store, "FORMAT_VERSION", 2)
    history_store.add(str(tmp_path), dataclasses.replace(record(), trace_id=trace))
    monkeypatch.undo()
    done = bootseer("history", "add", str(events), "--store", str(tmp_path))
    assert (done.returncode, len(done.stdout.splitlines())) == (7, 2)
    assert trace in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"start_s": "soon"},
        {"begin_unix_nano": "soon"},
        {"event_count": "40"},
        {"rank_count": None},
        {"job": 7},
        {"gpu_count": "8"},
        {"nodes": [{"node": "a", "own_s": None}]},
        {"node_phases": [{"node": "a", "phase": "p", "own_s": "1"}]},
    ],
)
def test_columns_of_another_type_are_named_and_skipped(tmp_path, change):
    import pyarrow as pa
    import pyarrow.parquet as pq

    history_store.add(str(tmp_path), record())
    (path,) = (tmp_path / "history" / name for name in names(tmp_path))
    (row,) = pq.ParquetFile(path).read().to_pylist()
    pq.write_table(pa.Table.from_pylist([row | change]), path)
    records, problems = history_store.read_all(str(tmp_path))
    assert (records, [p.path for p in problems]) == ([], [str(path)])
    assert "columns do not match the format" in problems[0].reason
    assert bootseer("history", "report", "--store", str(tmp_path)).returncode == 0


def test_the_command_adds_and_reports(tmp_path):
    events, store = tmp_path / "events", tmp_path / "store"
    events.mkdir()
    spans = [("job", 0, 1000), ("imports", 5, 45), ("first_step", 100, None)]
    for number in range(3):
        write_events(events / f"n-{number}-0.jsonl", f"{number + 1:032x}", spans,
                     **{"bootseer.job_uid": f"job-{number}"})  # fmt: skip
    first = bootseer("history", "add", str(events), "--store", str(store))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.count(" added\n") == 3
    again = bootseer("history", "add", "--json", BOOTSEER_STORE=str(store),
                     BOOTSEER_EVENTS=str(events))  # fmt: skip
    assert {each["result"] for each in json.loads(again.stdout)["starts"]} == {"unchanged"}
    said = bootseer("history", "report", "--store", str(store), COLUMNS="80")
    assert said.returncode == 0, said.stderr
    assert "3 starts of 3 jobs" in said.stdout
    assert "Share of GPU time spent starting: 10%" in said.stdout
    assert "Effective training time ratio: 90%" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    report = json.loads(bootseer("history", "report", "--store", str(store), "--json").stdout)
    assert report["gpu_time"]["share"] == pytest.approx(0.1)
    nothing = bootseer("history", "report", "--store", str(store), "--since", "2200-01-01",
                       "--json")  # fmt: skip
    assert json.loads(nothing.stdout)["starts"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("report", "--store", "/nonexistent"), 3, "/nonexistent"),
        (("report", "--since", "yesterday"), 2, "yesterday"),
        (("add", "/nonexistent"), 3, "/nonexistent"),
    ],
)
def test_errors_are_one_line_with_their_code(arguments, code, words):
    result = bootseer("history", *arguments)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith("bootseer: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_an_empty_history_says_how_to_fill_it(tmp_path):
    result = bootseer("history", "report", "--store", str(tmp_path))
    assert result.returncode == 0
    assert "bootseer history add" in result.stdout
