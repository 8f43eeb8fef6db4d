"""The event writer, the wrapper and the log rules under interpreters of Python 3.9.

PyPy 3.9 comes from Debian and stands for the language and its library; it lacks two calls of
POSIX that the wrapper needs, so `run` is tried where a CPython 3.9 is installed as well. The
test of `run` by name is only there on such a machine; vermin checks the wrapper on every one.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.profiler.collect.log_rules import rules as logrules
from tests.support.paths import ROOT

PYENV = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
CPYTHON = sorted(glob.glob(f"{PYENV}/versions/3.9.*/bin/python3.9"))[:1] or [
    found for found in ["/usr/bin/python3.9"] if os.path.exists(found)
]


def old_python(python: str, *words: str, events: Path, **more) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER", "PYTHON"))}
    return subprocess.run(
        [python, "-W", "error", *words],
        env={**environ, "PYTHONPATH": str(ROOT), "BOOTSEER_EVENTS": str(events)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )


def lines(events: Path) -> list[dict]:
    return [
        json.loads(x) for f in sorted(events.glob("*.jsonl")) for x in f.read_text().splitlines()
    ]


JOB = """
import bootseer
with bootseer.phase("model.init", layers=3):
    bootseer.event("note", text="\\u00e9\\ud800 \\"quoted\\"\\n")
bootseer.event("first_step")
"""


@pytest.mark.debian("pypy3")
def test_library_events(tmp_path):
    done = old_python("pypy3", "-c", JOB, events=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    seen = [(e["event"], e["name"]) for e in lines(tmp_path)]
    assert seen == [
        ("resource", "resource"),
        ("begin", "model.init"),
        ("point", "note"),
        ("end", "model.init"),
        ("point", "first_step"),
    ]
    assert lines(tmp_path)[2]["attributes"]["text"] == 'é? "quoted"\n'


@pytest.mark.debian("pypy3")
def test_event_command(tmp_path):
    done = old_python("pypy3", "-m", "bootseer", "event", "point", "ready", events=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert lines(tmp_path)[-1]["name"] == "ready"
    begun = old_python("pypy3", "-m", "bootseer", "event", "begin", "a", events=tmp_path)
    ended = old_python("pypy3", "-m", "bootseer", "event", "end", "a", events=tmp_path)
    assert (begun.returncode, begun.stderr, ended.returncode, ended.stderr) == (0, "", 0, "")
    found = {(e["event"], e["span_id"]) for e in lines(tmp_path) if e["name"] == "a"}
    assert found >= {("begin", begun.stdout.strip()), ("end", begun.stdout.strip())}


@pytest.mark.debian("pypy3")
def test_shipped_log_rules_load(tmp_path):
    code = (
        "from bootseer.profiler.collect.log_rules import rules as logrules\n"
        "print(*[f'{n}:{len(logrules.load(n))}' for n in logrules.list_shipped()])"
    )
    done = old_python("pypy3", "-c", code, events=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    counts = dict(word.split(":") for word in done.stdout.split())
    assert {"torchrun", "torchtitan", "huggingface", "vllm"} < set(counts)
    assert len(counts) == len(logrules.list_shipped())
    assert all(int(n) > 0 for n in counts.values())


@pytest.mark.debian("pypy3")
def test_newer_commands_say_what_they_need(tmp_path):
    done = old_python("pypy3", "-m", "bootseer", "report", events=tmp_path)
    assert done.returncode == 7
    assert "3.11" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.debian("pypy3")
def test_start_starts_the_job_alone(tmp_path):
    words = ["-m", "bootseer", "start", "-c", "bootseer.toml", "--", "sh", "-c", "exit 3"]
    done = old_python("pypy3", *words, events=tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "3.11" in done.stderr


if CPYTHON:

    @pytest.mark.parametrize("python", CPYTHON, ids=os.path.basename)
    def test_wrapper_under_cpython(python, tmp_path):
        rules = tmp_path / "own.ini"
        rules.write_text("[step]\nphase = first_step\npoint = ^step 1$\n")
        events = tmp_path / "events"
        words = ["-m", "bootseer", "run", "--phase", "imports", "--log-rules", str(rules), "--"]
        done = old_python(python, *words, "sh", "-c", "echo step 1; exit 3", events=events)
        assert (done.returncode, done.stdout, done.stderr) == (3, "step 1\n", "")
        found = {(e["event"], e["name"]) for e in lines(events)}
        assert {("begin", "imports"), ("end", "imports"), ("point", "first_step")} <= found


def test_interpreters_are_the_right_version():
    for python in [*CPYTHON, *filter(None, [shutil.which("pypy3")])]:
        said = subprocess.run(
            [python, "-c", "import sys; print(sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert said.stdout == "(3, 9)\n"
