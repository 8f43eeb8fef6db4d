"""The import hook in real Python processes: what it writes, and that nobody notices it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.profiler.collect import import_hook

pytestmark = pytest.mark.slow

HEAVY = "import time\ntime.sleep(0.06)\n"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Packages: heavy (imports inner, has heavy.sub), inner, and eight small ones."""
    root = tmp_path / "modules"
    (root / "heavy").mkdir(parents=True)
    (root / "heavy" / "__init__.py").write_text(HEAVY + "import inner\nimport heavy.sub\n")
    (root / "heavy" / "sub.py").write_text(HEAVY)
    (root / "inner.py").write_text(HEAVY)
    (root / "broken.py").write_text(HEAVY + "import nosuchmodule\n")
    for number in range(8):
        (root / f"small{number}.py").write_text("import time\ntime.sleep(0.02)\n")
    return root


def run(
    tmp_path: Path, modules: Path, code: str, *, hook: bool = True, **more: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(modules), **more}
    environ["BOOTSEER_EVENTS"] = str(tmp_path / "events")
    if hook:
        environ.update(import_hook.environment(environ))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    events = []
    for path in sorted((tmp_path / "events").glob("*.jsonl")):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    return done, [event for event in events if event["event"] != "resource"]


def test_heavy_packages_are_nested_spans_with_self_and_cumulative_time(
    tmp_path: Path, modules: Path
) -> None:
    done, events = run(tmp_path, modules, "import heavy; import heavy, heavy.sub")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    begins = {event["name"]: event for event in events if event["event"] == "begin"}
    ends = {event["name"]: event for event in events if event["event"] == "end"}
    assert set(begins) == set(ends) == {"imports", "imports.heavy", "imports.inner"}
    assert begins["imports.heavy"]["parent_span_id"] == begins["imports"]["span_id"]
    assert begins["imports.inner"]["parent_span_id"] == begins["imports.heavy"]["span_id"]
    heavy = ends["imports.heavy"]["attributes"]
    inner = ends["imports.inner"]["attributes"]["import.cumulative_s"]
    assert inner >= 0.06
    assert heavy["import.cumulative_s"] >= 0.18
    assert 0.12 <= heavy["import.self_s"] <= heavy["import.cumulative_s"] - inner + 1e-5
    assert heavy["import.modules"] == 2
    for name, end in ends.items():
        assert begins[name]["time_unix_nano"] < end["time_unix_nano"]
        assert begins[name]["mono_nano"] < end["mono_nano"]
    assert begins["imports"]["time_unix_nano"] <= begins["imports.heavy"]["time_unix_nano"]


@pytest.mark.parametrize("leave", ["os._exit(7)", "os.execv('/bin/sh', ['sh', '-c', 'exit 7'])"])
def test_nothing_is_lost_when_the_process_leaves_without_cleaning_up(
    tmp_path: Path, modules: Path, leave: str
) -> None:
    done, events = run(tmp_path, modules, f"import heavy, os; {leave}")
    assert done.returncode == 7
    assert {event["name"] for event in events if event["event"] == "end"} >= {"imports"}


