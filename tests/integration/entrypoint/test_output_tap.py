"""`run --log-rules`: output copied byte for byte, and rules that never make the job wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bootseer.entrypoint import output_tap
from tests.integration.entrypoint.test_run import probe
from tests.support.commands.run import BOOTSEER, clean_env, lines, named, run, wrapped
from tests.support.waiting import until

pytestmark = pytest.mark.slow

RULES = """
[load]
phase = checkpoint.load
begin = ^loading
end = ^loaded
[first]
phase = first_step
point = step 1\\b
"""


@pytest.fixture
def options(tmp_path):
    rules = tmp_path / "rules.ini"
    rules.write_text(RULES)
    return ("--log-rules", str(rules))


def test_phases_are_found_below_the_job(tmp_path, options):
    script = "echo loading; sleep 0.1; echo loaded >&2; echo step 1; exit 7"
    done = run(wrapped("sh", "-c", script, options=options), tmp_path / "events")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"loading\nstep 1\n", b"loaded\n")
    job = named(tmp_path / "events", "job", "begin")[0]
    begin = named(tmp_path / "events", "checkpoint.load", "begin")[0]
    assert begin["parent_span_id"] == job["span_id"]
    assert begin["trace_id"] == job["trace_id"]
    assert begin["attributes"]["bootseer.source"] == "log"
    assert named(tmp_path / "events", "first_step", "point")
    assert not [e for e in lines(tmp_path / "events") if e["status"] == "fallback"]


def test_bytes_and_streams_stay_apart(tmp_path, options):
    data = os.urandom(3_000_000)
    script = "tee /dev/stderr"
    done = run(wrapped("sh", "-c", script, options=options), tmp_path / "events", input=data)
    assert done.returncode == 0
    assert done.stdout == data
    assert done.stderr == data


def test_two_streams_to_one_place_keep_their_order(tmp_path, options):
    script = "i=0; while [ $i -lt 500 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done"
    done = subprocess.run(
        wrapped("sh", "-c", script, options=options),
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    expected = b"".join(b"out %d\nerr %d\n" % (i, i) for i in range(500))
    assert done.stdout == expected


def test_the_command_inherits_all_but_its_two_streams(tmp_path, options):
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path / "events"))
    kwargs = {"env": env, "cwd": tmp_path, "stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    assert probe([*BOOTSEER, "run", *options, "--"], **kwargs) == probe([], **kwargs)


def test_a_reader_that_leaves_is_felt_by_the_command(tmp_path, options):
    process = subprocess.Popen(
        wrapped("yes", options=options),
        stdout=subprocess.PIPE,
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE


def test_what_others_still_write_arrives_and_the_code_does_not_wait(tmp_path, options):
    go = tmp_path / "go"
    script = f"(while [ ! -e {go} ]; do sleep 0.02; done; echo late) & echo early; exit 5"
    process = subprocess.Popen(
        wrapped("sh", "-c", script, options=options),
        stdout=subprocess.PIPE,
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
    )
    assert process.wait(60) == 5
    go.touch()
    assert process.stdout.read() == b"early\nlate\n"
    process.stdout.close()


def test_commands_that_cannot_run(tmp_path, options):
    assert run(wrapped("no-such", options=options), tmp_path / "events").returncode == 127
    assert run(wrapped("/", options=options), tmp_path / "events").returncode == 126


@pytest.mark.parametrize("rules", ["/no/such/file.ini", "nonsense", "bad.ini"])
def test_rules_that_cannot_be_used_cost_the_job_nothing(tmp_path, rules):
    (tmp_path / "bad.ini").write_text("[x]\nphase = y\nbegin = (\n")
    rules = str(tmp_path / rules) if rules == "bad.ini" else rules
    done = run(wrapped("echo", "x", options=("--log-rules", rules)), tmp_path / "events")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x\n", b"")
    point = named(tmp_path / "events", "log_rules", "point")[0]
    assert point["status"] == "fallback"
    assert point["attributes"]["bootseer.reason"]


def matcher_of(wrapper: int) -> int:
    """The process id of the wrapper's matcher, once it is there."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with open(f"/proc/{wrapper}/task/{wrapper}/children") as file:
            for pid in file.read().split():
                try:
                    with open(f"/proc/{pid}/cmdline", "rb") as words:
                        if b"bootseer.profiler.collect.log_rules.matcher_process" in words.read():
                            return int(pid)
                except OSError:
                    continue
        time.sleep(0.01)
    raise AssertionError("no matcher")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_matcher_that_dies_or_hangs_costs_the_job_nothing(tmp_path, options, fault):
    """The job prints far more than any pipe holds, while its matcher reads nothing."""
    go = tmp_path / "go"
    script = f"echo on; while [ ! -e {go} ]; do sleep 0.02; done; head -c 4000000 /dev/zero; exit 3"
    process = subprocess.Popen(
        wrapped("sh", "-c", script, options=options),
        stdout=subprocess.PIPE,
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
    )
    assert process.stdout.readline() == b"on\n"
    matcher = matcher_of(process.pid)
    os.kill(matcher, fault)
    go.touch()
    assert process.stdout.read() == bytes(4_000_000)
    assert process.wait(60) == 3
    process.stdout.close()
    point = named(tmp_path / "events", "log_rules", "point")[-1]
    assert point["status"] == "fallback"
    if fault == signal.SIGSTOP:
        assert point["attributes"]["bootseer.bytes"] > 1_000_000
        with pytest.raises(ProcessLookupError):
            os.kill(matcher, 0)


