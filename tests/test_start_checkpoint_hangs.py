"""`bootseer start` with a checkpoint whose store answers at first and then hangs, or hardly moves.

Fault injection: a labelled fake of a web server, whole commands, and a plain command that waits.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from web_fakes import FakeServer, Request, head, serve_range

from bootseer.entrypoint import checkpoint_part
from bootseer.stripedfs.pacing import Pace, PacedFetcher

pytestmark = pytest.mark.slow

SIZE_BYTES = 9 << 20
WITHIN_S = 5.0 + 3.0
"""What may pass before the plain command begins: the product's bound, and a busy machine's."""


class Faulty:
    """FAKE: serves one object well for `good` requests, and then as `afterwards` says."""

    def __init__(self, good: int, afterwards: str) -> None:
        self.data, self.good, self.afterwards = os.urandom(SIZE_BYTES), good, afterwards
        self.struck = 0

    def __call__(self, server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if len(server.requests) <= self.good:
            return serve_range(self.data, sock, request)
        self.struck += 1
        if self.afterwards == "drips" and "range" in request.headers:
            start, end = request.span
            span = f"bytes {start}-{end - 1}/{SIZE_BYTES}"
            sock.sendall(head("206 Partial", Content_Length=end - start, Content_Range=span))
            while start < end and not server.ended.wait(1):
                sock.sendall(self.data[start : start + 1])
                start += 1
        else:
            server.ended.wait()
        return False


def start(path: Path, server: FakeServer, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """One whole start; the plain command notes when it began."""
    to = path / "to"
    load = ["sh", "-c", f"date +%s.%N >{path}/plain && mkdir -p {to} && echo plain >{to}/x"]
    values = {"url": f"http://{server.authority}/model.pt", "to": str(to), "load": load, **more}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (path / "bootseer.toml").write_text(f"[checkpoint]\n{lines}", encoding="utf-8")
    job = ["sh", "-c", f"cat {to}/x; ls -A {to}"]
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "start", "--events", path / "events", "--", *job],
        cwd=path,
        env={**os.environ, "XDG_STATE_HOME": str(path / "state")},
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("form", "good", "afterwards"),
    [
        pytest.param("auto", 1, "hangs", marks=pytest.mark.root),
        pytest.param("auto", 5, "hangs", marks=pytest.mark.root),
        pytest.param("auto", 8, "hangs", marks=pytest.mark.root),
        pytest.param("auto", 11, "hangs", marks=pytest.mark.root),
        ("copy", 1, "hangs"),
        ("copy", 4, "hangs"),
        ("copy", 7, "hangs"),
        ("copy", 5, "drips"),
    ],
)
def test_a_store_that_stops_is_left_to_a_plain_command_that_waits(
    tmp_path: Path, form: str, good: int, afterwards: str
) -> None:
    fault = Faulty(good, afterwards)
    with FakeServer(fault) as server:
        began_s = time.time()
        done = start(tmp_path, server, form=form)
    assert fault.struck
    assert done.returncode == 0
    assert done.stdout.startswith(b"plain\n")
    assert b"going on the plain way" in done.stderr
    assert float((tmp_path / "plain").read_text()) - began_s < WITHIN_S
    assert not (tmp_path / "to").is_mount()


def test_a_store_that_is_slow_and_moves_is_not_given_up(tmp_path: Path) -> None:
    """128 KiB a second and connection: longer than one that stands still is waited for."""
    data = os.urandom(SIZE_BYTES)

    def answer(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if "range" not in request.headers:
            return serve_range(data, sock, request)
        start, end = request.span
        span = f"bytes {start}-{end - 1}/{SIZE_BYTES}"
        sock.sendall(head("206 Partial", Content_Length=end - start, Content_Range=span))
        for at in range(start, end, 32 << 10):
            server.ended.wait(0.25)
            sock.sendall(data[at : min(at + (32 << 10), end)])
        return True

    with FakeServer(answer) as server:
        began_s = time.monotonic()
        done = start(tmp_path, server, form="copy")
        assert time.monotonic() - began_s > 1.5 * checkpoint_part.LOOK_S
    assert b"plain way" not in done.stderr
    assert not (tmp_path / "plain").exists()
    assert (tmp_path / "to/model.pt").read_bytes() == data


def test_what_takes_its_time_here_is_not_the_stores_fault() -> None:
    """A copy whose bytes have come and are being written; one that has not begun to fetch."""
    with PacedFetcher() as fetcher:
        pace = Pace(fetcher, 0.0)
        begun = pace.end_s()
        assert pace.end_s() == begun  # it looks for what there is: no progress
        pace.expect(1 << 30)
        assert pace.end_s() > begun
        fetcher.waiting = 1
        waits = pace.end_s()
        assert pace.end_s() == waits


def test_without_a_plain_command_a_store_that_stops_is_waited_for(tmp_path: Path) -> None:
    """It serves again after longer than a start with a plain command waits."""
    data, stopped = os.urandom(SIZE_BYTES), []

    def answer(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if len(server.requests) > 1 and len(stopped) < 2:
            stopped.append(request)
            server.ended.wait(2 * checkpoint_part.LOOK_S)
        return serve_range(data, sock, request)

    with FakeServer(answer) as server:
        done = start(tmp_path, server, form="copy", load=[])
    assert stopped
    assert (tmp_path / "to/model.pt").read_bytes() == data
    assert b"plain way" not in done.stderr
