"""Parts that are forked: what they leave running ends with them, and what fails says why."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.entrypoint import part_process, process_groups
from bootseer.entrypoint.process_groups import ProcessGroup
from bootseer.fuse.serve import daemon
from tests.support.waiting import until

LONG_S = 60.0


def begin(run: Callable[[socket.socket], None]) -> ProcessGroup:
    return process_groups.start_part({}, lambda link: process_groups.fork_group(link, run))


def wait_for_end(group: ProcessGroup) -> int:
    until(group.reap, "the part has ended")
    assert group.wait_status is not None
    return os.waitstatus_to_exitcode(group.wait_status)


def test_what_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: socket.socket) -> None:
        raise ValueError("no such thing")

    with begin(fail) as group:
        assert wait_for_end(group) == 1
    assert "no such thing" in capfd.readouterr().err


def test_a_request_that_cannot_be_served_is_a_fault() -> None:
    message = {"part": "nothing", "action": "run", "request": {}}
    with part_process.fork_part(message, os.environ) as group:
        assert wait_for_end(group) == 0
        assert group.link is not None
        assert b'"fault"' in group.link.recv(65536)


def serve_nothing(noted: Path) -> None:
    """Start a server that never answers, as one does whose store is silent."""

    def serve(_: object) -> None:
        noted.with_suffix(".new").write_text(str(os.getpid()))
        noted.with_suffix(".new").rename(noted)
        time.sleep(LONG_S)

    daemon.start(serve, mountpoint="/nowhere", limit_s=LONG_S)


@pytest.mark.parametrize("how", ["killed", "asked to end", "deaf"])
def test_a_server_that_it_waits_for_ends_with_it(tmp_path: Path, how: str) -> None:
    noted = tmp_path / "server"

    def run(_: socket.socket) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN if how == "deaf" else part_process._end)
        serve_nothing(noted)

    with begin(run) as group:
        until(noted.exists, "the server runs")
        server = int(noted.read_text())
        if how == "killed":
            group.kill()
        else:
            process_groups.end_groups([group], grace_s=1.0 if how == "deaf" else LONG_S)
    until(lambda: not is_running(server), "the server has ended")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
