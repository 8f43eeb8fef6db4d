"""Reading event files: every fault is counted and named, none is fatal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.load.spans import Loaded, Span
from tests.support.examples import examples
from tests.support.samples.event_files import EventFile, two_nodes


def problems(loaded: Loaded) -> dict[str, int]:
    count: Counter[str] = Counter()
    for problem in loaded.problems:
        count[problem.kind] += problem.count
    return dict(count)


def spans(loaded: Loaded) -> dict[str, Span]:
    return {s.name: s for start in loaded.starts for source in start.sources for s in source.spans}


def seconds(span: Span) -> float:
    assert span.begin_ns is not None
    assert span.end_ns is not None
    return (span.end_ns - span.begin_ns) / 1e9


def test_whole_files(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {}
    (start,) = loaded.starts
    assert [(s.identity.node, s.identity.rank, s.events) for s in start.sources] == [
        ("a", 0, 9),
        ("b", 1, 7),
    ]
    assert seconds(spans(loaded)["compile"]) == 15.0
    assert spans(loaded)["rendezvous"].wait


def test_torn_last_line(tmp_path: Path) -> None:
    path = EventFile("a").span("imports", 0, 1).span("compile", 1, 2).write(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"torn-line": 1}
    assert seconds(spans(loaded)["imports"]) == 1.0
    assert spans(loaded)["compile"].end_ns is None


def test_torn_line_in_the_middle_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    # Joined by a comma, these two halves would be one valid object.
    file.lines[1:1] = ['{"v":1,"event":"point"\n', '"name":"x"}\n']
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"torn-line": 1, "bad-line": 1}
    assert seconds(spans(loaded)["imports"]) == 1.0


def test_empty_file_beside_a_good_one(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "b-1-1.jsonl").touch()
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"empty-file": 1}
    assert loaded.problems[0].file.endswith("b-1-1.jsonl")


def test_binary_file_beside_a_good_one(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "b-1-1.jsonl").write_bytes(bytes(range(256)) * 20_000)
    loaded = load([str(tmp_path)])
    assert set(problems(loaded)) <= {"not-text", "bad-line"}
    assert problems(loaded)["not-text"] > 0
    assert seconds(spans(loaded)["imports"]) == 1.0


def test_one_endless_line_is_bounded(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "b-1-1.jsonl").write_bytes(b"[" * 12_000_000)
    loaded = load([str(tmp_path)])
    assert seconds(spans(loaded)["imports"]) == 1.0
    assert problems(loaded)["bad-line"] >= 1


def test_newer_version_is_read_and_named(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    file.line("point", 9, "first_step", 2, v=2, unheard_of={"x": 1})
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"newer-version": 1}
    assert "first_step" in spans(loaded)


def test_without_resource_line_the_file_name_tells_the_node(tmp_path: Path) -> None:
    file = EventFile("some-node").span("imports", 0, 1)
    del file.lines[0]
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"no-resource": 1}
    assert loaded.starts[0].sources[0].identity.node == "some-node"


@pytest.mark.parametrize("jump_s", [-3600.0, -2.0, 5.0])
def test_wall_clock_jump_changes_no_duration(tmp_path: Path, jump_s: float) -> None:
    file = EventFile("a").span("imports", 0, 10).span("compile", 10, 30)
    file.ahead_s = jump_s
    file.line("end", 99, "unused", 31)
    file.span("model.init", 31, 35).point("first_step", 40).write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"clock-jump": 1, "end-without-begin": 1}
    lengths = {n: seconds(s) for n, s in spans(loaded).items() if s.begin_ns and s.end_ns}
    assert lengths == {"imports": 10, "compile": 20, "model.init": 4, "first_step": 0}
    assert analysis.analyse(loaded).start.duration_s == pytest.approx(40)


@pytest.mark.parametrize("unit", [10**3, 10**6, 10**9])
@pytest.mark.parametrize("fraction", [False, True])
def test_times_in_another_unit_are_read_as_what_they_are(
    tmp_path: Path, unit: int, fraction: bool
) -> None:
    """As of a writer of somebody's own; beside a file in nanoseconds."""
    for node in ("a", "b"):
        file = EventFile(node).span("imports", 0, 10).point("first_step", 20)
        if node == "a":
            events = [json.loads(line) for line in file.lines]
            for event in events:
                wall = event["time_unix_nano"]
                event["time_unix_nano"] = wall / unit if fraction else wall // unit
                event["mono_nano"] //= unit
            file.lines = [json.dumps(event) + "\n" for event in events]
        file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"other-unit": 3}
    report = analysis.analyse(loaded)
    assert report.start.duration_s == pytest.approx(20)
    assert report.start.began_unix_s == pytest.approx(1_700_000_000)
    assert {p.name: p.max_s for p in report.phases}["imports"] == pytest.approx(10)


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_wall_clock_set_between_two_processes_of_a_node(tmp_path: Path, step_s: float) -> None:
    EventFile("a").span("deps.install", 0, 10).write(tmp_path)
    for rank in range(2):
        file = EventFile("a", rank, ahead_s=step_s).span("imports", 10, 20)
        file.point("first_step", 20).write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"clock-jump": 1}
    assert analysis.analyse(loaded).start.duration_s == pytest.approx(20)