def test_closed_streams_stay_closed(tmp_path, options):
    done = subprocess.run(
        wrapped("sh", "-c", "[ ! -e /proc/self/fd/2 ] && echo closed", options=options),
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
        stdout=subprocess.PIPE,
        preexec_fn=lambda: (os.close(2), os.close(0)),
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"closed\n")


WANTING = """
import os, signal, sys, threading
real, calls = {where}, []
def fail(*words, **named):
    calls.append(1)
    if len(calls) != {nth}:
        return real(*words, **named)
    sys.stderr.write("struck\\n")
    raise {error}
{where} = fail
from bootseer.entrypoint import run
code = run.main(sys.argv[1:])
sys.stderr.write(f"left open {{len(os.listdir('/proc/self/fd'))}}\\n")
os._exit(code)
"""


@pytest.mark.parametrize(
    ("where", "nth", "error"),
    [
        ("os.pipe", 1, "OSError(24, 'Too many open files')"),
        ("os.pipe", 3, "OSError(24, 'Too many open files')"),
        ("os.openpty", 1, "FileNotFoundError(2, 'No such file or directory')"),
        ("threading.Thread.start", 1, 'RuntimeError("can\'t start new thread")'),
        ("threading.Thread.start", 2, 'RuntimeError("can\'t start new thread")'),
        ("os.posix_spawnp", 1, "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("os.posix_spawn", 1, "BlockingIOError(11, 'Resource temporarily unavailable')"),
    ],
)
def test_a_job_starts_where_its_output_cannot_be_watched(tmp_path, options, where, nth, error):
    """Injected: no pipe, terminal, thread or process to be had, for the first of its outputs or
    the second, or because of what these hold; it prints more than a pipe holds."""
    outer, inner = os.openpty()
    code = WANTING.format(where=where, nth=nth, error=error)
    script = "head -c 300000 /dev/zero >&2; echo done; exit 3"
    with open(tmp_path / "err", "w+b") as err:
        done = subprocess.Popen(
            [sys.executable, "-c", code, *options, "--", "sh", "-c", script],
            env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
            stdout=inner,
            stderr=err,
        )
        os.close(inner)
        assert done.wait(60) == 3
        err.seek(0)
        written = err.read()
    assert os.read(outer, 100).strip() == b"done"
    os.close(outer)
    assert written.startswith(b"struck\n")
    assert written.count(b"\0") == 300_000
    assert int(written.rsplit(b" ", 1)[1]) <= 5  # 0 to 2, the events, the listing itself
    (point,) = named(tmp_path / "events", "log_rules", "point")
    assert point["status"] == "fallback"
    assert point["attributes"]["bootseer.reason"]
    assert named(tmp_path / "events", "job", "end")[0]["attributes"]["process.exit.code"] == 3


def test_a_copy_that_cannot_be_left_behind_costs_no_exit_code(tmp_path, options):
    """Injected: no process for those who go on writing after the command's end."""
    error = "BlockingIOError(11, 'Resource temporarily unavailable')"
    go, over = tmp_path / "go", tmp_path / "over"
    script = f"(while [ ! -e {go} ]; do sleep 0.02; done; : > {over}) & exit 0"
    code = WANTING.format(where="os.fork", nth=1, error=error)
    try:
        with open(tmp_path / "err", "w+b") as err:
            done = subprocess.run(
                [sys.executable, "-c", code, *options, "--", "sh", "-c", script],
                env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
                stdout=subprocess.DEVNULL,
                stderr=err,
                timeout=60,
            )
            err.seek(0)
            written = err.read()
    finally:
        go.touch()
    until(over.exists)  # this folder is removed with the test
    assert done.returncode == 0
    assert written.startswith(b"struck\n")
    assert named(tmp_path / "events", "job", "end")[0]["attributes"]["process.exit.code"] == 0


def test_rules_that_cannot_be_loaded_cost_the_job_nothing(tmp_path, options):
    """Injected: the module that reads the output cannot be imported."""
    code = (
        "import sys; sys.modules['bootseer.entrypoint.output_tap'] = None;"
        "from bootseer.entrypoint import run; sys.exit(run.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "--", "sh", "-c", "echo x; exit 3"],
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path / "events")),
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"x\n", b"")
    (point,) = named(tmp_path / "events", "log_rules", "point")
    assert "cannot be read" in point["attributes"]["bootseer.reason"]


@pytest.mark.parametrize("error", [PermissionError, ProcessLookupError])
def test_a_command_that_may_not_be_told_of_a_size_goes_on(monkeypatch, error):
    """Injected: a command of another user, or one that ended, when the terminal changes."""
    seen = []

    class Terminal:
        is_terminal = True

        def spawn_actions(self):
            return []

        def resize(self):
            seen.append("resized")

        def close_inner(self): ...

    class Started:
        pid = 1

    def start(command, environ, added, actions, on_signal):
        seen.append(on_signal)
        return Started()

    def refuse(pid, number):
        seen.append(("refused", pid, number))
        raise error

    monkeypatch.setattr(output_tap.job_process, "start", start)
    monkeypatch.setattr(os, "kill", refuse)
    output_tap._start(["x"], {}, {}, [Terminal()])
    assert seen[0](signal.SIGWINCH) is True
    assert seen[1:] == ["resized", ("refused", 1, signal.SIGWINCH)]
