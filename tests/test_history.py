"""The history: files that survive anything, and what many starts say together."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from importlib import resources
from math import comb

import jsonschema
import pytest

from bootseer.errors import NoSpaceError, NotSupportedError
from bootseer.profiler.history import analysis as history_analysis
from bootseer.profiler.history import slow as history_slow
from bootseer.profiler.history import store as history_store
from bootseer.profiler.history.collect import record_of
from bootseer.profiler.history.model import NodePhase, NodeTime, StartRecord
from bootseer.profiler.report.load import load

SECOND = 10**9
EPOCH = 1_790_000_000 * SECOND


def record(number: int = 0, **changes) -> StartRecord:
    values = {
        "trace_id": f"{number:032x}",
        "job": "job-a",
        "attempt": None,
        "declared_kind": None,
        "places": (),
        "begin_unix_nano": EPOCH + number * 10_000 * SECOND,
        "held_unix_nano": EPOCH + number * 10_000 * SECOND,
        "start_s": 100.0,
        "held_start_s": 100.0,
        "job_s": 1000.0,
        "gpu_count": 8,
        "rank_count": 8,
        "event_count": 40,
        "nodes": (NodeTime("n0", 60.0), NodeTime("n1", 90.0)),
        "node_phases": (NodePhase("n0", "imports", 60.0), NodePhase("n1", "imports", 90.0)),
    }
    return StartRecord(**(values | changes))


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
from test_history import record
for number in range(int(sys.argv[3]), 30):
    history_store.add(sys.argv[1], record(number))
"""


