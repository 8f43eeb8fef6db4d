"""What a second process works out of a large start: the same, whatever becomes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import generate

SCRIPT = """
import os, signal, sys
from bootseer.profiler.render import json as render_json
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load as loading
folder, mode = sys.argv[1:]
own, find_held = os.getpid(), analysis._find_held
calls = os.memfd_create("calls")

def held(prepared):
    mine = os.getpid() == own
    os.write(calls, b"o" if mine else b"f")
    if not mine and mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "failing" or (not mine and mode == "failing there"):
        raise ValueError("no such path")
    return find_held(prepared)

analysis._find_held = held
analysis.LEAST_LANES = 1 << 40 if mode == "alone" else 1
os.sched_getaffinity = lambda _: {0, 1}
try:
    print(render_json.render(analysis.analyse(loading.load([folder]))))
except ValueError as error:
    print(error)
print(os.pread(calls, 9, 0).decode())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no process left")
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    generate.generate(folder, generate.Options(seed=5, nodes=16))
    return folder / "events"


def reported(events: Path, mode: str) -> tuple[str, str, str]:
    """The report, who worked out what the barriers held (`f`orked or `o`wn process, in turn), and
    what is left of them."""
    words = [sys.executable, "-c", SCRIPT, str(events), mode]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    report, calls, left = done.stdout.rstrip("\n").rsplit("\n", 2)
    return report, calls, left


@pytest.mark.parametrize(
    ("mode", "calls"), [("whole", "f"), ("killed", "fo"), ("failing there", "fo")]
)
def test_a_second_process_changes_nothing(events: Path, mode: str, calls: str) -> None:
    report, alone, _ = reported(events, "alone")
    assert alone == "o"
    assert '"critical_path"' in report
    assert reported(events, mode) == (report, calls, "no process left")


def test_an_error_of_the_second_process_is_the_callers(events: Path) -> None:
    assert reported(events, "failing") == ("no such path", "fo", "no process left")
