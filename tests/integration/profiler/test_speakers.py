"""Logs of several ranks: each rank that the lines name is one of the start's."""

from __future__ import annotations

import datetime
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import columns
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import Report
from tests.support.paths import DATA
from tests.support.samples.event_files import EventFile

BASE = datetime.datetime(2026, 3, 1, 10)
LINES = (
    (0.0, "Starting job: Llama 3 8B training"),
    (5.0, "Building 1-D device mesh with ['dp_shard'], [4]"),
    (6.0, "Building llama3 8B with TransformerModelArgs(dim=4096)"),
    (20.0, "CUDA memory usage for model: 15.00GiB(16%)"),
    (21.0, "Training starts at step 1, with local batch size 1"),
    (30.0, "step:  1  loss:  8.1  memory: 1 GiB"),
)


def titan_log(prefix: str, *, ranks: int, hung: int, slow: int) -> bytes:
    """torchtitan's lines of all ranks; one takes 20 s longer for its model, one has no step."""
    lines = []
    for rank in range(ranks):
        for at_s, text in LINES[:-1] if rank == hung else LINES:
            late_s = 20.0 if rank == slow and at_s > 6 else 0.0
            moment = BASE + datetime.timedelta(seconds=at_s + late_s + rank / 100)
            stamp = moment.strftime("%Y-%m-%d %H:%M:%S,") + f"{moment.microsecond // 1000:03d}"
            line = f"{prefix.format(rank)}[titan] {stamp} - root - INFO - {text}"
            lines.append((moment, line))
    return "".join(f"{line}\n" for _, line in sorted(lines)).encode()


def imported(folder: Path, log: bytes) -> Report:
    words = ["import", "log", "--rules", "torchtitan", "-", "--events", str(folder)]
    subprocess.run([sys.executable, "-m", "bootseer", *words], input=log, check=True, timeout=60)
    return analysis.analyse(load([str(folder)]))


@pytest.mark.parametrize("prefix", ["[rank{}]:", "{: >2}: ", "[default{}]:", "[1,{}]<stderr>:"])
def test_ranks_of_a_log_are_the_starts(tmp_path: Path, prefix: str) -> None:
    """As found: none was counted, and the others' first step hid the rank that has none."""
    report = imported(tmp_path / "ev", titan_log(prefix, ranks=8, hung=2, slow=5))
    assert (report.start.ranks, report.start.processes) == (8, 8)
    assert not report.start.complete
    assert [(each.rank, each.phase) for each in report.unreached] == [(2, "first_step")]
    assert [(s.ranks, s.phase) for s in report.stragglers] == [((5,), "model.init")]
    model = next(phase for phase in report.phases if phase.name == "model.init")
    assert (model.p50_s, model.max_s) == (14.0, 34.0)


def test_ranks_of_one_node_alone_are_those_of_the_job(tmp_path: Path) -> None:
    """Two nodes' `[default0]:` are two ranks, but nobody says which: no numbers are invented."""
    log = titan_log("[default{}]:", ranks=2, hung=9, slow=9)
    for node in ("a", "b"):
        words = ["--rules", "torchtitan", "-", "--node", node, "--job-uid", "j"]
        subprocess.run(
            [sys.executable, "-m", "bootseer", "import", "log", *words, "--events", str(tmp_path)],
            input=log,
            check=True,
            timeout=60,
        )
    report = analysis.analyse(load([str(tmp_path)]))
    assert (report.start.nodes, report.start.ranks, report.start.processes) == (2, 0, 2)


def spoken(rank: int, **more: object) -> dict[str, object]:
    return {"bootseer.source": "log", "bootseer.rank": rank, **more}


def test_what_the_wrapper_saw_itself_belongs_to_all_its_ranks(tmp_path: Path) -> None:
    """An install before torchrun, the ranks' phases from its log, and one rank's own file."""
    wrapper = EventFile("n")
    wrapper.span("deps.install", 0, 10)
    for rank in range(2):
        for kind, at_s in (("begin", 10), ("end", 20 + rank)):
            wrapper.line(kind, 50 + rank, "model.init", at_s, "ok", spoken(rank))
        wrapper.line("point", 60 + rank, "first_step", 30 + rank, "ok", spoken(rank))
    # An agent's word of a worker makes no rank.
    wrapper.line("point", 70, "worker.exit", 12, "error", spoken(7))
    wrapper.write(tmp_path)
    own = EventFile("n", 1, bootseer__local_rank=1).span("imports", 22, 25)
    own.write(tmp_path)
    start = load([str(tmp_path)]).starts[0]
    names = {
        (s.identity.rank, s.identity.local_rank): sorted({span.name for span in s.spans})
        for s in start.sources
        if s.file.endswith(wrapper.name)
    }
    assert names == {
        (None, None): ["deps.install", "worker.exit"],
        (0, 0): ["first_step", "model.init"],
        (1, 1): ["first_step", "model.init"],
    }
    report = analysis.analyse(load([str(tmp_path)]))
    assert report.start.ranks == 2


def test_one_ranks_words_stay_the_jobs(tmp_path: Path) -> None:
    """A launcher that shows rank 0 alone has told of no more than the job."""
    report = imported(tmp_path / "ev", titan_log("[rank{}]:", ranks=1, hung=9, slow=9))
    assert (report.start.ranks, report.start.processes, report.start.complete) == (0, 1, True)


def test_a_worker_that_failed_has_its_exit_code_as_the_reason(tmp_path: Path) -> None:
    """As found: torchrun's agent had named it, and the report said that no reason was given."""
    log = str(DATA / "logs" / "torchrun_restart.log")
    words = ["import", "log", "--rules", "torchrun", log, "--events", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bootseer", *words], check=True, timeout=60)
    report = analysis.analyse(load([str(tmp_path)]))
    assert ("worker.exit", "exit code -6") in [(i.phase, i.reason) for i in report.incidents]


def test_each_rank_of_a_log_keeps_its_own_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As found with more ranks than forms are kept for: some had another rank's phases."""
    draw, log, true = random.Random(3), EventFile("n"), dict[str, int]()
    names = ("imports", "model.init", "compile", "deps.install", "checkpoint.load")
    for rank in range(400):
        at_s, drawn = 0.0, draw.choices(names, k=draw.randrange(4, 7))
        for name in sorted(set(drawn)):
            true[name] = true.get(name, 0) + 1
        for name in drawn:
            about: dict[str, object] = {"bootseer.source": "log", "bootseer.rank": rank}
            log.spans += 1
            log.line("begin", log.spans, name, at_s, attributes=about)
            log.line("end", log.spans, name, at_s + 1, attributes=about)
            at_s += 1.5
    log.write(tmp_path)
    monkeypatch.setattr(columns, "share_form", lambda form: (*form,))  # none is kept
    report = analysis.analyse(load([str(tmp_path)]))
    assert {phase.name: phase.processes for phase in report.phases} == true
