"""Reads that wait: answered from another thread, given up when the reader is killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.fuse.operations import Data
from tests.support.mounts.fuse import in_time, mounted, python
from tests.support.trees.memory import SlowTree, Waiting, pattern

pytestmark = pytest.mark.root

MIB = 1 << 20
CONTENT = pattern(MIB + 100)
READER = """
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"signal\\n"))
fd = os.open(sys.argv[1], os.O_RDONLY)
os.write(1, b"open\\n")
data = os.read(fd, 4096)
os.write(1, b"%d\\n" % len(data))
"""


@pytest.fixture
def tree() -> SlowTree:
    return SlowTree({"f": CONTENT, "g": b"g" * 100})


@pytest.fixture
def where(tree: SlowTree, tmp_path: Path) -> Iterator[Path]:
    with mounted(tree, tmp_path / "m") as (directory, faults):
        yield directory
    assert faults == []


@pytest.fixture
def reader(where: Path) -> Iterator[subprocess.Popen[str]]:
    with python(READER, where / "f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what must come; the test's own time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def read_some(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data: bytes = in_time(lambda: file.read(100))
    return data


def answer_all(tree: SlowTree) -> None:
    """Answer every read until None comes; runs in a thread."""
    for waiting in iter(tree.waiting.get, None):
        waiting.answer()


def test_a_parked_read_gets_its_bytes_from_another_thread(tree: SlowTree, where: Path) -> None:
    threading.Thread(target=answer_all, args=(tree,), daemon=True).start()
    assert in_time((where / "f").read_bytes) == CONTENT
    tree.waiting.put(None)  # type: ignore[arg-type]


def test_many_waiting_readers_keep_nobody_else_waiting(tree: SlowTree, where: Path) -> None:
    readers = [python(READER, where / "f") for _ in range(12)]
    try:
        waiting = [tree.waiting.get(timeout=60) for _ in readers]
        assert sorted(in_time(lambda: os.listdir(where))) == ["f", "g"]
        assert in_time((where / "g").stat).st_size == 100
        for one in reversed(waiting):
            one.answer()
        for process in readers:
            assert process.communicate(timeout=60)[0] == "open\n4096\n"
    finally:
        for process in readers:
            process.kill()
            process.wait()


def test_a_signal_that_the_reader_survives_does_not_cut_its_read(
    tree: SlowTree, reader: subprocess.Popen[str]
) -> None:
    waiting = tree.waiting.get(timeout=60)
    assert reader.stdout is not None
    reader.send_signal(signal.SIGUSR1)
    time.sleep(0.5)  # let the signal's news come and be looked at
    assert not waiting.reply.interrupted
    waiting.answer()
    # The handler runs once the read has returned, whole.
    assert sorted([reader.stdout.readline(), reader.stdout.readline()]) == ["4096\n", "signal\n"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_reader_ends_and_its_bytes_are_dropped(
    tree: SlowTree, where: Path, reader: subprocess.Popen[str], number: signal.Signals
) -> None:
    waiting = tree.waiting.get(timeout=60)
    reader.send_signal(number)
    assert reader.wait(60) == -number
    eventually(lambda: waiting.reply.interrupted)
    released = threading.Event()
    waiting.answer(release=released.set)
    assert released.is_set()
    waiting.reply.error(errno.EIO)  # a second answer is nobody's
    assert in_time(lambda: sorted(os.listdir(where))) == ["f", "g"]


def test_a_reader_killed_after_another_signal_ends_too(
    tree: SlowTree, reader: subprocess.Popen[str]
) -> None:
    """The kernel announces the first signal only."""
    waiting = tree.waiting.get(timeout=60)
    reader.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    reader.kill()
    assert reader.wait(60) == -signal.SIGKILL
    eventually(lambda: waiting.reply.interrupted)


def test_an_errno_from_another_thread(tree: SlowTree, where: Path) -> None:
    def refuse() -> None:
        tree.waiting.get(timeout=60).reply.error(errno.ESTALE)

    threading.Thread(target=refuse, daemon=True).start()
    with pytest.raises(OSError, match="Stale"):
        read_some(where / "f")


def test_only_the_first_answer_counts(tree: SlowTree, where: Path) -> None:
    def answer_twice() -> None:
        waiting = tree.waiting.get(timeout=60)
        waiting.answer()
        waiting.reply.data(Data((b"wrong",)))
        waiting.reply.error(errno.EIO)

    threading.Thread(target=answer_twice, daemon=True).start()
    assert read_some(where / "f") == CONTENT[:100]


class Refusing(SlowTree):
    """Fault injection: takes the reply, then fails."""

    def read(self, *args: object) -> None:
        super().read(*args)  # type: ignore[arg-type]
        raise RuntimeError("after taking the reply")


def test_a_failure_after_taking_the_reply_is_one_answer(tmp_path: Path) -> None:
    tree = Refusing({"f": CONTENT})
    with mounted(tree, tmp_path / "m") as (where, faults):
        with pytest.raises(OSError, match="Input/output error"):
            read_some(where / "f")
        late: Waiting = tree.waiting.get()
        late.answer()
    assert len(faults) == 1


def test_unmounting_with_waiting_readers_frees_them(tmp_path: Path) -> None:
    tree = SlowTree({"f": CONTENT})
    with mounted(tree, tmp_path / "m", unmount_grace_s=0.2) as (where, _):
        process = python(READER, where / "f")
        waiting = tree.waiting.get(timeout=60)
    try:
        assert process.wait(60) == 1  # a traceback: the read failed
        waiting.answer()
    finally:
        process.kill()
        process.communicate()
