"""Benchmarks still run, in their quick form or smaller, untimed; and how results are told.

That of the report stands with the report's tests.
"""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import events, floors, harness, memory, revisions, wrapper
from bench.depsnap import benchmark as depsnap
from bench.depsnap import commands as depsnap_commands
from bench.fuse import benchmark as fuse
from bench.names import module_of
from bootseer.cli import read_ahead
from tests.support.paths import ROOT
from tests.support.samples import wheels as wheelhouse

pytestmark = pytest.mark.slow

QUICK = harness.Options(quick=True, runs=1)


def sides(cases: list[harness.Case]) -> dict[str, set[str]]:
    """Case -> sides, each of which has one value."""
    out: dict[str, set[str]] = {}
    for case in cases:
        assert len(case.values) == 1
        out.setdefault(case.case, set()).add(case.side)
    return out


@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_every_installer_writes_a_program_of_few_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str, editable: bool
) -> None:
    """The bench of the wrapper runs in the same environments: each takes seconds to make."""
    source = wrapper.copy_source(tmp_path / "source")
    programs = wrapper.install(installer, tmp_path / "venv", source, editable=editable)
    program = programs / "bootseer"
    isolated = [programs / "python", "-I", "-X", "importtime", programs / "bootseer-python"]
    words = [*isolated, "run", "--", "echo", "ran"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "ran\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bootseer.entrypoint.run" in imported
    assert imported.isdisjoint({"re", "importlib.metadata", "click", "runpy"})
    assert subprocess.run([program, "run", "--", "sh", "-c", "exit 7"]).returncode == 7
    assert (programs / "bootseer-snapshotter").exists()
    if not editable:
        (case,) = [name for name, by in wrapper.CASES.items() if by == installer]
        monkeypatch.setattr(wrapper, "CASES", {case: installer})
        monkeypatch.setattr(wrapper, "install", lambda *_: programs)
        wanted = {"ours", "python -m bootseer", "plain exec", "bare interpreter"}
        assert sides(wrapper.run(QUICK)) == {case: wanted}
    python = str(programs / "python")
    if installer == "pip":
        command = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "bootseer"]
    else:
        command = [sys.executable, "-m", "uv", "pip", "uninstall", "-q", "--python", python]
        command += ["bootseer"]
    subprocess.run(command, check=True, capture_output=True)
    assert not [path for path in programs.iterdir() if path.name.startswith("bootseer")]


def test_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "APPENDS", 50)
    cases = events.run(QUICK)
    torn = f"{events.PROCESSES} processes x 50 appends"
    assert sides(cases)[torn] == {"ours"}
    assert sides(cases)["one event"] >= {"ours", "json.dumps and one write"}
    assert [case.values for case in cases if case.case == torn] == [[0.0]]


@pytest.mark.slow
def test_depsnap_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels = wheelhouse.make_wheel(tmp_path / "wheels", "alpha", "1.0").parent
    tiny = depsnap.WorkSet("tiny", ("alpha==1.0",), "import alpha")
    monkeypatch.setattr(depsnap, "CACHE", tmp_path)
    monkeypatch.setattr(depsnap, "cold", lambda folders: None)
    monkeypatch.setattr(depsnap_commands, "locked", lambda name: tiny)
    monkeypatch.setattr(depsnap_commands, "wheelhouse", lambda work_set: wheels)
    found = sides(depsnap_commands.run("", "small", "locked", 1))
    assert set(found) == {
        f"{situation} {what}, this disk, small, locked"
        for situation in ("first start", "fresh node", "second start")
        for what in ("ready", "first work")
    }
    peers = {"ours", "pip warm", "uv copy warm", "uv hard link warm"}
    limited = found.pop("second start ready, this disk, small, locked")
    assert limited == peers | {"limit"}
    assert all(names == peers for names in found.values())


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
    monkeypatch.chdir(ROOT)
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
        harness.Ratio("c", "ours", "peer", 2.0, min=1.0, max=3.0, unit="s", of_medians=1.5),
        harness.Ratio("speed", "ours", "peer", 3.0, 3.0, 3.0, unit="MB/s", of_medians=3.0),
    ]


