"""The bench of fetching still runs, on a small object, untimed."""

from __future__ import annotations

import math
import os

import pytest

from bench import fetch, harness

pytestmark = pytest.mark.slow


def test_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "QUICK_BYTES", 8 << 20)
    cpus = os.sched_getaffinity(0)
    cases = fetch.run(harness.Options(quick=True, runs=1))
    sides = {(case.case, case.side, case.unit) for case in cases}
    for unit in ("GB/s", "CPU s/GB"):
        for side in ("ours", "ours, no check", "raw parallel", "one stream"):
            assert ("range fetch", side, unit) in sides
        for side in ("ours", "ours, no check", "raw parallel"):
            there = ("range fetch, cores apart", side, unit) in sides
            assert there == (len(cpus) > 1)
    for case in cases:
        (value,) = case.values
        assert 0 < value < math.inf, case
    assert os.sched_getaffinity(0) == cpus
