"""Benchmarks still run, in their quick form or smaller, untimed; and how results are told.

That of the report stands with the report's tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import wheelhouse

from bench import __main__ as program
from bench import depsnap, events, harness, wrapper

pytestmark = pytest.mark.slow

QUICK = harness.Options(quick=True, runs=1)
BIN = Path(sys.executable).parent


def sides(cases: list[harness.Case]) -> dict[str, set[str]]:
    """Case -> sides, each of which has one value that is no nonsense."""
    out: dict[str, set[str]] = {}
    for case in cases:
        assert len(case.values) == 1
        assert case.values[0] >= 0
        out.setdefault(case.case, set()).add(case.side)
    return out


def test_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "install", lambda folder: BIN)
    assert sides(wrapper.run(QUICK)) == {"run -- true": {"ours", "plain exec", "bare interpreter"}}


def test_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "APPENDS", 50)
    cases = events.run(QUICK)
    torn = f"{events.PROCESSES} processes x 50 appends"
    assert sides(cases)[torn] == {"ours"}
    assert sides(cases)["one event"] >= {"ours", "json.dumps and one write"}
    assert [case.values for case in cases if case.case == torn] == [[0.0]]


def test_depsnap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheelhouse.make_wheel(wheels, "alpha", "1.0")
    tiny = depsnap.WorkSet("tiny", ("alpha==1.0",), "import alpha")
    monkeypatch.setattr(depsnap, "SMALL", tiny)
    monkeypatch.setattr(depsnap, "wheelhouse", lambda work_set: wheels)
    monkeypatch.setattr(depsnap, "CACHE", tmp_path)
    monkeypatch.setattr(depsnap, "file_systems", lambda: ("",))
    # Dropping the page cache would slow down every test beside this one.
    monkeypatch.setattr(depsnap, "cold", lambda folders: None)
    monkeypatch.chdir(Path(__file__).parent.parent)
    found = sides(depsnap.run(QUICK))
    peers = {"pip warm", "uv copy warm", "uv copy cold", "uv hard link warm"}
    for form in ("archive", "tree"):
        assert found[f"{form} ready, this disk, tiny"] == {"ours", "limit"} | peers
        assert found[f"{form} first work, this disk, tiny"] == {"ours"} | peers
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


# --- what is made of the values ------------------------------------------------------------------


def test_ratios_are_taken_within_rounds_and_above_1_is_better() -> None:
    cases = [
        harness.Case("c", "ours", "s", "lower", [1.0, 2.0, 4.0]),
        harness.Case("c", "peer", "s", "lower", [3.0, 2.0, 8.0]),
        harness.Case("other", "peer", "s", "lower", [9.0, 9.0, 9.0]),
        harness.Case("speed", "ours", "MB/s", "higher", [6.0]),
        harness.Case("speed", "peer", "MB/s", "higher", [2.0]),
        harness.Case("speed", "peer", "s", "lower", [1.0]),
    ]
    assert harness.ratios_of(cases) == [
        harness.Ratio("c", "ours", "peer", median=2.0, min=1.0, max=3.0),
        harness.Ratio("speed", "ours", "peer", median=3.0, min=3.0, max=3.0),
    ]


def test_sides_take_turns_at_being_first() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = harness.interleave({n: lambda n=n: side(n) for n in "ab"}, rounds=2, warmup=1)
    assert "".join(order) == "abbaab"
    assert values == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_results_are_written_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    made = [
        harness.Case("c", "ours", "s", "lower", [1.0, 2.0]),
        harness.Case("c", "peer", "s", "lower", [3.0, 4.0]),
    ]
    monkeypatch.setattr(events, "run", lambda options: made if options.runs == 2 else [])
    assert program.main(["events", "--runs", "2"]) == 0
    document = json.loads((tmp_path / "results" / "events.json").read_text())
    assert set(document) == {"name", "when", "command", "machine", "cases", "ratios"}
    assert document["command"] == "python -m bench events --runs 2"
    assert document["cases"][0]["values"] == [1.0, 2.0]
    (ratio,) = document["ratios"]
    assert ratio == {"case": "c", "ours": "ours", "peer": "peer"} | {
        "median": 2.5,
        "min": 2.0,
        "max": 3.0,
    }
    assert program.main(["results"]) == 0
    page = (tmp_path / "RESULTS.md").read_text()
    assert "`python -m bench events --runs 2`" in page
    assert "| c | peer | 2.50 | 2.00 | 3.00 |" in page
    assert "| c | ours | 1.5 | 1 | 2 | 2 | s |" in page
    assert capsys.readouterr().out.count("| c | peer |") == 2


def test_a_quick_run_leaves_the_results_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(events, "run", lambda options: [])
    assert program.main(["events", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("runs", ["0", "-1", "x"])
def test_runs_that_are_no_count_are_refused(runs: str) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["events", "--runs", runs])
    assert ended.value.code == 2


def test_the_results_page_is_current() -> None:
    page = Path(program.__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
    assert page == program.results_page(), "run `python -m bench results`"
