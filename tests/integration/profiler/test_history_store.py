"""A history to which two processes add at once."""

from __future__ import annotations

import subprocess
import sys

from bootseer.profiler.history import store as history_store
from tests.support.paths import ROOT
from tests.support.samples.history_records import names, record

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
