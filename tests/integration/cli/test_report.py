"""`bootseer report` as users run it, and every format against its own reader."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from bench import harness
from bench.report import benchmark as bench_report
from bootseer.cli.report.report import command, write_atomic
from bootseer.errors import AccessDeniedError, BootseerError, NotFoundError, UsageError
from bootseer.profiler.render import json as render_json
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from tests.support.samples.event_files import WALL_NS, EventFile, two_nodes
from tools import report_schema


def report(*words: str, environ: dict[str, str] | None = None) -> Result:
    clean = {"BOOTSEER_EVENTS": None, "COLUMNS": "120", **(environ or {})}
    result = CliRunner().invoke(command, words, env=clean, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document(*words: str) -> dict[str, Any]:
    found = json.loads(report(*words, "--json").stdout)
    jsonschema.Draft202012Validator(render_json.schema()).validate(found)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Two nodes, and a third that was killed after a fall-back with an awkward reason."""
    folder = tmp_path / "events"
    two_nodes(folder)
    file = EventFile("c", 2).span(
        "deps.install", 0, 3, status="fallback", bootseer__reason='a "b"\n'
    )
    file.span("imports", 3, 5, status="error", error__type="ImportError", bootseer__bytes=7)
    file.span("model.init", 5, None, odd=[1, 2.5, {"deep": None}], text="\ud800").write(folder)
    return folder


def test_the_same_events_give_the_same_report(events: Path) -> None:
    """Whatever order Python's sets have in a process."""

    def said(seed: int) -> bytes:
        words = [sys.executable, "-m", "bootseer", "report", str(events), "--json"]
        environ = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return subprocess.run(words, check=True, capture_output=True, env=environ).stdout

    assert len({said(seed) for seed in range(4)}) == 1


def starts(folder: Path, *durations_s: float) -> None:
    for number, seconds in enumerate(durations_s):
        file = EventFile("a", 0, trace=f"{EventFile.count:032x}", mono_zero_s=number * 9999.0)
        file.ahead_s = number * 1000.0
        file.span("deps.install", 0, seconds - 1).point("first_step", seconds).write(folder)


def test_schema_and_its_page_are_current() -> None:
    jsonschema.Draft202012Validator.check_schema(render_json.schema())
    for path, text in report_schema.files().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run `python -m tools.report_schema`: {path}"
        )


def test_terminal_by_default(events: Path) -> None:
    result = report(str(events))
    assert result.exit_code == 0
    for word in ("imports", "model.init", "rendezvous", "image.pull", "c"):
        assert word in result.stdout


def test_json(events: Path) -> None:
    found = document(str(events))
    assert found["schema_version"] == 1
    assert found["start"]["duration_s"] == 50.0
    assert found["comparison"] is None
    assert found["killed"][0]["node"] == "c"
    assert found["incidents"][0]["reason"] == 'a "b"\n'
    assert "queue" in found["not_observed"]


def test_comparison_keys(tmp_path: Path) -> None:
    starts(tmp_path / "before", 20, 22, 24)
    starts(tmp_path / "after", 9, 10, 11)
    found = document(str(tmp_path / "after"), "--baseline", str(tmp_path / "before"))["comparison"]
    assert found["speedup"] == pytest.approx(2.2)
    for side, figures in (("baseline", (3, 22, 20, 24)), ("candidate", (3, 10, 9, 11))):
        whole = found[side]
        assert (whole["starts"], whole["median"], whole["min"], whole["max"]) == figures
        part = whole["phases"]["deps.install"]
        assert (part["starts"], part["median"]) == (3, figures[1] - 1)


def test_comparison_refuses_two_starts(tmp_path: Path) -> None:
    starts(tmp_path / "before", 20, 22)
    starts(tmp_path / "after", 9, 10, 11)
    words = (str(tmp_path / "after"), "--baseline", str(tmp_path / "before"))
    assert document(*words)["comparison"]["speedup"] is None
    assert "no claim" in " ".join(report(*words).stdout.split())