def test_a_wall_clock_set_back_where_there_is_no_other_is_named(tmp_path: Path) -> None:
    """As of a shell, which knows no monotonic clock; what is imported is in no order."""
    for source, found in (("phase", {"clock-set-back": 1}), ("log", {})):
        file = EventFile("a")
        for at_s, ahead_s in ((0, 0.0), (20, -3600.0)):
            file.ahead_s = ahead_s
            about = {"bootseer.source": source}
            file.line("begin", at_s + 1, f"step{at_s}", at_s, "ok", about)
            file.line("end", at_s + 1, f"step{at_s}", at_s + 10, "ok", about)
        events = [{**json.loads(line), "mono_nano": None} for line in file.lines]
        file.lines = [json.dumps(event) + "\n" for event in events]
        file.write(tmp_path / source)
        assert problems(load([str(tmp_path / source)])) == found


def test_ranks_of_one_boot_share_one_offset(tmp_path: Path) -> None:
    """One rank lived mostly after the wall clock was set back: they still agree on the time."""
    EventFile("a", 0).span("imports", 0, 10).point("first_step", 20).write(tmp_path)
    late = EventFile("a", 1).span("imports", 0, 10)
    late.ahead_s = -100.0
    late.span("compile", 10, 15).point("first_step", 20).write(tmp_path)
    report = analysis.analyse(load([str(tmp_path)]))
    assert report.start.duration_s == pytest.approx(20)


def test_slow_slewing_is_no_jump(tmp_path: Path) -> None:
    file = EventFile("a")
    for step in range(100):
        file.ahead_s = step * 0.005  # 500 ppm over 10 s steps
        file.span("imports", step * 10, step * 10 + 1)
    file.write(tmp_path)
    assert problems(load([str(tmp_path)])) == {}


def test_begin_without_end_and_end_without_begin(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1).span("model.init", 1, None)
    file.line("end", 77, "compile", 5)
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"end-without-begin": 1}
    assert spans(loaded)["model.init"].end_ns is None
    assert spans(loaded)["compile"].begin_ns is None
    assert [k.phase for k in analysis.analyse(loaded).killed] == ["model.init"]


def test_span_ended_by_another_process(tmp_path: Path) -> None:
    """`bootseer event begin` and `... end` are two processes with a file each."""
    first, second = EventFile("a"), EventFile("a")
    first.line("begin", 1, "imports", 1)
    second.line("end", 1, "imports", 4, span_id=first.prefix + "000001")
    first.write(tmp_path)
    second.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {}
    assert seconds(spans(loaded)["imports"]) == 3.0


def test_several_processes_in_one_file(tmp_path: Path) -> None:
    """A file named by BOOTSEER_EVENTS=X.jsonl: lines mix, span ids tell whose they are."""
    a, b = EventFile("a", 0).span("imports", 0, 1), EventFile("b", 1).span("imports", 0, 3)
    mixed = [a.lines[0], b.lines[0], a.lines[1], b.lines[1], a.lines[2], b.lines[2]]
    (tmp_path / "all.jsonl").write_text("".join(mixed), encoding="utf-8")
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {}
    found = {s.identity.node: seconds(s.spans[0]) for s in loaded.starts[0].sources}
    assert found == {"a": 1.0, "b": 3.0}


def test_copies_count_once(tmp_path: Path) -> None:
    path = EventFile("a").span("imports", 0, 1).span("compile", 1, 2).write(tmp_path)
    shutil.copy(path, tmp_path / "copy-1-1.jsonl")
    (tmp_path / "z-1-1.jsonl").write_text(
        path.read_text() + path.read_text().splitlines()[1] + "\n", encoding="utf-8"
    )
    os.link(path, tmp_path / "link-1-1.jsonl")
    loaded = load([str(tmp_path), str(path)])
    assert problems(loaded) == {"duplicate-file": 2}
    assert sum(s.events for s in loaded.starts[0].sources) == 4


def test_repeated_events_count_once(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    file.lines.append(file.lines[-1])
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"duplicate-event": 1}
    assert seconds(spans(loaded)["imports"]) == 1.0


def test_imported_times_have_no_monotonic_clock(tmp_path: Path) -> None:
    file = EventFile("a")
    file.line("begin", 1, "image.pull", 1, mono_nano=None)
    file.line("end", 1, "image.pull", 9, mono_nano=None)
    file.write(tmp_path)
    assert seconds(spans(load([str(tmp_path)]))["image.pull"]) == 8.0


