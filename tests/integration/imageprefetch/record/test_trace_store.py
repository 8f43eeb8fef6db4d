"""Traces kept on a node, to which many processes add."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bootseer.blocks.trace.trace_file import Trace
from bootseer.imageprefetch.record.trace_store import TraceStore

PAGE = 4096

WORKER = """
import sys
from bootseer.blocks.trace.trace_file import Touched, Trace
from bootseer.imageprefetch.record.trace_store import TraceStore
store, number = TraceStore(sys.argv[1]), int(sys.argv[2])
for turn in range(5):
    page = number * 10 + turn
    store.add(Trace("image", 1000 * 4096, "w", 1, (Touched(page * 4096, 4096, 0, 1),)))
"""


def pages(trace: Trace) -> list[int]:
    return [
        page
        for e in trace.extents
        for page in range(e.offset // PAGE, (e.offset + e.length) // PAGE)
    ]


@pytest.mark.slow
def test_no_start_is_lost_when_many_processes_add_at_once(tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(number)])
        for number in range(4)
    ]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    kept = TraceStore(tmp_path).load("w")
    assert kept is not None
    assert kept.starts == 20
    assert sorted(pages(kept)) == sorted(n * 10 + turn for n in range(4) for turn in range(5))
