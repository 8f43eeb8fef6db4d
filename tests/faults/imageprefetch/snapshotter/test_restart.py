"""Kills of the snapshotter at any moment, and of the process that mounts for it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.events.writer import NullWriter
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.snapshotter.database import Database
from bootseer.imageprefetch.snapshotter.grpc_server import lock_root
from bootseer.imageprefetch.snapshotter.mount_helper import MountHelper
from bootseer.imageprefetch.snapshotter.types import Kind, StockImage
from bootseer.storage.options import StoreOptions
from tests.support.labs.snapshotter_client import (
    Client,
    DirectoryMounter,
    RefusedError,
    Running,
    remote_labels,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `bootseer snapshotter --plain` over the same directory, again and again."""
    children: list[subprocess.Popen[str]] = []
    program = [sys.executable, "-m", "bootseer", "snapshotter"]
    words = ["--root", str(tmp_path / "root"), "--address", str(tmp_path / "snap.sock"), "--plain"]

    def run() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *program, *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stderr is not None
        assert "listening" in child.stderr.readline()
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


class Workers:
    """Four threads that prepare, commit and remove snapshots without pause."""

    def __init__(self, client: Client) -> None:
        self.there: dict[str, bool | None] = {}  # by name; None: a call on it was not answered
        self.cut_calls = 0
        self._client = client
        self._turns = [0] * 4
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def _work(self, worker: int) -> None:
        while not self._stop.is_set():
            number = self._turns[worker]
            key, name = f"{worker}/{number}", f"{worker}/{number} done"
            try:
                self._client.prepare(key)
                self._client.commit(name, key)
                self.there[name] = True
                if number % 3 == 0:
                    self.there[name] = None
                    self._client.remove(name)
                    self.there[name] = False
            except RefusedError as error:
                if error.code not in ("UNAVAILABLE", "CANCELLED"):
                    raise
                self.cut_calls += 1
            self._turns[worker] += 1

    def wait_turns(self, count: int) -> None:
        """Until each thread has ended so many more turns."""
        goals = [turn + count for turn in self._turns]
        while any(turn < goal for turn, goal in zip(self._turns, goals, strict=True)):
            assert all(thread.is_alive() for thread in self._threads)
            time.sleep(0.005)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_what_was_answered_before_a_kill_is_there_after_it(start: Start, tmp_path: Path) -> None:
    """Four clients work without pause until three kills of the snapshotter have cut calls."""
    child = start()
    client = Client(tmp_path / "snap.sock")
    workers = Workers(client)
    struck = 0
    try:
        for _ in range(60):
            workers.wait_turns(3)
            if struck == 3:
                break
            before = workers.cut_calls
            assert child.poll() is None
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            child = start()
            workers.wait_turns(1)  # now each knows whether its call was cut
            struck += workers.cut_calls > before
    finally:
        workers.stop()
    assert struck == 3, "kills meet no call"
    client.cleanup()
    rows = {info.name: info for info in client.list()}
    assert [
        name for name, is_there in workers.there.items() if is_there is (name not in rows)
    ] == []
    folders = {path.name for path in (tmp_path / "root/snapshots").iterdir()}
    with Database.open(str(tmp_path / "root/state.db")) as state:
        assert state.folders() == folders
        assert len(rows) == len(folders)
    client.close()


def test_a_start_removes_what_a_kill_left_and_mounts_again(tmp_path: Path) -> None:
    mounter = DirectoryMounter(tmp_path / "images")
    image = mounter.add("lazy", [{"a": "1"}])
    first = Running(tmp_path, mounter, NullWriter())
    with pytest.raises(RefusedError):
        first.client.prepare("extract", "", remote_labels("chain", image, 0))
    first.client.prepare("box", "chain")
    first.close()
    (place,) = (tmp_path / "root/images").iterdir()
    assert mounter.answers(str(place))  # containers go on
    mounter.umount(str(place))
    assert not mounter.answers(str(place))
    (tmp_path / "root/snapshots/rubbish/fs").mkdir(parents=True)
    mounter.calls.clear()
    second = Running(tmp_path, mounter, NullWriter())
    try:
        second.wait_restored()
        assert mounter.answers(str(place))
        assert mounter.calls == ["mount reg/lazy:1"]  # no registry was asked what the image is
        assert not (tmp_path / "root/snapshots/rubbish").exists()
        assert second.client.mounts("box")[0].type == "overlay"
    finally:
        second.close()
        mounter.umount(str(place))


def test_a_start_with_everything_away_still_serves(tmp_path: Path) -> None:
    mounter = DirectoryMounter(tmp_path / "images")
    image = mounter.add("lazy", [{"a": "1"}])
    first = Running(tmp_path, mounter, NullWriter())
    with pytest.raises(RefusedError):
        first.client.prepare("extract", "", remote_labels("chain", image, 0))
    first.close()
    (place,) = (tmp_path / "root/images").iterdir()
    mounter.umount(str(place))
    mounter.gone = True
    second = Running(tmp_path, mounter, NullWriter())
    try:
        second.wait_restored()
        assert second.client.names() == ["chain"]
        assert second.client.prepare("other")
        with pytest.raises(RefusedError, match="registry is away") as caught:
            second.client.prepare("box", "chain")
        assert caught.value.code == "UNAVAILABLE"
        assert "box" not in second.client.names()
        mounter.gone = False
        assert second.client.prepare("box", "chain")
    finally:
        second.close()
        mounter.umount(str(place))


