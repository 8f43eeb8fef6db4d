"""`bootseer run` as process 1 of a real pid namespace: reaping, signals, container.start."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.support.commands.run import clean_env, named, wrapped

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]
pytestmark = pytest.mark.root


def as_pid_1(tmp_path, script: str) -> subprocess.CompletedProcess:
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path / "events"))
    command = UNSHARE + wrapped("sh", "-c", script)
    return subprocess.run(command, env=env, capture_output=True, timeout=60)


def test_exit_codes_pass(tmp_path):
    assert as_pid_1(tmp_path, "exit 9").returncode == 9
    assert as_pid_1(tmp_path, "kill -TERM $$").returncode == 128 + signal.SIGTERM


def test_orphans_are_reaped(tmp_path):
    script = """
    for i in 1 2 3 4 5; do (sleep 0.05 & exec true); done
    i=0
    while [ $i -lt 200 ]; do
        i=$((i + 1))
        n=$(grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l)
        s=$(grep -l '^Name:.sleep' /proc/[0-9]*/status 2>/dev/null | wc -l)
        [ "$n$s" = 00 ] && { echo clean; exit 0; }
        sleep 0.02
    done
    exit 1
    """
    done = as_pid_1(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, b"clean\n")


def test_signals_reach_the_command_through_process_1(tmp_path):
    """A process 1 without handlers would not even be told; the command must be."""
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path / "events"))
    script = "trap 'echo got; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        UNSHARE + wrapped("sh", "-c", script), stdout=subprocess.PIPE, env=env
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            os.kill(int(file.read().split()[0]), signal.SIGTERM)
        assert process.stdout.readline() == b"got\n"
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_command_ends_though_others_live_on(tmp_path):
    done = as_pid_1(tmp_path, "sleep 300 > /dev/null 2>&1 & exit 4")
    assert done.returncode == 4


def test_the_containers_start_is_a_span_for_process_1_and_a_point_below(tmp_path):
    as_pid_1(tmp_path, "true")
    begin, end = named(tmp_path / "events", "container.start")
    job = named(tmp_path / "events", "job", "begin")[0]
    age_ns = end["time_unix_nano"] - begin["time_unix_nano"]
    assert 0 <= age_ns < 60e9
    assert end["time_unix_nano"] <= job["time_unix_nano"]
    inner = " ".join(wrapped("true"))
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path / "below"))
    script = f"sleep 0.3; {inner}; true"
    subprocess.run([*UNSHARE, "sh", "-c", script], env=env, check=True, timeout=60)
    (point,) = named(tmp_path / "below", "container.start")
    job = named(tmp_path / "below", "job", "begin")[0]
    assert point["event"] == "point"
    assert job["time_unix_nano"] - point["time_unix_nano"] > 0.28e9