def test_two_processes_may_add_at_once(tmp_path):
    here = os.path.dirname(__file__)
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
from test_history import record
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(history_store.os, sys.argv[3], die)
history_store.add(sys.argv[1], record())
"""


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_a_killed_writer_leaves_nothing_that_counts(tmp_path, moment):
    here = os.path.dirname(__file__)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), here, moment], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(".tmp-") for name in names(tmp_path))
    assert history_store.read_all(str(tmp_path)) == ([], [])
    assert history_store.add(str(tmp_path), record()) == "added"
    assert names(tmp_path) == [record().trace_id + ".parquet"]


@pytest.mark.root
def test_a_full_disk_is_said_and_leaves_the_rest_whole(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(mount)], check=True)
    try:
        added = 0
        with pytest.raises(NoSpaceError, match="history"):  # noqa: PT012 - which one fails varies
            while added < 100:
                history_store.add(str(mount), record(added))
                added += 1
        records, problems = history_store.read_all(str(mount))
        assert len(records) == added
        assert problems == []
        assert not any(name.startswith(".tmp-") for name in names(mount))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotSupportedError, match=r"bootseer\[history\]"):
        history_store.add(str(tmp_path), record())


# What many starts say


def test_gpu_time_by_hand():
    records = [
        # 8 GPUs: 100 of 1000 s starting, the first 50 s in a queue without GPUs.
        record(0, held_unix_nano=EPOCH + 50 * SECOND, held_start_s=50.0),
        # Unknown ends and unknown GPUs say nothing about shares.
        record(1, job="b", job_s=None),
        record(2, job="c", gpu_count=None),
        # 16 GPUs: 200 of 500 s.
        record(3, job="d", gpu_count=16, start_s=200.0, held_start_s=200.0, job_s=500.0),
    ]
    gpu = history_analysis.analyse(records).gpu_time
    assert (gpu.starts, gpu.left_out) == (2, 2)
    assert gpu.starting_gpu_s == 8 * 50 + 16 * 200
    assert gpu.total_gpu_s == 8 * 950 + 16 * 500
    assert gpu.share == pytest.approx(3600 / 15600)
    assert gpu.effective_ratio == pytest.approx((8 * 900 + 16 * 300) / (8 * 1000 + 16 * 500))


def test_effective_time_counts_gaps_and_starts_that_failed():
    records = [
        record(0, begin_unix_nano=0, start_s=None, held_start_s=None, job_s=300.0),
        record(1, begin_unix_nano=400 * SECOND, start_s=100.0, job_s=600.0),
    ]
    ratio, wall_s = history_analysis.effective(records)
    assert wall_s == 1000.0
    assert ratio == pytest.approx(500 / 1000)
    assert history_analysis.effective([*records, record(2, job_s=None)]) == (None, None)


def test_effective_time_without_gpu_counts_weighs_jobs_alike():
    records = [record(0, gpu_count=None), record(1, job="b", gpu_count=None, start_s=500.0)]
    gpu = history_analysis.analyse(records).gpu_time
    assert gpu.share is None
    assert gpu.effective_ratio == pytest.approx((900 + 500) / 2000)


def test_kinds_as_declared_or_derived():
    records = [
        record(0, places=("pod-1", "pod-2")),
        record(1, places=("pod-2", "pod-1")),
        record(2, places=("pod-3", "pod-2")),
        record(3, places=("pod-3", "pod-2"), declared_kind="restart"),
        record(4, job="other", attempt=3),
        record(5, job="third", attempt=0, declared_kind="first"),
        record(6, job="third", attempt=0, declared_kind="first", places=("x",)),
        record(7, job="third", attempt=0),
    ]
    kinds = history_analysis.kinds_of(records)
    assert [kinds[r.trace_id] for r in records] == [
        "first", "restart_in_place", "restart", "restart",
        "restart",
        "first", "restart", "restart",
    ]  # fmt: skip
    report = history_analysis.analyse(records)
    by_kind = {row.kind: row for row in report.kinds}
    assert {k: row.starts for k, row in by_kind.items()} == {
        "first": 2, "restart": 5, "restart_in_place": 1,
    }  # fmt: skip
    assert by_kind["restart"].cumulated_s == 500.0
    rows = {row.job: row for row in report.job_rows}
    assert (rows["job-a"].starts, rows["job-a"].cumulated_s) == (4, 400.0)
    assert (rows["job-a"].first, rows["job-a"].restart, rows["job-a"].restart_in_place) == (1, 2, 1)
    assert report.starts_per_job.max == 4


@pytest.mark.parametrize(
    ("gpus", "name"),
    [(1, "1-8"), (8, "1-8"), (9, "9-64"), (64, "9-64"), (65, "65-128"), (128, "65-128"),
     (129, ">128"), (100_000, ">128")],
)  # fmt: skip
def test_classes_of_gpu_counts(gpus, name):
    assert history_analysis.class_of(gpus) == name


def test_a_class_compares_nodes_with_the_job():
    nodes = tuple(NodeTime(f"n{i}", s) for i, s in enumerate((20.0, 30.0, 40.0, 90.0)))
    phases = tuple(NodePhase(n.node, "imports", n.own_s) for n in nodes)
    records = [record(n, gpu_count=32, nodes=nodes, node_phases=phases) for n in range(3)]
    records.append(record(9, gpu_count=32, nodes=(NodeTime("alone", 50.0),), node_phases=()))
    row = next(r for r in history_analysis.analyse(records).classes if r.name == "9-64")
    assert row.starts == 4
    assert row.start_s.median == 100.0
    assert row.node_s.median == 35.0
    assert row.slowest_node_s.median == 90.0
    assert row.node_share.median == pytest.approx(0.35)
    # A lone node has nobody to be compared with.
    assert row.max_over_median.count == 3
    assert row.max_over_median.median == pytest.approx(90 / 35)
    assert [(p.phase, p.starts, p.node_s.median) for p in row.phases] == [("imports", 3, 35.0)]


# Nodes slow again and again


def test_the_tail_is_the_binomial_one():
    for trials, p, count in ((5, 0.05, 5), (10, 1 / 8, 4), (12, 0.5, 9), (40, 0.1, 12)):
        by_hand = sum(
            comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(count, trials + 1)
        )
        assert history_slow.upper_tail([p] * trials, count) == pytest.approx(by_hand, rel=1e-12)
    assert history_slow.upper_tail([0.3, 0.5], 0) == 1.0
    assert history_slow.upper_tail([0.3, 0.5], 1) == pytest.approx(1 - 0.7 * 0.5)
    assert history_slow.upper_tail([0.3, 0.5], 3) == 0.0
    # Tails far below what 1 - P(less) could resolve.
    assert history_slow.upper_tail([0.01] * 20, 20) == pytest.approx(1e-40, rel=1e-9)


def starts_with(
    rng: random.Random, nodes: int, starts: int, slow: dict[str, float]
) -> list[StartRecord]:
    """Log-normal noise (sigma 0.2) on every node, some nodes slower by a factor."""
    out = []
    for number in range(starts):
        times = tuple(
            NodeTime(f"n{i}", 60 * rng.lognormvariate(0, 0.2) * slow.get(f"n{i}", 1.0))
            for i in range(nodes)
        )
        phases = tuple(NodePhase(t.node, "imports", t.own_s) for t in times)
        out.append(record(number, nodes=times, node_phases=phases))
    return out


@pytest.mark.parametrize(("nodes", "starts"), [(2, 30), (8, 12), (32, 10), (64, 6), (128, 5)])
def test_noise_names_nobody_beyond_the_level(nodes, starts):
    named = certain = 0
    for seed in range(200):
        found, tested = history_slow.find(starts_with(random.Random(seed), nodes, starts, {}))
        assert tested == nodes
        named += bool(found)
        certain += any(each.p < 1e-3 for each in found)
    # 200 histories at a level of 1 %: 2 expected at most, more than 8 has a chance below 0.03 %.
    assert named <= 8
    assert certain <= 1


@pytest.mark.parametrize(("nodes", "starts"), [(8, 10), (32, 8), (256, 6)])
def test_a_slow_node_is_named_and_alone(nodes, starts):
    for seed in range(20):
        records = starts_with(random.Random(seed), nodes, starts, {"n3": 2.2})
        found, _ = history_slow.find(records)
        assert [each.node for each in found] == ["n3"], f"seed {seed}"
        assert found[0].phase == "imports"
        assert found[0].starts == starts
        assert found[0].slow > found[0].expected
        assert found[0].p < 0.01
        assert 1.7 < found[0].ratio < 2.9


def test_the_p_value_by_hand():
    times = tuple(NodeTime(f"n{i}", 100.0 if i == 3 else 50.0) for i in range(8))
    records = [record(n, nodes=times, node_phases=()) for n in range(6)]
    (found,), tested = history_slow.find(records)
    assert (found.node, found.slow, found.starts, tested) == ("n3", 6, 6, 8)
    assert found.p == pytest.approx(8 * (1 / 8) ** 6)
    assert found.expected == pytest.approx(6 / 8)
    assert (found.excess_s, found.ratio, found.phase) == (50.0, 2.0, None)


def test_four_starts_are_too_few_however_slow():
    slow = {"n3": 10.0}
    assert history_slow.find(starts_with(random.Random(1), 256, 4, slow)) == ((), 0)
    assert [n.node for n in history_slow.find(starts_with(random.Random(1), 256, 5, slow))[0]] == [
        "n3"
    ]


def test_equal_times_make_nobody_slow():
    times = tuple(NodeTime(f"n{i}", 50.0) for i in range(8))
    flags = history_slow.slow_nodes_of(record(nodes=times))
    assert not any(flags.values())
    assert history_slow.find([record(n, nodes=times) for n in range(50)])[0] == ()


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