def test_imported_span_that_ends_before_it_begins(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    file.line("begin", 9, "image.pull", 9, mono_nano=None)
    file.line("end", 9, "image.pull", 1, mono_nano=None)
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"negative-duration": 1}
    assert analysis.analyse(loaded).killed == ()


def test_pod_name_stands_for_its_node(tmp_path: Path) -> None:
    EventFile("pod-1", 0).span("imports", 10, 11).write(tmp_path)
    known = {"k8s__node__name": "node-7", "k8s__pod__name": "pod-1"}
    EventFile("api", **known).span("image.pull", 0, 9).write(tmp_path)
    loaded = load([str(tmp_path)])
    assert {s.identity.node for s in loaded.starts[0].sources} == {"node-7"}


def test_fields_of_wrong_types(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    for changed in (
        {"name": 5},
        {"name": ""},
        {"time_unix_nano": "now"},
        {"time_unix_nano": True},
        {"time_unix_nano": 10**30},
        {"mono_nano": 1.5},
        {"attributes": []},
        {"event": "middle"},
        {"event": {}},
        {"parent_span_id": 3},
        {"status": None},
    ):
        file.point("x", 1)
        file.lines[-1] = json.dumps({**json.loads(file.lines[-1]), **changed}) + "\n"
    file.lines += ["3\n", '"text"\n', "null\n", "NaN\n", "\n", '{"v":1}\n']
    file.write(tmp_path)
    loaded = load([str(tmp_path)])
    assert problems(loaded) == {"bad-event": 12, "bad-line": 4}
    assert set(spans(loaded)) == {"imports"}


def test_not_a_number_never_reaches_a_report(tmp_path: Path) -> None:
    file = EventFile("a").span("imports", 0, 1)
    file.lines[-1] = file.lines[-1].replace('"attributes": {}', '"attributes": {"x": NaN}')
    file.write(tmp_path)
    assert spans(load([str(tmp_path)]))["imports"].attributes == {"x": None}


def test_nothing_readable(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load([str(tmp_path / "missing")])
    with pytest.raises(NotFoundError, match="no event files"):
        load([str(tmp_path)])
    (tmp_path / "x.jsonl").write_bytes(b"\x00\xff" * 100)
    with pytest.raises(CorruptDataError, match="not-text"):
        load([str(tmp_path)])


def test_fifo_does_not_block(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert problems(load([str(tmp_path)])) == {"empty-pipe": 1}


def test_a_device_without_an_end_is_not_read(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (20, 20));"
        "from bootseer.profiler.report.load.load import load;"
        "print([p.kind for p in load([sys.argv[1]]).problems])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True)
    assert done.stdout == b"['unreadable']\n", done.stderr


def test_dangling_link_is_named(tmp_path: Path) -> None:
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert problems(load([str(tmp_path)])) == {"unreadable": 1}


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected, as root may list any."""
    EventFile("a").span("imports", 0, 1).write(tmp_path)
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert problems(load([str(tmp_path)])) == {"unreadable": 1}


GOOD = EventFile("a", 0).span("imports", 0, 1).span("rendezvous", 1, 2, wait=True)
GOOD_BYTES = "".join(GOOD.point("first_step", 3).lines).encode()


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, len(GOOD_BYTES)), st.integers(0, 40), st.binary(max_size=12)),
        max_size=6,
    )
)
def test_any_mutation_is_survived(tmp_path: Path, cuts: list[tuple[int, int, bytes]]) -> None:
    data = GOOD_BYTES
    for place, length, insert in cuts:
        data = data[:place] + insert + data[place + length :]
    folder = tmp_path / "mutated"
    folder.mkdir(exist_ok=True)
    (folder / "a-1-1.jsonl").write_bytes(data)
    EventFile("b", 1, trace="b" * 32).span("imports", 0, 1).write(folder / "sound")
    try:
        loaded = load([str(folder)])
        for start in loaded.starts:
            report = analysis.analyse(loaded, trace_id=start.trace_id)
            json.dumps(report.to_json(), allow_nan=False)
    finally:
        shutil.rmtree(folder)
    sound = [start for start in loaded.starts if start.trace_id == "b" * 32]
    assert [source.events for source in sound[0].sources] == [2]
    kept = [line for line in GOOD_BYTES.splitlines() if line in data.splitlines()]
    if len(kept) < len(GOOD.lines):  # whatever was lost or changed is either read or named
        taken = sum(s.events for start in loaded.starts for s in start.sources) - 2
        assert taken >= len(GOOD.lines) - 1 or loaded.problems or len(data.splitlines()) < 7