def test_sides_of_different_runs_have_no_ratio() -> None:
    ours = harness.Case("c", "ours", "s", "lower", [1.0], revision="a", command="one")
    peer = harness.Case("c", "peer", "s", "lower", [2.0, 2.0], revision="b", command="one")
    assert harness.ratios_of([ours, peer]) == []


def test_sides_take_turns_at_being_first() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = harness.interleave({n: lambda n=n: side(n) for n in "ab"}, rounds=2, warmup=1)
    assert "".join(order) == "abbaab"
    assert values == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_side_may_be_measured_in_the_first_rounds_alone() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    sides = {n: lambda n=n: side(n) for n in "ab"}
    values = harness.interleave(sides, rounds=3, warmup=1, at_most={"b": 1})
    assert "".join(order) == "abba" + "aa"
    assert values == {"a": [4.0, 5.0, 6.0], "b": [3.0]}
    (ratio,) = harness.ratios_of(
        [
            harness.Case("c", "ours", "s", "lower", values["a"]),
            harness.Case("c", "b", "s", "lower", values["b"]),
        ]
    )
    assert (ratio.median, ratio.of_medians) == (3 / 4, 3 / 4)


def test_a_side_with_rounds_that_ours_has_not_is_an_error() -> None:
    ours = harness.Case("c", "ours", "s", "lower", [1.0])
    peer = harness.Case("c", "peer", "s", "lower", [2.0, 2.0])
    with pytest.raises(ValueError, match="c: peer has rounds"):
        harness.ratios_of([ours, peer])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository in the place of ours, with one file that bench `events` measures."""
    root = tmp_path / "tree"
    (root / "bench/results").mkdir(parents=True)
    (root / "measured.py").write_text("1\n")
    (root / "measured.md").write_text("1\n")
    (root / "other.py").write_text("1\n")
    monkeypatch.setattr(revisions, "ROOT", root)
    monkeypatch.setattr(harness, "RESULTS", root / "bench/results")
    monkeypatch.setattr(events, "MEASURES", ("measured.py", "measured.md"))
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    name = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    done = subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(root: Path) -> str:
    """Commit all of it; later questions are asked as by a new process."""
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "x")
    forget()
    return git(root, "rev-parse", "HEAD")


def forget() -> None:
    revisions.current.cache_clear()
    revisions.is_stale.cache_clear()


def measure(
    monkeypatch: pytest.MonkeyPatch, *values: float, words: tuple[str, ...] = ("--runs", "2")
) -> list[dict[str, object]]:
    """Run bench `events` with these figures; return the cases of its file."""
    made = harness.cases_of(
        "c", {"ours": list(values), "peer": [3.0, 4.0]}, unit="s", conditions="no agent"
    )
    monkeypatch.setattr(events, "run", lambda options: made if options.runs == 2 else [])
    assert program.main(["events", *words]) == 0
    forget()
    path = harness.path_of("events", quick="--quick" in words)
    cases: list[dict[str, object]] = json.loads(path.read_text())["cases"]
    return cases


def test_results_are_written_and_shown(
    monkeypatch: pytest.MonkeyPatch, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(monkeypatch, 1.0, 2.0)
    document = json.loads((repository / "bench/results/events.json").read_text())
    assert set(document) == {"name", "machine", "cases", "ratios"}
    stamps = {
        "revision": git(repository, "rev-parse", "HEAD"),
        "command": "python -m bench events --runs 2",
        "conditions": "no agent",
    }
    first = document["cases"][0]
    figures = {"case": "c", "side": "ours", "unit": "s", "better": "lower", "values": [1.0, 2.0]}
    assert first == figures | stamps | {"when": first["when"]}
    assert datetime.datetime.fromisoformat(str(first["when"])).tzinfo is not None
    (ratio,) = document["ratios"]
    assert ratio == {"case": "c", "ours": "ours", "peer": "peer", "unit": "s"} | {
        "median": 2.5,
        "min": 2.0,
        "max": 3.0,
        "of_medians": 3.5 / 1.5,
    }
    assert program.main(["results"]) == 0
    page = (repository / "bench/RESULTS.md").read_text()
    assert f"1. `python -m bench events --runs 2`, {first['when']}, revision " in page
    assert "| c | s | peer | 2.50 | 2.00 | 3.00 | 2.33 |" in page
    assert "| c | ours | 1.5 | 1 | 2 | 2 | s | no agent | 1 |" in page
    assert capsys.readouterr().out.count("| c | s | peer |") == 1


def test_a_quick_run_leaves_the_results_alone(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    measure(monkeypatch, 1.0, 2.0)
    before = harness.path_of("events").read_bytes()
    (quick, _) = measure(monkeypatch, 5.0, 6.0, words=("--quick",))
    assert quick["values"] == [5.0, 6.0]
    assert harness.path_of("events").read_bytes() == before
    assert "quick" not in program.results_page()


def test_quick_results_are_not_committed() -> None:
    path = harness.path_of("events", quick=True)
    ignored = subprocess.run(["git", "check-ignore", "-q", path], cwd=path.parents[3])
    assert ignored.returncode == 0


@pytest.mark.parametrize(
    ("changed", "stale"), [("measured.py", True), ("other.py", False), ("measured.md", False)]
)
def test_a_figure_ages_with_the_code_that_it_measures_alone(
    monkeypatch: pytest.MonkeyPatch, repository: Path, changed: str, stale: bool
) -> None:
    measure(monkeypatch, 1.0, 2.0)
    assert "| no agent | 1 |" in program.results_page()
    (repository / changed).write_text("2\n")
    for _ in range(2):  # whether it is committed or not
        forget()
        assert ("| no agent | 1 (stale) |" in program.results_page()) == stale
        commit(repository)


def test_figures_of_code_that_is_not_committed_are_marked(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "other.py").write_text("2\n")
    assert measure(monkeypatch, 1.0, 2.0)[0]["revision"] == head
    (repository / "measured.py").write_text("2\n")
    forget()
    assert measure(monkeypatch, 1.0, 2.0)[0]["revision"] == f"{head}-dirty"
    commit(repository)
    assert f"revision {head[:12]}-dirty (stale)" in program.results_page()


def test_figures_of_a_revision_that_is_not_here_are_stale(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    measure(monkeypatch, 1.0, 2.0)
    path = harness.path_of("events")
    head = git(repository, "rev-parse", "HEAD")
    for revision in ("unknown", "0" * 40):
        path.write_text(path.read_text().replace(head, revision))
        assert "| no agent | 1 (stale) |" in program.results_page()
        head = revision
    shutil.rmtree(repository / ".git")
    assert measure(monkeypatch, 1.0, 2.0)[0]["revision"] == "unknown"


def test_cases_that_are_not_measured_keep_their_own_stamps(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    def keep(command: str, *names: str) -> dict[str, harness.Case]:
        made = [harness.Case(name, "ours", "s", "lower", [1.0]) for name in names]
        path = harness.keep("events", made, names=["read", "write"], command=command)
        return {case.case: case for case in harness.load(path)[1]}

    old = keep("first", "read", "write", "write CPU")
    (repository / "measured.py").write_text("2\n")
    head = commit(repository)
    new = keep("second", "read")
    assert (new["read"].revision, new["read"].command) == (head, "second")
    assert new["write"] == old["write"]
    assert new["write CPU"] == old["write CPU"]
    assert old["write"].revision not in ("", head)
    page = program.results_page()
    assert "| read | ours | 1 | 1 | 1 | 1 | s |  | 1 |" in page
    assert "| write | ours | 1 | 1 | 1 | 1 | s |  | 2 (stale) |" in page
    monkeypatch.setattr(harness, "machine", lambda: {"cpus": 64})
    elsewhere = keep("third", "read")["write"].conditions
    assert elsewhere.startswith("another machine (cpus ")


def test_every_floor_stands_beside_its_figure(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    bounds = (
        floors.Floor("c", "s", "peer", at_least=2.4),
        floors.Floor("c", "s", "peer", at_least=2.4, kinds=floors.BOTH),
        floors.Floor("c", "s", "peer", at_most=0.42, kinds=floors.BOTH),
        floors.Floor("c", "s", at_most=1.5),
        floors.Floor("c", "s", at_most=1.4),
        floors.Floor("d", "s", "peer", at_least=1),
    )
    monkeypatch.setattr(floors, "FLOORS", {"events": bounds})
    measure(monkeypatch, 1.0, 2.0)  # 2.5 x by pairs, 2.33 x by medians
    page = program.results_page()
    pairs = "| events | c | s | peer | ≥ 2.4 times | 2.5 (median of ratios)"
    assert f"{pairs} | held |" in page
    assert f"{pairs}, 2.33 (ratio of medians) | MISSED |" in page
    times = "| events | c | s | peer | ≤ 0.42 times | 0.4 (median of ratios)"
    assert f"{times}, 0.429 (ratio of medians) | MISSED |" in page
    assert "| events | c | s |  | ≤ 1.5 s | 1.5 (median) | held |" in page
    assert "| events | c | s |  | ≤ 1.4 s | 1.5 (median) | MISSED |" in page
    assert "| events | d | s | peer | ≥ 1 times |  | not measured |" in page
    beside = "≥ 2.4 times: held; ≥ 2.4 times: MISSED; ≤ 0.42 times: MISSED"
    assert f"| c | s | peer | 2.50 | 2.00 | 3.00 | 2.33 | {beside} |" in page
    (repository / "measured.py").write_text("2\n")
    forget()
    assert f"{pairs} | held (stale) |" in program.results_page()


def test_a_floor_of_many_rounds_is_not_told_of_fewer(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    bounds = [
        floors.Floor("c", "s", "peer", at_least=2.4, rounds=rounds, kinds=kinds)
        for rounds in (2, 3)
        for kinds in ((floors.PAIRS,), floors.BOTH)
    ]
    monkeypatch.setattr(floors, "FLOORS", {"events": bounds})
    measure(monkeypatch, 1.0, 2.0)  # 2.5 x by pairs, 2.33 x by medians
    page = program.results_page()
    row = "| events | c | s | peer | ≥ 2.4 times in ≥ {} rounds | 2.5 (median of ratios)"
    assert f"{row.format(2)} | held |" in page
    assert f"{row.format(3)} | too few rounds |" in page
    medians = "2.33 (ratio of medians)"
    assert f"{row.format(2)}, {medians} | MISSED |" in page
    assert f"{row.format(3)}, {medians} | MISSED in too few rounds |" in page


def test_each_mount_of_a_command_has_its_floors() -> None:
    """A case that is measured without one could miss it unseen."""
    with_floor = {floor.case for floor in floors.FLOORS["fuse"]}
    assert set(fuse.CASES) - with_floor == set(fuse.PASSED)


def test_each_bench_names_what_it_measures_and_it_is_there() -> None:
    for name in program.NAMES:
        paths = revisions.measured_paths(name)
        own = Path(module_of(name).__file__).relative_to(revisions.ROOT)
        assert own.as_posix() in paths
        assert [path for path in paths if not any(revisions.ROOT.glob(path))] == []
    assert set(floors.FLOORS) <= set(program.NAMES)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("depsnap", read_ahead.DEPS_RUN + read_ahead.DEPS_RESTORE),
        ("image", read_ahead.IMAGE_MOUNT),
        ("plain", read_ahead.DEPS_RUN + read_ahead.DEPS_RESTORE + read_ahead.IMAGE_MOUNT),
    ],
)
def test_what_a_measured_command_imports_ages_its_figures(
    name: str, modules: Sequence[str]
) -> None:
    ours = {f"{module}.py" for module in modules if module.startswith("bootseer/")}
    found = git(revisions.ROOT, "ls-files", "--", *revisions.measured_paths(name)).split()
    assert sorted(ours - set(found)) == []
    assert len(ours) > 20


def test_single_cases_are_said_to_be_of_those_benches_that_have_some() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "bench", "--help"],
        cwd=revisions.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    modules = {name: module_of(name) for name in program.NAMES}
    having = [n for n, m in modules.items() if hasattr(m, "CASES") and hasattr(m, "measure")]
    assert f"these alone ({', '.join(sorted(having))})" in said


def test_a_command_names_no_place_of_the_machine() -> None:
    words = ["1 Gbit/s", "--store", "/a/b c", "--store=/d", "--runs", "9"]
    shown = harness.command_line("image", words)
    assert shown == "python -m bench.image '1 Gbit/s' --store DIR --store=DIR --runs 9"


def test_committed_figures_have_all_their_stamps() -> None:
    for path in harness.RESULTS.glob("*.json"):
        for case in harness.load(path)[1]:
            assert all((case.when, case.revision, case.command, case.conditions)), case


def test_a_benchmark_with_conditions_of_its_own_stamps_what_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    cases = [
        harness.Case("a", harness.OURS, "s", "lower", [1.0]),
        harness.Case("b", harness.OURS, "s", "lower", [1.0], conditions="page cache warm"),
    ]
    _, saved = harness.load(harness.save("depsnap", cases, command="c"))
    assert [c.conditions for c in saved] == [harness.UNLESS_TOLD["depsnap"], "page cache warm"]


def offer_cases(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, float | BaseException]
) -> list[list[str]]:
    """Have bench `events` measure single cases, of these figures; what it is asked for."""
    asked: list[list[str]] = []

    def measure_cases(
        options: harness.Options,
        wanted: Sequence[str],
        keep: Callable[[list[harness.Case]], None],
    ) -> list[harness.Case]:
        asked.append(list(wanted))
        made = []
        for name in wanted:
            figure = figures[name]
            if isinstance(figure, BaseException):
                raise figure
            found = [harness.Case(name, "ours", "s", "lower", [figure])]
            keep(found)
            made += found
        return made

    monkeypatch.setattr(events, "CASES", tuple(figures), raising=False)
    monkeypatch.setattr(events, "measure", measure_cases, raising=False)
    return asked


def kept(*, quick: bool = False) -> dict[str, list[float]]:
    return {c.case: c.values for c in harness.load(harness.path_of("events", quick=quick))[1]}


def test_single_cases_are_measured_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    offer_cases(monkeypatch, {"read": 1.0, "write": 2.0, "gone": 3.0})
    assert program.main(["events"]) == 0
    asked = offer_cases(monkeypatch, {"read": 4.0, "write": 5.0})
    assert program.main(["events", "--runs", "2", "write"]) == 0
    assert asked == [["write"]]
    assert kept() == {"read": [1.0], "write": [5.0], "gone": [3.0]}
    assert program.main(["events", "--quick", "read"]) == 0
    assert kept(quick=True) == {"read": [4.0]}
    assert program.main(["events"]) == 0
    assert kept() == {"read": [4.0], "write": [5.0]}


def test_a_run_that_is_cut_off_keeps_what_it_has_finished(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    offer_cases(monkeypatch, {"read": 1.0, "write": 2.0})
    assert program.main(["events"]) == 0
    offer_cases(monkeypatch, {"read": 3.0, "write": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        program.main(["events"])
    assert kept() == {"read": [3.0], "write": [2.0]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fuse", "stripe mount"], "has no case 'stripe mount'; its cases: 'stripe mount buffered"),
        (["report", "x"], "bench report has no case 'x'; its cases: none: it runs as a whole"),
    ],
)
def test_a_case_that_a_bench_does_not_have_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_cases_of_floors_are_among_those_of_their_bench() -> None:
    for name, bounds in floors.FLOORS.items():
        cases = getattr(module_of(name), "CASES", None)
        if cases is not None:
            assert {floor.case for floor in bounds} <= set(cases)


@pytest.mark.parametrize("runs", ["0", "-1", "x"])
def test_runs_that_are_no_count_are_refused(runs: str) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["events", "--runs", runs])
    assert ended.value.code == 2


def test_the_results_page_is_current() -> None:
    """But for what has become stale since it was written."""
    page = Path(program.__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
    made = program.results_page()
    fresh = [text.replace(program.STALE, "") for text in (page, made)]
    assert fresh[0] == fresh[1], "run `python -m bench results`"


def test_free_memory_is_kept_and_let_go_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tmp_path / "page_reporting_order"
    monkeypatch.setattr(memory, "LEAST_ORDER", order)
    with memory.kept():  # no host that asks for any
        assert harness.machine()["free_memory"] == "kept"
    assert not order.exists()
    order.write_text("9\n")
    assert harness.machine()["free_memory"] == "given back to the host"
    with memory.kept():
        assert harness.machine()["free_memory"] == "kept"
    assert order.read_text() == "9\n"