def test_what_had_to_be_unpacked_is_not_tried_again(tmp_path: Path) -> None:
    mounter = DirectoryMounter(tmp_path / "images")
    image = mounter.add("lazy", [{"a": "1"}])
    running = Running(tmp_path, mounter, NullWriter())
    try:
        with pytest.raises(RefusedError):
            running.client.prepare("extract", "", remote_labels("chain", image, 0))
        (place,) = (tmp_path / "root/images").iterdir()
        mounter.umount(str(place))
        mounter.broken = True
        mounter.calls.clear()
        for key in ("one", "two"):
            (mount,) = running.client.prepare(key, "chain")
            assert str(tmp_path / "root/trees") in mount.options[-1]
        assert mounter.calls == ["mount reg/lazy:1", "unpack reg/lazy:1 1"]
    finally:
        running.close()


def test_collection_does_not_wait_for_a_registry(tmp_path: Path) -> None:
    """A fault: the registry hangs while an image is being mounted."""
    mounter = DirectoryMounter(tmp_path / "images")
    image = mounter.add("slow", [{"a": "1"}])
    running = Running(tmp_path, mounter, NullWriter())
    mounter.hold_mounts.clear()
    asking = threading.Thread(target=_ask, args=(running.client, image))
    try:
        asking.start()
        while "mount reg/slow:1" not in mounter.calls:
            time.sleep(0.01)
        running.client.cleanup()
        assert running.client.names() == ["chain"]
        assert asking.is_alive()  # the registry hangs still
    finally:
        mounter.hold_mounts.set()
        asking.join()
        for place in (tmp_path / "root/images").iterdir():
            mounter.umount(str(place))
        running.close()


def _ask(client: Client, image: StockImage) -> None:
    with pytest.raises(RefusedError):
        client.prepare("extract", "", remote_labels("chain", image, 0))


def test_one_snapshotter_a_directory(tmp_path: Path) -> None:
    with lock_root(str(tmp_path)), pytest.raises(BusyError, match="another snapshotter"):
        lock_root(str(tmp_path))
    with lock_root(str(tmp_path)):
        pass


def test_a_directory_without_locks_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injected: a file system that has no locks."""

    def refused(_fd: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(BootseerError, match=r"cannot lock .*: No locks available"):
        lock_root(str(tmp_path))


def test_a_directory_that_no_overlay_can_name(tmp_path: Path) -> None:
    mounter = DirectoryMounter(tmp_path)
    with pytest.raises(UsageError, match="commas, colons"):
        Running(tmp_path / "a:b", mounter, NullWriter())
    assert not (tmp_path / "a:b").exists()


def test_a_damaged_state_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptDataError, match=r"state\.db is damaged"):
        Database.open(str(path))


def test_the_state_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    Database.open(str(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UsageError, match="version 99"):
        Database.open(str(path))


def test_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    with Database.open(str(tmp_path / "state.db")) as state:
        state.create(Kind.ACTIVE, "a", "", "f1", {"x": "1"})
        with pytest.raises(UsageError):
            state.update("a", {"x": "2"}, ["labels.x", "parent"])
        assert state.get("a").labels == {"x": "1"}


def test_the_helper_is_started_again_when_it_died(tmp_path: Path) -> None:
    """Nothing listens on port 1: what matters is that the same reason comes back."""
    helper = MountHelper()
    hurried = StoreOptions(retry_s=0.1)
    places = {"cache": str(tmp_path / "cache"), "runtime": str(tmp_path / "run")}
    settings = MountSettings(
        ref="127.0.0.1:1/no:1", directory=str(tmp_path / "tree"), options=hurried, **places
    )
    (tmp_path / "tree").mkdir()
    try:
        pids = []
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
                helper.mount(settings)
            pids.append(helper.server.pid)
            os.kill(helper.server.pid, signal.SIGKILL)
        assert pids[0] != pids[1]
    finally:
        helper.server.close()
        helper.server.close()


def test_it_serves_without_a_standard_error(tmp_path: Path) -> None:
    """Its first line of log ended it."""
    socket = tmp_path / "snap.sock"
    program = [sys.executable, "-m", "bootseer", "snapshotter", "--plain"]
    words = ["--root", str(tmp_path / "root"), "--address", str(socket)]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *program, *words]
    with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *shell]) as child:
        try:
            until(socket.exists)
            client = Client(socket)
            client.prepare("extract", "", {})
            assert client.names() == ["extract"]
            client.close()
            child.terminate()
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()