def test_a_process_killed_while_importing_shows_an_open_span(tmp_path: Path, modules: Path) -> None:
    (modules / "deadly.py").write_text(
        "import heavy, inner, small0, small1, small2, small3, small4\n"
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done, events = run(tmp_path, modules, "import deadly")
    assert done.returncode == -9
    assert [(event["event"], event["name"]) for event in events] == [("begin", "imports")]


def test_small_imports_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: eight of 20 ms make two spans of three, and two are still to come."""
    now_ns = [1_000_000_000]
    monkeypatch.setattr(import_hook, "_mono_ns", lambda: now_ns[0])
    ends: list[tuple[str, dict[str, Any]]] = []

    class Writer:
        def begin(self, name: str, *_: object) -> str:
            return name

        def end(self, span: str, name: str, status: str, attributes: Any, *_: object) -> None:
            ends.append((name, attributes))

    recorder = import_hook.Recorder(Writer)
    for number in range(8):
        recorder.enter(recorder.get_thread(), f"small{number}")
        now_ns[0] += 20_000_000
        recorder.leave(recorder.get_thread())
    assert [name for name, _ in ends] == ["imports", "imports"]
    for _, attributes in ends:
        assert attributes["import.modules"] == 3
        assert attributes["import.cumulative_s"] == 0.06


def test_small_imports_are_written_once_they_are_much(tmp_path: Path, modules: Path) -> None:
    code = "; ".join(f"import small{number}" for number in range(8))
    _, events = run(tmp_path, modules, code)
    ends = [event for event in events if event["event"] == "end" and event["name"] == "imports"]
    begins = {event["span_id"]: event["mono_nano"] for event in events if event["event"] == "begin"}
    assert ends
    for end in ends:
        assert end["mono_nano"] - begins[end["span_id"]] >= import_hook.MIN_NS


@pytest.mark.parametrize(
    "code",
    [
        "import broken",
        "import nosuch.module",
        "import importlib; importlib.import_module('broken')",
        "from heavy import nothing",
        "import heavy, sys; print(sys.path, heavy.__spec__, heavy.__loader__)",
        "import sys; print('sitecustomize' in sys.modules)",
    ],
)
def test_output_and_tracebacks_are_the_same_as_without(
    tmp_path: Path, modules: Path, code: str
) -> None:
    # an empty one, so that both sides have a module of that name
    (modules / "sitecustomize.py").write_text("")
    plain, none = run(tmp_path, modules, code, hook=False)
    hooked, _ = run(tmp_path, modules, code)
    assert none == []

    # A traceback through importlib.import_module shows importlib's frames, and so one of ours.
    shown = "<frozen importlib._bootstrap>" if "import_module" in code else "0x"

    def text(output: str) -> str:
        lines = [line for line in output.splitlines() if "0x" not in line]
        return "\n".join(line for line in lines if shown not in line)

    assert text(hooked.stderr) == text(plain.stderr)
    assert text(hooked.stdout) == text(plain.stdout)
    assert hooked.returncode == plain.returncode


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, modules: Path) -> None:
    (modules / "sitecustomize.py").write_text("import sys\nsys.flavour = 'own'\n")
    code = "import sys, sitecustomize; print(sys.flavour, sitecustomize.__file__)"
    done, _ = run(tmp_path, modules, code)
    assert done.stdout.split() == ["own", str(modules / "sitecustomize.py")]


def test_child_processes_are_timed_too(tmp_path: Path, modules: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import heavy'])"
    _, events = run(tmp_path, modules, code)
    assert "imports.heavy" in {event["name"] for event in events}


def test_threads_do_not_mix_their_imports(tmp_path: Path, modules: Path) -> None:
    (modules / "other.py").write_text(HEAVY)
    code = (
        "import threading\n"
        "t = threading.Thread(target=lambda: __import__('other')); t.start()\n"
        "import heavy; t.join()"
    )
    _, events = run(tmp_path, modules, code)
    begins = {event["name"]: event for event in events if event["event"] == "begin"}
    spans = {event["span_id"]: event["name"] for event in events if event["event"] == "begin"}
    assert spans[begins["imports.other"]["parent_span_id"]] == "imports"
    assert spans[begins["imports.heavy"]["parent_span_id"]] == "imports"
    roots = {begins[f"imports.{name}"]["parent_span_id"] for name in ("other", "heavy")}
    assert len(roots) == 2


def test_without_an_events_place_nothing_is_hooked(tmp_path: Path, modules: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(modules)}
    code = "import sys; f = sys.modules['_frozen_importlib']._find_and_load; print(f.__module__)"
    environ.update(import_hook.environment(environ))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "_frozen_importlib"


def test_environment_keeps_the_users_path_and_adds_ours_once() -> None:
    once = import_hook.environment({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"] == f"{import_hook.INJECT_DIRECTORY}:/a:/b"
    assert import_hook.environment(once) == once
    assert import_hook.environment({})["PYTHONPATH"] == import_hook.INJECT_DIRECTORY
