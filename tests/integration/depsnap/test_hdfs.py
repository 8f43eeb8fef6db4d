"""Dependency snapshots in a store elsewhere: a real HDFS, by WebHDFS and by its own protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BOOTSEER = [sys.executable, "-m", "bootseer"]
INSTALL = "mkdir -p site && head -c 3000000 /dev/urandom > site/big && echo x > site/y && echo ran"


class Node:
    """A working directory with its own cache, and the store that it shares."""

    def __init__(self, path: Path, store: str) -> None:
        self.path, self.store = path, store
        path.mkdir()

    def bootseer(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "XDG_CACHE_HOME": str(self.path / "cache")}
        return subprocess.run(
            [*BOOTSEER, *words],
            cwd=self.path,
            env=environ,
            capture_output=True,
            text=True,
            check=check,
        )

    def run(self, *, publish: str = "inline", timeout_s: int = 60) -> str:
        site = ["--also", str(self.path / "site"), "--publish", publish]
        store = ["--store", self.store, "--store-timeout", str(timeout_s)]
        command = ["deps", "run", *store, *site, "--", "sh", "-c", INSTALL]
        return self.bootseer(*command).stdout

    def listed(self) -> list[dict[str, Any]]:
        done = self.bootseer("deps", "ls", "--store", self.store, "--json")
        return list(json.loads(done.stdout))


@pytest.fixture(params=["webhdfs", "hdfs"])
def store(request: pytest.FixtureRequest, hdfs: Any, hdfs_folder: str) -> str:
    url = hdfs.webhdfs_url if request.param == "webhdfs" else hdfs.hdfs_url
    return f"{url}{hdfs_folder}/snapshots"


def test_what_one_node_installed_another_start_restores(tmp_path: Path, store: str) -> None:
    node = Node(tmp_path / "node", store)
    assert node.run() == "ran\n"
    data = (node.path / "site/big").read_bytes()
    for path in (node.path / "site").iterdir():
        path.unlink()
    (node.path / "site").rmdir()
    assert node.run() == ""
    assert (node.path / "site/big").read_bytes() == data
    (row,) = node.listed()
    assert node.bootseer("deps", "verify", "--store", store).stdout.strip().endswith("good")
    shown = node.bootseer("deps", "inspect", "--store", store, "--json", row["key"]).stdout
    assert json.loads(shown)["archive"]["raw_bytes"] >= 3_000_000
    assert not list((node.path / "cache").rglob("fetched/*"))


def test_a_background_publication_outlives_the_start(tmp_path: Path, store: str) -> None:
    node = Node(tmp_path / "node", store)
    assert node.run(publish="background") == "ran\n"
    until = time.monotonic() + 60
    while not node.listed() and time.monotonic() < until:
        time.sleep(0.2)
    assert len(node.listed()) == 1


# Stops at the step where an archive is about to be fetched, until a line comes in.
WAITING = """
import json, os, sys
from bootseer.depsnap import run
from bootseer.depsnap.settings import DepsSettings
from bootseer.events.writer import NullWriter
ask = json.loads(sys.argv[1])
command = ask.pop("command")
def step(name):
    if name == "restore":
        print(name, flush=True)
        sys.stdin.readline()
settings = DepsSettings(
    environ=dict(os.environ), cwd=os.getcwd(), on_step=step, publish="inline", **ask
)
outcome = run.execute(settings, command, NullWriter())
print(json.dumps([outcome.result, outcome.code, outcome.reasons]))
sys.stdout.flush()
os._exit(0)
"""


def test_datanodes_that_hang_while_an_archive_is_fetched(tmp_path: Path, own_hdfs: Any) -> None:
    """The plain way is gone after the store's time limit, and the report says why."""
    cluster = own_hdfs(datanodes=1)
    node = Node(tmp_path / "node", f"{cluster.webhdfs_url}/snapshots")
    assert node.run() == "ran\n"
    before = (node.path / "site/big").read_bytes()
    for path in (node.path / "site").iterdir():
        path.unlink()
    (node.path / "site").rmdir()
    ask = {"store": node.store, "cache": str(node.path / "cache/bootseer")}
    ask |= {"also": [str(node.path / "site")], "command": ["sh", "-c", INSTALL]}
    ask |= {"store_timeout_s": 5.0}
    start = subprocess.Popen(
        [sys.executable, "-c", WAITING, json.dumps(ask)],
        cwd=node.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert start.stdout is not None
    assert start.stdout.readline() == "restore\n"
    cluster.pause_datanode(0)
    try:
        out, _ = start.communicate("\n", timeout=120)
    finally:
        cluster.resume_datanode(0)
    *said, last = out.splitlines()
    assert said == ["ran"]
    result, code, reasons = json.loads(last)
    assert (result, code) == ("installed", 0)
    assert "the store gave 0 of 3 MB, and nothing for the last" in reasons[0]
    assert (node.path / "site/big").read_bytes() != before
    assert not list((node.path / "cache").rglob("fetched/*"))


def test_a_store_that_is_away_is_no_fault_of_the_install(tmp_path: Path) -> None:
    for url in ("webhdfs://127.0.0.1:1/x", "hdfs://127.0.0.1:1/x"):
        node = Node(tmp_path / url[:4], url)
        assert node.run(timeout_s=4) == "ran\n"
