"""The history: what many starts say together, and which nodes are slow again and again."""

from __future__ import annotations

import random
from math import comb

import pytest

from bootseer.profiler.history import analysis as history_analysis
from bootseer.profiler.history import slow_nodes as history_slow
from bootseer.profiler.history.model import NodePhase, NodeTime
from tests.support.samples.history_records import EPOCH, SECOND, record, starts_with


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
    ratio, wall_s = history_analysis.compute_effective_ratio(records)
    assert wall_s == 1000.0
    assert ratio == pytest.approx(500 / 1000)
    unended = [*records, record(2, job_s=None)]
    assert history_analysis.compute_effective_ratio(unended) == (None, None)


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
    kinds = history_analysis.classify_starts(records)
    assert [kinds[r.trace_id] for r in records] == [
        "first", "restart_in_place", "restart", "restart",
        "restart",
        "first", "restart", "restart",
    ]  # fmt: skip
    report = history_analysis.analyse(records)
    by_kind = {row.kind: row for row in report.kinds}
    assert {k: row.starts for k, row in by_kind.items()} == {
        "first": 2, "restart": 5, "restart_in_place": 1, "standby": 0,
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
    assert history_analysis.get_gpu_class(gpus) == name


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
    flags = history_slow.flag_slow_nodes(record(nodes=times))
    assert not any(flags.values())
    assert history_slow.find([record(n, nodes=times) for n in range(50)])[0] == ()
