"""What the node's agent takes: memory, and the processor's time while nothing is asked of it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import harness
from tools.machine import remove

LIMIT_S = 30.0


def measure(rounds: int, idle_s: float) -> list[harness.Case]:
    """A new agent each round, with its endpoint and its mounts for pods."""
    memory: list[float] = []
    idle: list[float] = []
    for _ in range(rounds):
        with _agent() as agent:
            processes = [agent, *_children_of(agent)]
            memory.append(sum(map(_own_bytes, processes)) / 2**20)
            before = sum(map(_ticks, processes))
            time.sleep(idle_s)
            ticks = sum(map(_ticks, processes)) - before
            idle.append(100 * ticks / os.sysconf("SC_CLK_TCK") / idle_s)
    cases = harness.cases_of("agent memory", {harness.OURS: memory}, unit="MiB")
    cases += harness.cases_of("agent idle", {harness.OURS: idle}, unit="% of a core")
    return harness.under(f"idle for {idle_s:g} s", cases)


@contextlib.contextmanager
def _agent() -> Iterator[int]:
    """An agent that has answered; its process id."""
    folder = Path(tempfile.mkdtemp(prefix="bs-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["agent", "--runtime", str(folder / "run"), "--cache", str(folder / "cache")]
    command = [sys.executable, "-m", "bootseer", *words, "--pods", "--listen", address]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
    try:
        with subprocess.Popen(command, env=environ) as process:
            try:
                _await_answer(address)
                yield process.pid
            finally:
                process.terminate()
    finally:
        remove(folder)


def _await_answer(address: str) -> None:
    host, _, port = address.partition(":")
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), timeout=LIMIT_S) as link,
        ):
            link.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            if b" 200 " in link.recv(100):
                time.sleep(1.0)  # the process that answered has ended then
                return
        time.sleep(0.1)
    raise RuntimeError("the agent does not answer")


def _children_of(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text(encoding="ascii").split()]


def _own_bytes(process: int) -> int:
    """Memory of a process, with its share of what several have (PSS)."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
