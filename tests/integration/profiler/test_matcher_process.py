"""The matcher process: frames on a pipe, events in a file, bounded whatever the rules are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.profiler.collect.log_rules import engine, matcher_process

pytestmark = pytest.mark.slow

RULES = "[load]\nphase = checkpoint.load\nbegin = loading\nend = loaded\n"
EVIL = "[evil]\nphase = evil\npoint = (a+)+$\n"


def frame(text: bytes, stream: int = 1, at: int = 5) -> bytes:
    return matcher_process.encode_frame(stream, at, at + 1, text)


def start(tmp_path: Path, rules: str) -> subprocess.Popen[bytes]:
    (tmp_path / "r.ini").write_text(rules)
    return subprocess.Popen(
        matcher_process.command([str(tmp_path / "r.ini")], str(tmp_path / "e.jsonl")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "PYTHONSTARTUP": "/nonexistent"},
    )


def events(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] != "resource"]


def match(tmp_path: Path, rules: str, data: bytes) -> list[dict[str, Any]]:
    process = start(tmp_path, rules)
    out, _ = process.communicate(data, timeout=60)
    assert out == b""
    return events(tmp_path)


@given(
    st.lists(st.tuples(st.integers(0, 254), st.integers(0, 2**64 - 1), st.binary(max_size=40))),
    st.integers(1, 50),
)
def test_frames_survive_any_cut(frames: list[tuple[int, int, bytes]], step: int) -> None:
    data = b"".join(matcher_process.encode_frame(s, t, t, payload) for s, t, payload in frames)
    parser = matcher_process.FrameParser()
    got = [one for at in range(0, len(data), step) for one in parser.feed(data[at : at + step])]
    assert got == [(s, t, t, payload) for s, t, payload in frames]


@given(st.binary(max_size=100))
def test_foreign_bytes_give_frames_or_a_frame_error(data: bytes) -> None:
    claimed = int.from_bytes(data[:4], "big")
    if len(data) >= matcher_process._HEADER.size and claimed > matcher_process.FRAME_MAX_BYTES:
        with pytest.raises(matcher_process.FrameError, match=f"claims {claimed}"):
            matcher_process.FrameParser().feed(data)
    else:
        with contextlib.suppress(matcher_process.FrameError):
            matcher_process.FrameParser().feed(data)


def test_an_oversized_frame_is_refused_on_both_sides() -> None:
    with pytest.raises(matcher_process.FrameError, match="at most"):
        matcher_process.encode_frame(1, 0, 0, b"x" * (matcher_process.FRAME_MAX_BYTES + 1))
    with pytest.raises(matcher_process.FrameError, match="claims"):
        matcher_process.FrameParser().feed(b"\xff" * 21)


def test_phases_are_written_with_the_arrival_times(tmp_path: Path) -> None:
    data = frame(b"load", at=100) + frame(b"ing\nx", at=200) + frame(b"loaded\n", 2, 300)
    begin, end = match(tmp_path, RULES, data)
    assert (begin["event"], begin["name"], begin["time_unix_nano"], begin["mono_nano"]) == (
        "begin",
        "checkpoint.load",
        200,
        201,
    )
    assert (end["event"], end["span_id"]) == ("end", begin["span_id"])
    assert end["time_unix_nano"] == 300


def test_the_last_line_counts_without_its_line_end(tmp_path: Path) -> None:
    assert [e["event"] for e in match(tmp_path, RULES, frame(b"loading\nloaded"))] == [
        "begin",
        "end",
    ]


def test_a_catastrophic_pattern_is_bounded_and_named(tmp_path: Path) -> None:
    data = frame(b"a" * 60 + b"!\n") + frame(b"loading\n") + frame(b"a" * 60 + b"!\nloaded\n")
    said, begin, end = match(tmp_path, EVIL + RULES, data)
    assert (said["name"], said["status"]) == ("log_rules", "fallback")
    assert "rule evil" in said["attributes"]["bootseer.reason"]
    assert (begin["event"], end["event"]) == ("begin", "end")


def test_dropped_bytes_are_reported_and_join_no_lines(tmp_path: Path) -> None:
    data = frame(b"load") + matcher_process.encode_dropped(1, 1234) + frame(b"ing\nloading\n")
    begin, said = match(tmp_path, RULES, data)
    assert begin["event"] == "begin"
    assert (said["name"], said["status"]) == ("log_rules", "fallback")
    assert said["attributes"]["bootseer.bytes"] == 1234
    assert len(events(tmp_path)) == 2


def test_output_in_which_no_rule_finds_anything_is_reported(tmp_path: Path) -> None:
    [said] = match(tmp_path, RULES, frame(b"one\ntwo\n"))
    assert (said["name"], said["status"]) == ("log_rules", "fallback")
    assert said["attributes"]["bootseer.reason"] == "no log rule matched any of 2 lines of output"


@pytest.mark.parametrize(
    ("rules", "data", "kind"),
    [
        (RULES, b"\xff" * 100, "FrameError"),
        (RULES, matcher_process._HEADER.pack(1, 255, 0, 0) + b"x", "FrameError"),
        ("[broken\n", b"", "RuleFileError"),
    ],
)
def test_a_fault_becomes_an_event(tmp_path: Path, rules: str, data: bytes, kind: str) -> None:
    [said] = match(tmp_path, rules, data)
    assert (said["name"], said["status"]) == ("log_rules", "fallback")
    assert said["attributes"]["error.type"] == kind


def test_binary_output_is_harmless(tmp_path: Path) -> None:
    junk = bytes(range(256)) * 200
    data = b"".join(frame(junk) for _ in range(20)) + frame(b"\nloading\n")
    assert [event["event"] for event in match(tmp_path, RULES, data)] == ["begin"]


def test_signals_of_the_job_do_not_end_it(tmp_path: Path) -> None:
    process = start(tmp_path, RULES)
    assert process.stdin is not None
    process.stdin.write(frame(b"loading\n"))
    process.stdin.flush()
    while not (tmp_path / "e.jsonl").exists() or not events(tmp_path):
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        process.send_signal(number)
    process.communicate(frame(b"loaded\n"), timeout=60)
    assert process.returncode == 0
    assert [event["event"] for event in events(tmp_path)] == ["begin", "end"]


def test_the_limit_stops_one_search_and_not_the_next() -> None:
    slow, fast = re.compile(r"(a+)+$"), re.compile("a+")
    former = signal.getsignal(signal.SIGVTALRM)
    with matcher_process.SearchLimit(0.02) as limit:
        with pytest.raises(engine.TooSlow):
            limit.search(slow, "a" * 60 + "!")
        assert limit.search(fast, "aaa") is not None
    assert signal.getsignal(signal.SIGVTALRM) == former
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
