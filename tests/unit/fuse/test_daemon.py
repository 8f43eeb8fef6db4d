"""Waiting for a server that was started in the background."""

from __future__ import annotations

import functools
import gc
import os
import re
import threading
import time
import types
from collections.abc import Iterator

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.fuse.serve import daemon


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    told, tell = os.pipe()
    yield told, tell
    os.close(told)
    os.close(tell)


def received(
    pipe: int, *, limit_s: float, waits_for: str = "the mount at /m", tries: int = 0
) -> daemon.Answer:
    return daemon.receive_answer(pipe, daemon.Wait(waits_for, limit_s, tries), mountpoint="/m")


def test_a_long_wait_is_told(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, tell = pipe
    monkeypatch.setattr(daemon, "REPORT_AFTER_S", 0.05)
    timer = threading.Timer(0.5, daemon.send_answer, (tell, {"mounted": True}))
    timer.start()
    assert received(told, limit_s=60) == {"mounted": True}
    timer.join()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "bootseer: waiting for the mount at /m for 0 s now, and for up to 59 s more"


def test_a_long_wait_names_who_is_asked_and_how_long(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, _ = pipe
    monkeypatch.setattr(daemon, "REPORT_AFTER_S", 0.05)
    monkeypatch.setattr(daemon, "REPORT_EVERY_S", 0.1)
    with pytest.raises(StoreUnavailableError, match="mounting at /m took too long"):
        received(told, limit_s=0.5, waits_for="the registry r:1")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 2
    assert all(line.startswith("bootseer: waiting for the registry r:1 for 0 s") for line in said)


def test_an_answer_at_once_and_a_short_limit_tell_nothing(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    told, tell = pipe
    daemon.send_answer(tell, {"mounted": True})
    assert received(told, limit_s=60) == {"mounted": True}
    with pytest.raises(StoreUnavailableError, match="took too long"):
        received(told, limit_s=0.05)
    assert caplog.records == []


def test_a_server_tells_of_its_tries_before_it_answers(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, tell = pipe
    monkeypatch.setattr(daemon, "REPORT_AFTER_S", 0.2)
    monkeypatch.setattr(daemon, "REPORT_EVERY_S", 0.2)

    def said(words: str) -> None:
        end_s = time.monotonic() + 60
        while not any(words in record.getMessage() for record in caplog.records):
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def served() -> None:
        answer = functools.partial(daemon.send_answer, tell)
        said("(try 1)")
        for tries in (1, 2):
            daemon.send_waiting(answer, f"refused{tries}" + "x" * 9000, tries, 20.5)
        said("(try 3)")
        answer({"mounted": True})

    server = threading.Thread(target=served)
    server.start()
    found = received(told, limit_s=600, waits_for="r:1", tries=1)
    server.join()
    assert found == {"mounted": True}
    first, *_, last = (record.getMessage() for record in caplog.records)
    waited = r"bootseer: waiting for r:1 for \d+ s now, and for up to"
    assert re.fullmatch(rf"{waited} 5\d\d s more \(try 1\)", first)
    assert re.match(rf"{waited} (1?\d|20) s more \(try 3\): refused2x", last)
    assert len(last) < 1000


def test_a_server_that_ends_without_an_answer_is_an_error(pipe: tuple[int, int]) -> None:
    told, tell = pipe
    other = os.dup(tell)
    os.close(tell)
    daemon.send_waiting(functools.partial(daemon.send_answer, other), "refused", 1, 9.0)
    os.close(other)
    with pytest.raises(StoreUnavailableError, match="ended before it served"):
        received(told, limit_s=60)
    os.dup2(told, tell)  # for the fixture to close


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"log_file": "/dev/null"}, "mounting at /m took too long; see /dev/null"),
        ({}, "mounting at /m took too long; give --log-file FILE to see why"),
        ({"unlogged": "give --foreground"}, "mounting at /m took too long; give --foreground"),
    ],
)
def test_a_log_is_named_only_where_there_is_one(given: dict[str, str], said: str) -> None:
    with pytest.raises(StoreUnavailableError) as late:
        daemon.start(lambda _: time.sleep(60), mountpoint="/m", limit_s=0.2, **given)  # type: ignore[arg-type]
    assert str(late.value) == said
    with pytest.raises(StoreUnavailableError) as ended:
        daemon.start(lambda _: os._exit(1), mountpoint="/m", limit_s=60, **given)  # type: ignore[arg-type]
    assert str(ended.value) == f"the server of /m ended before it served; {said.split('; ')[1]}"


def test_what_is_done_meanwhile_is_part_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a fake, which only what is done meanwhile moves on."""
    clock_s = [0.0]

    def meanwhile() -> None:
        clock_s[0] += 100

    monkeypatch.setattr(daemon, "time", types.SimpleNamespace(monotonic=lambda: clock_s[0]))
    with pytest.raises(StoreUnavailableError, match="mounting at /m took too long"):
        daemon.start(lambda _: time.sleep(20), mountpoint="/m", limit_s=60, meanwhile=meanwhile)


def test_an_error_that_is_not_ours_is_told_by_its_class() -> None:
    told = daemon.encode_error(KeyError("x"))
    assert told == {"error": "BootseerError", "text": "mounting failed: KeyError: 'x'"}


class _Hanging:
    """Garbage, by a circle: what lets go of it in another process than its own waits for ever."""

    def __init__(self, let_go: list[int]) -> None:
        self._circle, self._let_go, self._process = self, let_go, os.getpid()

    def __del__(self) -> None:
        self._let_go.append(os.getpid())
        while os.getpid() != self._process:
            time.sleep(60)


def test_a_server_never_lets_go_of_what_its_maker_had() -> None:
    def collect() -> None:
        gc.enable()
        gc.collect()

    def serve(tell: daemon.Send) -> None:
        collect()
        tell({"let_go": let_go})

    let_go: list[int] = []
    gc.disable()
    try:
        _Hanging(let_go)
        assert daemon.start(serve, mountpoint="/m", limit_s=60) == {"let_go": []}
        daemon.run_in_child(collect, 60)
        assert let_go == []
        gc.collect()  # so it was garbage, and of a kind that is collected
        assert let_go == [os.getpid()]
    finally:
        gc.enable()
