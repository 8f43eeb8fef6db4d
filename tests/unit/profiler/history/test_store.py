"""The history: files that survive anything, from events to the report."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from importlib import resources

import jsonschema
import pytest

from bootseer.errors import NotSupportedError
from bootseer.profiler.history import analysis as history_analysis
from bootseer.profiler.history import store as history_store
from bootseer.profiler.history.collect import record_of
from bootseer.profiler.history.model import NodePhase, NodeTime, StartRecord
from bootseer.profiler.report.load.load import load
from tests.support.paths import ROOT
from tests.support.samples.history_records import EPOCH, SECOND, record, starts_with


def bootseer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def names(store) -> list[str]:
    return sorted(n for n in os.listdir(store / "history") if n != ".lock")


# The store


def test_a_record_comes_back_as_it_went_in(tmp_path):
    full = record(declared_kind="restart", attempt=2, places=("pod-1", "pod-2"))
    bare = record(1, start_s=None, held_start_s=None, job_s=None, gpu_count=None, nodes=(),
                  node_phases=(), job="jöb \ud7ff")  # fmt: skip
    assert history_store.add(str(tmp_path), full) == "added"
    assert history_store.add(str(tmp_path), bare) == "added"
    assert history_store.read_all(str(tmp_path)) == ([full, bare], [])


def test_names_that_utf_8_cannot_hold_are_kept_with_a_sign(tmp_path):
    """As found: pyarrow's UnicodeEncodeError."""
    odd = record(places=("pod-\ud800", "pod-2"), nodes=(NodeTime("n\udfff", 1.5),))
    assert history_store.add(str(tmp_path), odd) == "added"
    kept = dataclasses.replace(odd, places=("pod-?", "pod-2"), nodes=(NodeTime("n?", 1.5),))
    assert history_store.read_all(str(tmp_path)) == ([kept], [])


def test_adding_twice_changes_nothing(tmp_path):
    history_store.add(str(tmp_path), record())
    (name,) = names(tmp_path)
    path = tmp_path / "history" / name
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    assert history_store.add(str(tmp_path), record()) == "unchanged"
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert names(tmp_path) == [name]


def test_the_record_that_saw_more_is_kept_whatever_the_order(tmp_path):
    early, late = record(job_s=None, event_count=40), record(event_count=48)
    for number, order in enumerate(((early, late), (late, early))):
        store = str(tmp_path / str(number))
        results = [history_store.add(store, each) for each in order]
        assert results[0] == "added"
        assert results[1] == ("extended" if order[1] is late else "unchanged")
        assert history_store.read_all(store) == ([late], [])


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


def test_adding_again_heals_a_damaged_file(tmp_path):
    history_store.add(str(tmp_path), record())
    (tmp_path / "history" / names(tmp_path)[0]).write_bytes(b"PAR1")
    assert history_store.add(str(tmp_path), record()) == "extended"
    assert history_store.read_all(str(tmp_path)) == ([record()], [])


def test_a_newer_format_is_named_and_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(history_store, "FORMAT_VERSION", 2)
    history_store.add(str(tmp_path), record())
    monkeypatch.undo()
    records, problems = history_store.read_all(str(tmp_path))
    assert records == []
    assert "version 2" in problems[0].reason


def test_a_newer_record_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(history_store, "FORMAT_VERSION", 2)
    history_store.add(str(tmp_path), record())
    monkeypatch.undo()
    (kept,) = (tmp_path / "history" / name for name in names(tmp_path))
    before = kept.read_bytes()
    with pytest.raises(history_store.NewerRecordError, match="version 2"):
        history_store.add(str(tmp_path), record())
    assert kept.read_bytes() == before


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


def test_foreign_parquet_is_named_and_skipped(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "history").mkdir()
    pq.write_table(pa.table({"v": [1], "x": [2]}), tmp_path / "history" / "other.parquet")
    pq.write_table(pa.table({"v": [1, 1]}), tmp_path / "history" / "two.parquet")
    records, problems = history_store.read_all(str(tmp_path))
    assert records == []
    assert len(problems) == 2


def test_a_trace_id_cannot_leave_the_directory(tmp_path):
    store = tmp_path / "deep" / "store"
    hostile = record(trace_id="../../../escaped")
    assert history_store.add(str(store), hostile) == "added"
    assert history_store.add(str(store), hostile) == "unchanged"
    assert len(names(store)) == 1
    assert [p.name for p in tmp_path.rglob("*escaped*")] == []
    assert history_store.read_all(str(store))[0] == [hostile]


ADDER = """
import sys
from bootseer.profiler.history import store as history_store
sys.path.insert(0, sys.argv[2])
from tests.support.samples.history_records import record
for number in range(int(sys.argv[3]), 30):
    history_store.add(sys.argv[1], record(number))
"""


