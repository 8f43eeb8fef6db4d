"""Each side of the image bench does its work; nothing is timed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import harness, image
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
    monkeypatch.setattr(image.image_ours, "compile_modules", lambda: None)
    monkeypatch.setattr(image.real, "image", made)
    monkeypatch.setattr(image.image_peers, "prepare", lambda _: (asked.append("peers"), None))
    monkeypatch.setattr(image, "own_group", lambda: contextlib.nullcontext("group"))
    monkeypatch.setattr(image, "own_network", empty_network)
    monkeypatch.setattr(image, "lab", no_lab)
    monkeypatch.setattr(image.image_hotsets, "publish", lambda *_, other: asked.append(other))
    monkeypatch.setattr(image.image_ours, "publish", publish)
    with pytest.raises(RuntimeError, match="far enough"):
        image.measure(harness.Options(quick=True, runs=1), [])
    assert asked == ["torch", "python", "peers", "network", "python"]
