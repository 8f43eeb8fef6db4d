"""`bootseer import`: the whole way from files to events, and its one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer import events
from tests.support.paths import DATA

RULES = (
    "[DEFAULT]\ntime = ^(\\d+\\.\\d+)\ntime_format = unix\n"
    "[load]\nphase = checkpoint.load\nbegin = loading\nend = loaded\n"
)


def bootseer(
    tmp_path: Path, *words: str, data: bytes = b"", **environ: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "import", *words],
        input=data,
        capture_output=True,
        env={"PATH": os.environ["PATH"], "BOOTSEER_EVENTS": str(tmp_path / "ev"), **environ},
        timeout=120,
    )


def written(tmp_path: Path) -> list[list[dict[str, Any]]]:
    files = sorted((tmp_path / "ev").glob("*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def test_k8s_writes_a_file_a_pod_and_joins_the_jobs_trace(tmp_path: Path) -> None:
    done = bootseer(tmp_path, "k8s", str(DATA / "k8s_pods_events.json"), "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    summary = json.loads(done.stdout)
    assert len(summary["pods"]) == 10
    files = written(tmp_path)
    assert len(files) == 10
    uid = "ce84d9b3-7fec-4f81-ae63-de64889c28c0"
    own = events.trace_from_environment({"BOOTSEER_JOB_UID": uid})[0]
    jobs = [file for file in files if file[0]["attributes"]["bootseer.job_uid"] == uid]
    assert [file[0]["trace_id"] for file in jobs] == [own, own]
    for file in files:
        assert file[0]["event"] == "resource"
        assert all(event["mono_nano"] is None for event in file[1:])
        marker = file[-1]
        assert marker["name"] == "import.k8s"
        assert "queue" in marker["attributes"]["bootseer.not_observed"]
        assert "queue" not in {event["name"] for event in file}
        begun = [event["span_id"] for event in file if event["event"] == "begin"]
        ended = [event["span_id"] for event in file if event["event"] == "end"]
        assert sorted(begun) == sorted(ended)


def test_k8s_takes_a_job_uid_and_standard_input(tmp_path: Path) -> None:
    data = (DATA / "k8s_pods_events.json").read_bytes()
    done = bootseer(tmp_path, "k8s", "-", "--job-uid", "mine", data=data)
    assert done.returncode == 0
    trace = events.trace_from_environment({"BOOTSEER_JOB_UID": "mine"})[0]
    assert {file[0]["trace_id"] for file in written(tmp_path)} == {trace}


def test_a_log_with_times(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"100.5 loading\r\n\x00\xff junk\n102.75 loaded\n103.0 load")
    (tmp_path / "r.ini").write_text(RULES)
    words = ("--node", "n7", "--rank", "3", "--job-uid", "u", "--attempt", "2", "--json")
    done = bootseer(tmp_path, "log", "--rules", str(tmp_path / "r.ini"), str(log), *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["logs"][0]["found"] == {
        "checkpoint.load begin": 1,
        "checkpoint.load end": 1,
    }
    [[resource, begin, end]] = written(tmp_path)
    assert resource["attributes"]["bootseer.rank"] == 3
    assert resource["attributes"]["k8s.node.name"] == "n7"
    environ = {"BOOTSEER_JOB_UID": "u", "BOOTSEER_ATTEMPT": "2"}
    assert resource["trace_id"] == events.trace_from_environment(environ)[0]
    assert begin["time_unix_nano"] == 100_500_000_000
    assert end["time_unix_nano"] == 102_750_000_000
    assert begin["mono_nano"] is None


def test_a_log_from_standard_input_with_shipped_rules(tmp_path: Path) -> None:
    data = (DATA / "logs" / "torchrun_restart.log").read_bytes()
    done = bootseer(tmp_path, "log", "--rules", "torchrun", "-", data=data)
    assert done.returncode == 0
    assert b"2 rendezvous end" in done.stdout


def test_how_much_of_a_log_matched_is_reported(tmp_path: Path) -> None:
    data = (DATA / "logs" / "torchrun_restart.log").read_bytes()
    (tmp_path / "other.log").write_bytes(b"one\ntwo\n\nthree\n")
    words = ("log", "--rules", "torchrun", str(tmp_path / "other.log"), "-")
    said = bootseer(tmp_path, *words, data=data).stdout.decode().splitlines()
    assert said[0] == f"{tmp_path / 'other.log'}: nothing matched in 3 lines"
    lines = len([line for line in data.splitlines() if line])
    assert f" of {lines} lines matched)" in said[1]
    done = bootseer(tmp_path, *words, "--json", data=data)
    other, job = json.loads(done.stdout)["logs"]
    assert (other["lines"], other["matched"]) == (3, 0)
    assert (job["lines"], job["matched"]) == (lines, 6)


def test_a_catastrophic_rule_is_bounded_while_others_work(tmp_path: Path) -> None:
    (tmp_path / "r.ini").write_text(RULES + "[evil]\nphase = evil\npoint = (a+)+$\n")
    data = b"100.5 loading\n" + b"a" * 60 + b"!\n102.5 loaded\n"
    done = bootseer(tmp_path, "log", "--rules", str(tmp_path / "r.ini"), "-", data=data)
    assert done.returncode == 0
    [[_, begin, said, end]] = written(tmp_path)
    assert (begin["name"], end["name"]) == ("checkpoint.load", "checkpoint.load")
    assert (said["name"], said["status"]) == ("log_rules", "fallback")


@pytest.mark.parametrize(
    ("words", "data", "code", "said"),
    [
        (("k8s", "/nonexistent.json"), b"", 3, "cannot read /nonexistent.json"),
        (("k8s", "-"), b"{", 6, "-:1: is not JSON"),
        (("k8s", "-"), b"\xff", 2, "is not UTF-8"),
        (("k8s", "-"), b'{"kind": "Node", "metadata": {}}', 2, "no pod in it"),
        (("log", "--rules", "nosuch", "-"), b"", 2, "not a shipped rule set"),
        (("log", "--rules", "./no.ini", "-"), b"", 3, "does not exist; shipped:"),
        (("log", "--rules", "torchrun", "/nonexistent.log"), b"", 3, "cannot read"),
        (("log", "--rules", "torchrun", "/dev/zero"), b"", 2, "/dev/zero: it is a device; name"),
        (("k8s", "/dev/zero"), b"", 2, "/dev/zero: it is a device; name a file, a pipe, or -"),
        (("log", "--rules", "huggingface", "-"), b"***** Running training *****\n", 2, "timestamp"),
    ],
)
def test_errors_are_one_line_with_their_code(
    tmp_path: Path, words: tuple[str, ...], data: bytes, code: int, said: str
) -> None:
    done = bootseer(tmp_path, *words, data=data)
    assert done.returncode == code
    assert done.stderr.decode().startswith("bootseer: ")
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""
    assert written(tmp_path) == []


@pytest.mark.parametrize("place", ["/dev/stdin", "fifo"])
def test_a_log_comes_through_a_pipe_by_its_path(tmp_path: Path, place: str) -> None:
    (tmp_path / "r.ini").write_text(RULES)
    data, words = b"100.5 loading\n102.5 loaded\n", ("log", "--rules", str(tmp_path / "r.ini"))
    if place == "fifo":
        place = str(tmp_path / "fifo")
        os.mkfifo(place)
        with subprocess.Popen(["cp", "/dev/stdin", place], stdin=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            writer.stdin.write(data)
            writer.stdin.close()
            done = bootseer(tmp_path, *words, place)
    else:
        done = bootseer(tmp_path, *words, place, data=data)
    assert done.returncode == 0, done.stderr
    assert b"1 checkpoint.load end" in done.stdout


@pytest.mark.parametrize("place", ["/dev/null", "/dev/stdin"])
def test_the_null_device_is_an_empty_log(tmp_path: Path, place: str) -> None:
    """It was refused as a device; it ends at once."""
    (tmp_path / "r.ini").write_text(RULES)
    words = ("log", "--rules", str(tmp_path / "r.ini"), place)
    done = run_from("< /dev/null", tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == f"{place}: nothing matched in 0 lines\n".encode()
    asked = run_from("< /dev/null", tmp_path, "k8s", place)
    assert (asked.returncode, asked.stdout) == (6, b"")
    assert f"{place}: holds no Kubernetes object".encode() in asked.stderr


@pytest.mark.parametrize("words", [("log", "--rules", "torchrun", "-"), ("k8s", "-")])
def test_a_closed_standard_input_is_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    """It was a traceback."""
    done = run_from("<&-", tmp_path, *words)
    said = b"bootseer: cannot read standard input: it is closed; name a file, or give it one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", said)


def run_from(redirection: str, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """By a shell, which gives it that standard input."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "-", sys.executable, "-m", "bootseer"]
    return subprocess.run(
        [*command, "import", *words],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "BOOTSEER_EVENTS": str(tmp_path / "ev")},
        timeout=120,
        check=False,
    )


def test_a_rule_files_error_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "r.ini").write_text("[a]\nphase = x\nbegin = (\n")
    done = bootseer(tmp_path, "log", "--rules", str(tmp_path / "r.ini"), "-")
    assert done.returncode == 2
    assert f"{tmp_path / 'r.ini'}:3: [a] begin".encode() in done.stderr


def test_events_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = (DATA / "k8s_pods_events.json").read_bytes()
    done = bootseer(tmp_path, "k8s", "-", "--events", str(tmp_path / "file"), data=data)
    assert done.returncode != 0
    assert b"write events to" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_full_disk_is_said_and_not_swallowed(tmp_path: Path) -> None:
    (tmp_path / "r.ini").write_text(RULES)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)); "
    run = "from bootseer.__main__ import main; sys.exit(main(sys.argv[1:]))"
    data = b"100.5 loading\n102.5 loaded\n" * 20
    done = subprocess.run(
        [
            *(sys.executable, "-c", limit + run, "import", "log", "--rules"),
            *(str(tmp_path / "r.ini"), "-", "--events", str(tmp_path / "ev")),
        ],
        input=data,
        capture_output=True,
    )
    assert done.returncode == 8
    assert b"of 41 lines fit into" in done.stderr