def test_two_processes_may_add_at_once(tmp_path):
    here = str(ROOT)
    processes = [
        subprocess.Popen([sys.executable, "-c", ADDER, str(tmp_path), here, first])
        for first in ("0", "10")
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    records, problems = history_store.read_all(str(tmp_path))
    assert [r.trace_id for r in records] == [record(n).trace_id for n in range(30)]
    assert problems == []
    assert len(names(tmp_path)) == 30


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from bootseer.profiler.history import store as history_store
from tests.support.samples.history_records import record
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(history_store.os, sys.argv[3], die)
history_store.add(sys.argv[1], record())
"""


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_a_killed_writer_leaves_nothing_that_counts(tmp_path, moment):
    here = str(ROOT)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), here, moment], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(".tmp-") for name in names(tmp_path))
    assert history_store.read_all(str(tmp_path)) == ([], [])
    assert history_store.add(str(tmp_path), record()) == "added"
    assert names(tmp_path) == [record().trace_id + ".parquet"]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotSupportedError, match=r"bootseer\[history\]"):
        history_store.add(str(tmp_path), record())


# From events to the report


def write_events(path, trace: str, spans, **resource) -> None:
    """One process: spans are (name, begin s, end s or None), on the epoch above."""
    attributes = {"host.name": "node-0", "bootseer.rank": 0, "bootseer.gpu.count": 8} | resource
    lines = []

    def line(event, name, moment, span_id):
        lines.append(
            json.dumps(
                {
                    "v": 1, "event": event, "trace_id": trace, "span_id": span_id,
                    "parent_span_id": None, "name": name,
                    "time_unix_nano": EPOCH + int(moment * SECOND), "mono_nano": None,
                    "status": "ok", "attributes": attributes if event == "resource" else {},
                }
            )
        )  # fmt: skip

    begins = [begin for _, begin, _ in spans]
    line("resource", "resource", min(begins), f"{os.path.basename(path):>16}"[-16:])
    for number, (name, begin, end) in enumerate(spans):
        span_id = f"{trace[:4]}{number:012x}"
        if name == "first_step":
            line("point", name, begin, span_id)
            continue
        line("begin", name, begin, span_id)
        if end is not None:
            line("end", name, end, span_id)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_record_from_events(tmp_path):
    spans = [("queue", 0, 20), ("job", 20, 500), ("imports", 25, 45), ("first_step", 100, None)]
    write_events(
        tmp_path / "a.jsonl", "ab" * 16, spans,
        **{"bootseer.job_uid": "train", "bootseer.attempt": 1, "k8s.pod.uid": "pod-1",
           "bootseer.start.kind": "restart"},
    )  # fmt: skip
    (start,) = load([str(tmp_path)]).starts
    found = record_of(start)
    assert found == StartRecord(
        trace_id="ab" * 16,
        job="train",
        attempt=1,
        declared_kind="restart",
        places=("pod-1",),
        begin_unix_nano=EPOCH,
        held_unix_nano=EPOCH + 20 * SECOND,
        start_s=100.0,
        held_start_s=80.0,
        job_s=500.0,
        gpu_count=8,
        rank_count=1,
        event_count=found.event_count,
        nodes=(NodeTime("node-0", 20.0),),
        node_phases=(NodePhase("node-0", "imports", 20.0),),
    )


@pytest.mark.parametrize(
    ("spans", "start_s", "job_s"),
    [
        ([("imports", 0, 40), ("first_step", 50, None)], 50.0, None),
        (
            [("imports", 0, 40), ("first_step", 50, None), ("checkpoint.save", 900, 950)],
            50.0,
            950.0,
        ),
        ([("imports", 0, 40)], None, 40.0),
        ([("job", 0, None), ("first_step", 50, None)], 50.0, None),
    ],
)
def test_an_end_that_nobody_saw_is_unknown(tmp_path, spans, start_s, job_s):
    write_events(tmp_path / "a.jsonl", "cd" * 16, spans)
    (start,) = load([str(tmp_path)]).starts
    found = record_of(start)
    assert (found.start_s, found.job_s) == (start_s, job_s)
    assert found.job == "cd" * 16


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


def schema() -> dict:
    text = resources.files("bootseer.profiler.history").joinpath("history.schema.json").read_text()
    return json.loads(text)


def test_the_json_matches_its_schema():
    records = starts_with(random.Random(3), 32, 8, {"n3": 3.0})
    records += [record(20 + n, job=f"j{n}", start_s=None, job_s=None, nodes=()) for n in range(3)]
    report = history_analysis.analyse(records, [history_store.Problem("x.parquet", "cut")])
    assert report.slow_nodes
    jsonschema.Draft202012Validator.check_schema(schema())
    for each in (report, history_analysis.analyse([])):
        document = json.loads(json.dumps(each.to_json(), allow_nan=False))
        jsonschema.validate(document, schema())


def test_every_field_of_the_json_is_described():
    def check(node, path):
        for name, child in node.get("properties", {}).items():
            assert child.get("description") or "$ref" in child, f"{path}.{name}"
            check(child, f"{path}.{name}")
        if "items" in node:
            check(node["items"], path + "[]")

    check(schema(), "$")
    for name, node in schema()["$defs"].items():
        check(node, name)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().job = "x"
