"""What a server of an image tells of its faults, and who hears of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bootseer import events
from bootseer.errors import CorruptDataError, DeadlineError
from bootseer.imageprefetch.mount import mount_events, server_registry
from bootseer.imageprefetch.mount.mount_events import FaultLog, MountEvents
from bootseer.imageprefetch.run import server_log
from tests.support.commands.run import named
from tests.support.waiting import until


def test_a_long_file_of_faults_is_cut_and_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_events, "_EVERY_S", 0.0)
    path = tmp_path / server_registry.FAULTS
    log = FaultLog.open(str(path))
    log.write("old", "of long ago")
    heard: list[str] = []
    with server_log.follow_faults(str(tmp_path), "a:1", heard.append):
        log.write("first", "x" * 100)
        until(lambda: heard, "the first one")
        written = 0
        while path.stat().st_size >= written:
            written = path.stat().st_size
            log.write("first", "x" * 1000)
        assert written < 2 * mount_events._MOST_BYTES
        log.write("last", "the end")
        until(lambda: len(heard) == 2, "the last one")
    assert heard == [f"a:1: {'x' * 100}", "a:1: the end"]


def test_the_last_words_of_a_server_whose_folder_is_gone_are_heard(tmp_path: Path) -> None:
    log = FaultLog.open(str(tmp_path / server_registry.FAULTS))
    heard: list[str] = []
    with server_log.follow_faults(str(tmp_path), "a:1", heard.append):
        log.write("last", "the end")
        (tmp_path / server_registry.FAULTS).unlink()
    assert heard == ["a:1: the end"]


def test_without_a_folder_nothing_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of an earlier version names none: the file of that name here is somebody's."""
    monkeypatch.chdir(tmp_path)
    log = FaultLog.open(server_registry.FAULTS)
    heard: list[str] = []
    with server_log.follow_faults("", "a:1", heard.append):
        log.write("wrong", "not ours")
    assert heard == []


def test_without_a_thread_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    FaultLog.open(str(tmp_path / server_registry.FAULTS)).write("first", "x")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(RuntimeError, match="new thread"),
        server_log.follow_faults(str(tmp_path), "a:1", print),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_fifo_instead_of_the_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / server_registry.FAULTS)
    heard: list[str] = []
    with server_log.follow_faults(str(tmp_path), "a:1", heard.append):
        pass
    assert heard == []


def test_a_fault_is_in_the_log_before_it_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "events"
    monkeypatch.setenv("BOOTSEER_EVENTS", str(told))
    written: list[int] = []
    faults = FaultLog.open(str(tmp_path / server_registry.FAULTS))

    def say(_: str) -> None:
        written.append(len(named(told, mount_events.FAULT)))

    story = MountEvents("a:1", "", say, faults, events.open_writer(), again_s=0.0)
    story.fault("odd", "what happened")
    assert written == [0]
    assert len(named(told, mount_events.FAULT)) == 1


def test_an_outage_is_told_once_and_the_next_one_again(tmp_path: Path) -> None:
    said: list[str] = []
    faults = FaultLog.open(str(tmp_path / server_registry.FAULTS))

    def failed(story: MountEvents, at: int, error: Exception, came: tuple[int, int]) -> int:
        story.read_failed(at, error, came)
        return len(said)

    late, wrong = DeadlineError("late"), CorruptDataError("wrong")
    story = MountEvents("a:1", "", said.append, faults, events.open_writer(), again_s=0.0)
    assert failed(story, 1, late, (5, 100)) == 1
    assert failed(story, 2, late, (5, 100)) == 1
    assert failed(story, 3, late, (6, 100)) == 1, "what was cached came"
    assert failed(story, 4, late, (6, 120)) == 1, "late bytes came"
    assert failed(story, 5, late, (9, 900)) == 2
    assert failed(story, 6, late, (9, 900)) == 2
    assert failed(story, 7, wrong, (10, 950)) == 3
    assert failed(story, 8, wrong, (20, 990)) == 3, "the same bytes are wrong still"
    said.clear()
    story = MountEvents("a:1", "", said.append, faults, events.open_writer(), again_s=3600.0)
    told = [failed(story, at, late, (at, at)) for at in range(100)]
    assert told == [1] * 100, "a store that comes and goes fills no log"