def test_html_is_written(events: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report(str(events), "--html", str(page))
    assert page.read_text(encoding="utf-8").startswith("<!")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events", "report.html"]


def test_chrome_trace(events: Path, tmp_path: Path) -> None:
    report(str(events), "--chrome-trace", str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert list(names.values()) == ["a", "b", "c"]
    spans = {(names[e["pid"]], e["name"]): e for e in found if e["ph"] == "X"}
    assert (spans["a", "compile"]["ts"], spans["a", "compile"]["dur"]) == (35e6, 15e6)
    assert spans["a", "rendezvous"]["cat"] == "wait"
    assert [e["name"] for e in found if e["ph"] == "B"] == ["model.init"]
    assert {e["ts"] for e in found if e["ph"] == "i"} == {50e6, 42e6}


def test_prometheus(events: Path, tmp_path: Path) -> None:
    report(str(events), "--prometheus", str(tmp_path / "b.prom"))
    text = (tmp_path / "b.prom").read_text(encoding="utf-8")
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["bootseer_start_complete"].samples[0].value == 0  # node c was killed
    assert "bootseer_start_duration_seconds" not in families
    own = {
        (s.labels["phase"], s.labels["quantile"]): s.value
        for s in families["bootseer_phase_own_seconds"].samples
    }
    assert own["compile", "0.5"] == 15
    assert all(family.documentation for family in families.values())
    assert all(f.type == "gauge" for f in families.values())


def test_prometheus_tells_how_long_a_complete_start_took(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    report(str(tmp_path), "--prometheus", str(tmp_path / "b.prom"))
    text = (tmp_path / "b.prom").read_text(encoding="utf-8")
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["bootseer_start_complete"].samples[0].value == 1
    assert families["bootseer_start_duration_seconds"].samples[0].value == 50


def test_prometheus_escapes_labels(tmp_path: Path) -> None:
    name = 'a"b\\c\nd'
    EventFile("a").span(name, 0, 1).write(tmp_path)
    report(str(tmp_path), "--prometheus", str(tmp_path / "b.prom"))
    text = (tmp_path / "b.prom").read_text(encoding="utf-8")
    found = [s.labels.get("phase") for f in text_string_to_metric_families(text) for s in f.samples]
    assert name in found


def test_otlp(events: Path, tmp_path: Path) -> None:
    report(str(events), "--otlp", str(tmp_path / "otlp.json"))
    found = json.loads((tmp_path / "otlp.json").read_text(encoding="utf-8"))
    for resource in found["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            for key in {"traceId", "spanId", "parentSpanId"} & set(span):
                # OTLP writes ids in hexadecimal where protobuf's own JSON has base64.
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    request = json_format.ParseDict(found, ExportTraceServiceRequest())
    nodes = {}
    for resource in request.resource_spans:
        about = {a.key: a.value.string_value for a in resource.resource.attributes}
        nodes[about["k8s.node.name"]] = resource.scope_spans[0].spans
    assert set(nodes) == {"a", "b", "c"}
    spans = {span.name: span for span in nodes["a"]}
    compiled = spans["compile"]
    assert compiled.trace_id == bytes.fromhex("aa" * 16)
    assert len(compiled.span_id) == 8
    assert compiled.end_time_unix_nano - compiled.start_time_unix_nano == 15 * 10**9
    assert compiled.start_time_unix_nano == WALL_NS + 35 * 10**9
    dead = {span.name: span for span in nodes["c"]}["model.init"]
    assert dead.status.code == 2
    assert any(a.key == "bootseer.killed" and a.value.bool_value for a in dead.attributes)


def test_places_to_look(events: Path, tmp_path: Path) -> None:
    by_option = document("--events", str(events))
    found = report("--json", environ={"BOOTSEER_EVENTS": str(events)})
    assert json.loads(found.stdout) == by_option
    state = tmp_path / "state" / "bootseer"
    state.mkdir(parents=True)
    events.rename(state / "events")
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    default = json.loads(report("--json", environ=environ).stdout)
    assert default["start"] == by_option["start"]


def test_faults_end_with_their_codes(tmp_path: Path) -> None:
    def ended(*words: str) -> tuple[int, str]:
        run = subprocess.run(
            [sys.executable, "-m", "bootseer", "report", *words], capture_output=True, text=True
        )
        assert run.stdout == ""
        return run.returncode, run.stderr

    code, text = ended(str(tmp_path / "none"))
    assert (code, text.count("\n")) == (3, 1)
    assert text.startswith("bootseer: no such file")
    (tmp_path / "x.jsonl").write_bytes(b"\x00\xff\xfe" * 50)
    assert ended(str(tmp_path))[0] == 6
    assert ended("--no-such-option")[0] == 2


def test_nothing_was_ever_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no events yet at .*bootseer run"):
        report(environ={"XDG_STATE_HOME": str(tmp_path)})


def test_unknown_trace(events: Path) -> None:
    with pytest.raises(NotFoundError, match="known are aaaaaaaaaaaa"):
        report(str(events), "--trace", "77")


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    target.write_text("old", encoding="utf-8")
    write_atomic(str(target), "new\ud800")
    assert target.read_bytes() == b"new?"
    with pytest.raises(NotFoundError, match="cannot write"):
        write_atomic(str(tmp_path / "no" / "out.html"), "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BootseerError, match="cannot write"):
        write_atomic(str(tmp_path / "folder"), "x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "out.html"]
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="it is a FIFO"):
        write_atomic(str(tmp_path / "fifo"), "x")
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "link").symlink_to("out.html")
    write_atomic(str(tmp_path / "link"), "linked")
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == b"linked"
    target.chmod(0o600)
    write_atomic(str(tmp_path / "link"), "secret")
    assert target.stat().st_mode & 0o777 == 0o600
    assert issubclass(AccessDeniedError, BootseerError)


def test_every_option_has_its_variable(events: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = [sys.executable, "-m", "bootseer", "report", str(events)]
    environ = {**os.environ, "BOOTSEER_REPORT_HTML": str(page)}
    subprocess.run(words, env=environ, check=True, stdout=subprocess.DEVNULL)
    assert page.exists()


def test_bench_runs() -> None:
    began = time.perf_counter()
    cases = bench_report.run(harness.Options(quick=True, runs=1))
    wall_s = time.perf_counter() - began
    ours = [case for case in cases if case.side == harness.OURS]
    assert [(case.case, case.unit, len(case.values)) for case in ours] == [
        (f"{start}{output}", unit, 1)
        for start in ("330k events", "65,536 ranks")
        for output in ("", ", json")
        for unit in ("s", "bytes")
    ]
    outputs = [case.conditions.partition(";")[0] for case in ours if case.unit == "s"]
    assert outputs == ["terminal and HTML", "JSON"] * 2
    # No Python is smaller, and the report of so few events is far below what is allowed.
    assert sum(case.values[0] for case in ours if case.unit == "s") < wall_s
    # A child's peak counts what it was forked from, and a worker of the tests grows.
    most = 1e9 + 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    assert all(5e6 < case.values[0] < most for case in ours if case.unit == "bytes")


def test_report_is_loaded_late() -> None:
    """The report's modules are pure enough not to pull in what only some outputs need."""
    code = (
        "import sys; import bootseer.cli.report.report; "
        "bad = {'rich', 'pyarrow', 'numpy', 'jsonschema'} & set(sys.modules); sys.exit(bool(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_prepared_start_is_reusable(events: Path) -> None:
    loaded = load([str(events)])
    first = analysis.analyse(loaded)
    assert analysis.analyse(loaded) == first
