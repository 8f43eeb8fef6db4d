"""The history: files that survive anything, from events to the report."""

from __future__ import annotations

import dataclasses
import json
import random
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
from tests.support.samples.history_records import (
    EPOCH,
    SECOND,
    names,
    record,
    starts_with,
    write_events,
)

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


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotSupportedError, match=r"bootseer\[history\]"):
        history_store.add(str(tmp_path), record())


# From events to the report


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
