"""Each side of the image bench does its work; nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.podman import mounts_below

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.debian("podman")]
WORKER = Path(__file__).with_name("image_bench_worker.py")


def test_every_side_reaches_its_first_work() -> None:
    with tempfile.TemporaryDirectory(prefix="ib-") as folder:  # sockets need a short path
        done = subprocess.run(
            [sys.executable, WORKER, folder],
            cwd=WORKER.parents[1],
            env={**os.environ, "PYTHONPATH": str(WORKER.parents[1])},
            capture_output=True,
            text=True,
            timeout=600,  # a fresh machine builds the peers first
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert not mounts_below(Path(folder))
    told = json.loads(done.stdout)
    received = told["received"]
    # A link that just came up says so in a packet or two.
    assert max(received["cold"], received["warm"]) < 1000
    assert 0 < received["ours"] < received["podman"]
    assert received["three"] < 2 * received["no hot set"]  # each block once, not thrice
    assert min(received[side] for side in ("containerd", "stargz", "shown", "random")) > 0
    assert all(used > 0 for used in told["cpu"].values())
    assert told["sizes"]["numpy+pyarrow"] > 0
    assert all(rate > 0 for values in told["steady"] for rate in values)
