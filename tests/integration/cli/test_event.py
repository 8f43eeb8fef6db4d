"""`bootseer event`: single events from scripts."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from bootseer.cli import event
from bootseer.profiler.report.load.load import load
from bootseer.system import file_lock
from tests.support.commands.run import BOOTSEER, clean_env, lines, named, run, wrapped

EVENT = [*BOOTSEER, "event"]


def test_begin_prints_the_span_that_end_takes(tmp_path):
    begun = run([*EVENT, "begin", "deps.install", "--attr", "n=2", "--wait"], tmp_path)
    span = begun.stdout.decode().strip()
    assert (begun.returncode, begun.stderr, len(span)) == (0, b"", 16)
    ended = run([*EVENT, "end", "deps.install", "--span", span, "--status=error"], tmp_path)
    assert ended.stdout + ended.stderr == b""
    begin, end = named(tmp_path, "deps.install")
    assert begin["span_id"] == end["span_id"] == span
    assert begin["attributes"] == {"bootseer.source": "phase", "n": 2, "bootseer.wait": True}
    assert (begin["status"], end["status"]) == ("ok", "error")


def test_end_by_name_finds_what_the_same_shell_began(tmp_path):
    event = " ".join(EVENT)
    script = f"{event} begin a >/dev/null; {event} end a; {event} point b --status fallback"
    subprocess.run(
        ["sh", "-c", script], env=clean_env(BOOTSEER_EVENTS=str(tmp_path)), check=True, timeout=60
    )
    begin, end = named(tmp_path, "a")
    assert begin["span_id"] == end["span_id"]
    assert named(tmp_path, "b")[0]["status"] == "fallback"
    assert len({e["trace_id"] for e in lines(tmp_path)}) == 1, "one script, one start"


def test_a_name_that_comes_again_is_another_span(tmp_path):
    """Each end by name closes what was begun last, as the help says."""
    event = " ".join(EVENT)
    once = f"{event} begin a >/dev/null; {event} end a\n"
    nested = f"{event} begin a >/dev/null; {once} {event} end a\n"
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path))
    subprocess.run(["sh", "-c", once + once + nested], env=env, check=True, timeout=60)
    (start,) = load([str(tmp_path)]).starts
    assert load([str(tmp_path)]).problems == ()
    spans = sorted((s for source in start.sources for s in source.spans), key=lambda s: s.begin_ns)
    assert len(spans) == 4
    assert spans[2].begin_ns < spans[3].begin_ns < spans[3].end_ns < spans[2].end_ns
    assert not list((tmp_path / ".open").iterdir()), "nothing is open any more"


def test_an_end_by_span_alone_closes_it(tmp_path):
    span = run([*EVENT, "begin", "a"], tmp_path).stdout.decode().strip()
    run([*EVENT, "end", "--span", span], tmp_path)
    assert named(tmp_path, "a", "end"), "its begin tells the name"
    assert not list((tmp_path / ".open").iterdir())
    loaded = load([str(tmp_path)])
    assert loaded.problems == ()
    ((found,),) = (source.spans for start in loaded.starts for source in start.sources)
    assert found.name == "a"
    assert found.end_ns > found.begin_ns


def test_a_span_that_the_script_chose_ends_by_its_name(tmp_path):
    """Only spans of our own choice were recorded: an end by name closed another one, or none."""
    event = " ".join(EVENT)
    begin = f"{event} begin a --span 00000000000000a1 >/dev/null"
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path))
    subprocess.run(["sh", "-c", f"{begin}; {event} end a"], env=env, check=True, timeout=60)
    begin, end = named(tmp_path, "a")
    assert begin["span_id"] == end["span_id"] == "00000000000000a1"


def test_commands_in_the_background_lose_no_span_of_each_other(tmp_path):
    """Each end rewrites the file of open spans, to which another process may append meanwhile."""
    event = " ".join(EVENT)
    script = (
        f'turn() {{ for n in 1 2 3 4; do {event} begin "$1"; {event} end "$1"; done; }}\n'
        "for name in a b c d; do turn $name & done; wait"
    )
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path))
    subprocess.run(
        ["sh", "-c", script], env=env, check=True, timeout=120, stdout=subprocess.DEVNULL
    )
    loaded = load([str(tmp_path)])
    assert loaded.problems == ()
    spans = [span for start in loaded.starts for source in start.sources for span in source.spans]
    assert sorted(span.name for span in spans) == sorted("abcd" * 4)
    assert not list((tmp_path / ".open").iterdir())


def test_without_locks_spans_are_told_apart(tmp_path, monkeypatch, capsys):
    """Fault injected: a file system that has no locks."""

    def refused(_descriptor, **_how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_lock, "lock", refused)
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path))
    for words in (["begin", "a"], ["begin", "a"], ["end", "a"], ["end", "a"]):
        assert event.main(words) == 0
    inner, outer = reversed(capsys.readouterr().out.split())
    assert inner != outer
    assert [each["span_id"] for each in named(tmp_path, "a", "end")] == [inner, outer]
    assert not list((tmp_path / ".open").iterdir())


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_no_event(tmp_path, closing):
    words = ["sh", "-c", f'"$@" {closing}', "sh", *EVENT]
    begun = run([*words, "begin", "a", "--span", "00000000000000a1"], tmp_path)
    ended = run([*words, "end", "a", "--span", "00000000000000a1"], tmp_path)
    assert (begun.returncode, ended.returncode) == (0, 0)
    assert len(named(tmp_path, "a")) == 2
    assert run([*words, "--help"]).returncode == 0
    assert run([*words, "nosuch"]).returncode == 2


def test_events_inside_a_run_belong_to_it(tmp_path):
    run(wrapped(*EVENT, "point", "first_step", options=("--phase", "train")), tmp_path)
    train, point = named(tmp_path, "train", "begin")[0], named(tmp_path, "first_step")[0]
    assert point["parent_span_id"] == train["span_id"]
    assert point["trace_id"] == train["trace_id"]


def test_options_from_the_environment(tmp_path):
    env = clean_env(
        BOOTSEER_EVENT_ATTR="a=1", BOOTSEER_EVENT_STATUS="error", BOOTSEER_EVENT_WAIT="1"
    )
    run([*EVENT, "point", "x"], tmp_path, env=env)
    point = named(tmp_path, "x")[0]
    assert point["status"] == "error"
    assert point["attributes"] == {"bootseer.source": "phase", "a": 1, "bootseer.wait": True}


@pytest.mark.parametrize("place", [None, "file/below"])
def test_without_a_place_it_is_silent(tmp_path, place):
    (tmp_path / "file").write_text("")
    for words in (["begin", "a"], ["end", "a"], ["point", "a"]):
        done = run([*EVENT, *words], None if place is None else tmp_path / place)
        assert (done.returncode, done.stderr) == (0, b"")
        assert len(done.stdout.split()) == (words[0] == "begin"), "an id to give to `end --span`"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["start", "x"],
        ["begin"],
        ["point"],
        ["end"],
        ["begin", "a", "b"],
        ["end", "--span", "xyz"],
        ["point", "a", "--status", "good"],
        ["point", "a", "--attr", "x"],
        ["point", "a", "--nonsense"],
        ["point", "a", "--attr"],
    ],
)
def test_wrong_usage_is_one_line_and_code_2(tmp_path, words):
    done = run([*EVENT, *words], tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"bootseer: event: ")
    assert done.stderr.count(b"\n") == 1


def test_help_is_the_same_by_both_ways():
    text = run([*EVENT, "--help"]).stdout
    assert b"BOOTSEER_EVENT_SPAN" in text
    code = "import bootseer.cli.event as e; print(e.command.get_help(None))"
    assert run([BOOTSEER[0], "-c", code]).stdout == text
