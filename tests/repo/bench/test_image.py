"""Each side of the image bench does its work; nothing is timed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import harness
from bench.image import benchmark as image
from bench.image import lab as image_lab
from tests.support.paths import ROOT, TESTS
from tools.podman import mounts_below

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.debian("podman")]
WORKER = TESTS / "support/programs/image_bench_worker.py"
BURST_BYTES = 256 << 10  # that a link's queue may have let through before
PROCESS_S = 5e-5  # no process starts and ends in less


def test_every_side_reaches_its_first_work() -> None:
    with tempfile.TemporaryDirectory(prefix="ib-") as folder:  # sockets need a short path
        done = subprocess.run(
            [sys.executable, WORKER, folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert not mounts_below(Path(folder))
    told = json.loads(done.stdout)
    all_bytes_are_counted(told)
    for start in told["starts"].values():
        # Not a bucketful more than the link lets through, and within what the test saw itself.
        sent_s = (start["received_bytes"] - BURST_BYTES) / told["link_bytes_per_s"]
        assert sent_s <= start["seconds"] < start["wall_s"]
        # What ended after the first line is no part of it; ours, and servers', are.
        most_s = start["seconds"] * (os.cpu_count() or 1)
        assert 0.1 * start["waited_cpu_s"] < start["cpu_s"] < 1.1 * most_s
    rates = [rate for values in told["steady"] for rate in values]
    assert len(rates) == 4
    assert sum(told["steady_mb"] / rate for rate in rates) < told["steady_s"]
    assert max(rates) < told["steady_mb"] / PROCESS_S


def all_bytes_are_counted(told: dict[str, Any]) -> None:
    """What came over the link until the first line, by what that side cannot do without."""
    received = {side: start["received_bytes"] for side, start in told["starts"].items()}
    pack, layer = told["pack_bytes"], told["layer_bytes"]
    # A link that just came up says so in a packet or two.
    assert max(received["cold"], received["warm"]) < 1000
    for side in ("podman", "containerd"):
        assert layer < received[side] < 1.1 * layer
    for side in ("stargz", "shown"):  # the shell is nearly all of it
        assert 0.5 * layer < received[side] < 1.1 * layer
    assert pack < 0.5 * layer  # of the file that is read, one period is stored
    for side in ("ours", "with agent", "run", "run with agent"):
        assert 0.9 * pack < received[side] < layer
    for side in ("carried", "random", "no hot set"):
        assert received["ours"] < received[side] < 2 * layer
    # Each block once, not thrice.
    assert 0.9 * pack < received["three"] < 2 * received["no hot set"]


def test_images_are_made_before_the_network_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without them, what is asked first decides whether they can be had at all."""
    asked: list[str] = []

    def made(name: str) -> types.SimpleNamespace:
        asked.append(name)
        return types.SimpleNamespace(source=name)

    @contextlib.contextmanager
    def empty_network() -> Iterator[None]:
        asked.append("network")
        yield

    @contextlib.contextmanager
    def no_lab(*_: object) -> Iterator[None]:
        yield

    def publish(_place: object, _source: str, _works: object, also: object) -> dict[str, int]:
        also(None, Path())  # type: ignore[operator]
        raise RuntimeError("far enough")

    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(image.ours, "compile_modules", lambda: None)
    monkeypatch.setattr(image.real, "image", made)
    monkeypatch.setattr(image.peers, "prepare", lambda _: (asked.append("peers"), None))
    monkeypatch.setattr(image, "own_group", lambda: contextlib.nullcontext("group"))
    monkeypatch.setattr(image, "own_network", empty_network)
    monkeypatch.setattr(image, "lab", no_lab)
    monkeypatch.setattr(image.hotsets, "publish", lambda *_, other: asked.append(other))
    monkeypatch.setattr(image.ours, "publish", publish)
    with pytest.raises(RuntimeError, match="far enough"):
        image.measure(harness.Options(quick=True, runs=1), [])
    assert asked == ["torch", "python", "peers", "network", "python"]


USAGE = "6472634453\n"
STAT = "usage_usec 6472634453\nuser_usec 4500247135\nsystem_usec 1972387318\nnr_periods 0\n"


@pytest.mark.parametrize(("text", "seconds"), [(USAGE, 6.472634453), (STAT, 6472.634453)])
def test_processor_time_is_read_in_both_forms(text: str, seconds: float) -> None:
    assert image_lab.parse_cpu_s(text) == pytest.approx(seconds)


ROOTS = [root for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if os.path.isdir(root)]
BURN = "import time\nwhile time.process_time() < 0.2: pass\n"


@pytest.mark.parametrize("root", ROOTS)
def test_a_group_accounts_for_what_it_starts(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cgroup v1 and v2, as far as this machine has them."""
    monkeypatch.setattr(image_lab, "CONTROLLERS", Path(root))
    with image_lab.own_group() as group:
        before, used = image_lab.cpu_s(group), children_s()
        subprocess.run([sys.executable, "-c", BURN], check=True)
        used = children_s() - used
        assert used >= 0.2
        assert image_lab.cpu_s(group) - before >= 0.9 * used  # counted by ticks, and by clock
        outside = image_lab.cpu_s(group)
        left_out = [*image_lab._uncounted(), sys.executable, "-c", BURN]
        subprocess.run(left_out, check=True)
        assert image_lab.cpu_s(group) - outside < used
    assert not (image_lab._accounts() / group).exists()


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
