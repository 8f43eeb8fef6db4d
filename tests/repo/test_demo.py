"""The demonstration in miniature: the same program, a tiny package and checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from bootseer.errors import NoSpaceError
from bootseer.profiler.report.model import PartUse
from tests.support.samples.wheels import make_wheel
from tools import machine, netdelay
from tools.demo import __main__ as demo
from tools.demo import checkpoints, containers, lab, options, stages, starts
from tools.podman import mounts_below

pytestmark = pytest.mark.slow

TRAIN = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint")
parser.add_argument("--make", action="store_true")
given = parser.parse_args()
if given.make:
    with open(given.checkpoint, "wb") as file:
        file.write(bytes(1 << 16))
    sys.exit()
from bootseer import phase
with phase("imports"):
    import tinything
with phase("checkpoint.load"):
    size = os.path.getsize(given.checkpoint)
with phase("first_step"):
    print("loss", tinything.VERSION, size)
"""


@pytest.fixture
def chosen(tmp_path: Path) -> options.Options:
    job, wheels = tmp_path / "job", tmp_path / "kept" / "wheels"
    job.mkdir()
    wheels.mkdir(parents=True)
    (job / "train.py").write_text(TRAIN)
    (job / "requirements.txt").write_text("tinything==1.0\n")
    make_wheel(wheels, "tinything", "1.0")
    # What marks a complete download: these requirements for this Python.
    (wheels / "complete.txt").write_text("tinything==1.0\n" + sys.version)
    return options.Options(
        job=job,
        out=tmp_path / "out",
        kept=tmp_path / "kept",
        scratch=tmp_path / "scratch",
        cold=False,
        floor=None,
        job_arguments=(),
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment as the demonstration makes it."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def ready(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's environment is copied; making one takes as long as all starts of the test."""

    def copy(place: lab.Lab) -> None:
        place.call(["cp", "-a", str(environment), str(place.base)], "copy the environment")

    monkeypatch.setattr(lab.Lab, "make_base", copy)


def test_the_demonstration_in_miniature(
    chosen: options.Options, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Console(stderr=True, width=200)
    assert demo.run(chosen, said) == 0, capsys.readouterr().err
    document = json.loads((chosen.out / "report.json").read_text())
    assert document["comparison"]["baseline"]["starts"] == 3
    assert document["comparison"]["candidate"]["starts"] == 3
    assert document["comparison"]["speedup"] > 0
    used = {name: part["used"] for name, part in document["parts"].items()}
    assert used == {"image": False, "deps": True, "checkpoint": True}
    assert all(part["reason"] for part in document["parts"].values())
    assert any("page cache stays warm" in line for line in document["emulated"])
    assert "checkpoint store: a local directory" in document["emulated"]
    assert (chosen.out / "report.html").read_text().startswith("<!")
    assert sorted(path.name for path in chosen.out.iterdir()) == ["report.html", "report.json"]
    assert not chosen.scratch.exists()
    shown = capsys.readouterr().out
    for label in ("plain install", "snapshot not there yet", "fresh node", "second start"):
        assert label in shown


@pytest.mark.debian("openjdk-17-jre-headless")
def test_the_checkpoint_may_lie_on_a_real_hdfs(
    chosen: options.Options,
    ready: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make demo STORE=hdfs`, in servers of its own."""
    kept: dict[str, int] = {}
    put_away = checkpoints.Hdfs.keep

    def keep(place: checkpoints.Hdfs, file: Path) -> None:
        put_away(place, file)
        with urllib.request.urlopen(listing_of(place.url), timeout=60) as answer:
            listed = json.load(answer)["FileStatuses"]["FileStatus"]
        kept.update({entry["pathSuffix"]: entry["length"] for entry in listed})

    monkeypatch.setattr(checkpoints.Hdfs, "keep", keep)
    parsed = options.parse(["--store", "hdfs"])
    chosen = dataclasses.replace(chosen, store=parsed.store)
    assert demo.run(chosen, Console(stderr=True, width=200)) == 0, capsys.readouterr().err
    assert kept[checkpoints.NAME] == 1 << 16  # the plain one, on the NameNode's own word
    assert "striped" in kept
    document = json.loads((chosen.out / "report.json").read_text())
    assert {name: part["used"] for name, part in document["parts"].items()} == {
        "image": False,
        "deps": True,
        "checkpoint": True,
    }
    assert any("HDFS" in line for line in document["emulated"])
    for side in ("baseline", "candidate"):
        assert document["comparison"][side]["starts"] == 3
    shown = capsys.readouterr().out
    assert "fresh node" in shown
    assert not chosen.scratch.exists()


def listing_of(striped_url: str) -> str:
    """WebHDFS's address for the folder that holds both checkpoints."""
    host = striped_url.removeprefix("webhdfs://").partition("/")[0]
    return f"http://{host}/webhdfs/v1/checkpoints?op=LISTSTATUS"


def test_where_containers_cannot_run_the_part_says_why(
    chosen: options.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(chosen.kept))
    why = containers.missing()
    assert "root" in why or f"{', '.join(containers.PROGRAMS)} not installed" in why


@pytest.mark.root
@pytest.mark.debian("nginx-light")
@pytest.mark.debian("podman")
@pytest.mark.debian("docker-registry")
def test_where_the_link_cannot_be_emulated_the_part_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert containers.missing() == ""
    lacking = tmp_path / "delay.c"
    lacking.write_text('#include "not-installed.h"\n')
    monkeypatch.setattr(netdelay, "SOURCE", lacking)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "install Debian's libnetfilter-queue-dev" in containers.missing()


@pytest.mark.timeout(1500)  # four minutes alone on two slow cores
@pytest.mark.root
@pytest.mark.debian("nginx-light")
@pytest.mark.debian("podman")
@pytest.mark.debian("docker-registry")
def test_the_job_in_its_container(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of what `make demo` does as root."""
    given = options.parse(["--out", str(tmp_path / "out"), "--link", "1000/1"])
    chosen = dataclasses.replace(given, rounds=1, floor=None)
    assert chosen.containers
    assert demo.run(chosen, Console(stderr=True, width=200)) in (0, demo.FLOOR_MISSED)
    shown = capsys.readouterr()
    assert "wrong:" not in shown.err
    for label in containers.LABELS.values():
        assert label in shown.out
    document = json.loads((chosen.out / "report.json").read_text())
    assert {name: part["used"] for name, part in document["parts"].items()} == {
        "image": True,
        "deps": True,
        "checkpoint": True,
    }
    assert any("1000 Mbit/s, 1 ms" in line for line in document["emulated"])
    assert not chosen.scratch.exists()
    short = Path(f"/tmp/sl-{os.getpid()}")  # see `StartLab`; other tests mount as well
    assert mounts_below(tmp_path) + mounts_below(short) == []


def test_the_link_is_given_as_its_rate_and_its_round_trip(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert options.parse([]).link == options.Link(1000, 1)
    assert options.parse(["--link", "200/5"]).link == options.Link(200, 5)
    assert options.parse(["--link", "0"]).link == options.Link(0, 0)
    for text in ("fast", "1/x", "-1/1"):
        with pytest.raises(SystemExit):
            options.parse([f"--link={text}"])


def test_a_job_that_fails_ends_it_and_leaves_nothing(chosen: options.Options, ready: None) -> None:
    (chosen.job / "train.py").write_text(TRAIN + "\nsys.exit('no luck')\n")
    with pytest.raises(demo.NotSupportedError, match=r"(?s)the job failed \(1\).*no luck"):
        demo.run(chosen, Console(stderr=True))
    assert not chosen.scratch.exists()


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(["--rounds", "2"])
    assert ended.value.code == 2


def test_what_stands_at_the_places_given_stays(tmp_path: Path) -> None:
    """The scratch directory is emptied, so it must be one that nobody else made."""
    for words in (["--scratch", str(tmp_path)], ["--out", str(tmp_path)]):
        scratch = options.parse(words).scratch
        assert scratch.parent == tmp_path
        assert scratch.name == "bootseer-demo-scratch"


def test_what_a_fingerprint_sees(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side / "d").mkdir(parents=True)
        for name in ("same", "changed", "moved.pyc", "later"):
            (tmp_path / side / "d" / name).write_text("x")
            os.utime(tmp_path / side / "d" / name, (1, 1))
        (tmp_path / side / "link").symlink_to("d")
    (tmp_path / "b" / "d" / "changed").write_text("y")
    os.utime(tmp_path / "b" / "d" / "changed", (1, 1))
    (tmp_path / "b" / "d" / "moved.pyc").write_text("z")
    os.utime(tmp_path / "b" / "d" / "later", (2, 2))
    (tmp_path / "b" / "more").touch()
    one, two = (machine.fingerprint(tmp_path / side) for side in "ab")
    assert machine.differences(one, two) == ["d/changed", "d/later", "d/moved.pyc", "more"]
    two_installs = machine.contents(one), machine.contents(two)
    assert machine.differences(*two_installs) == ["d/changed", "more"]


def test_every_part_of_the_report_has_a_stage() -> None:
    assert [stage.name for stage in stages.all_stages()] == ["deps", "checkpoint"]


def test_a_part_counts_as_used_only_where_it_was(tmp_path: Path) -> None:
    def start(name: str, result: str) -> starts.Start:
        place = tmp_path / name
        place.mkdir()
        attributes = {"bootseer.deps.result": result, "bootseer.deps.form": "copy"}
        line = {"event": "end", "name": "deps.install", "attributes": attributes}
        (place / "a.jsonl").write_text(json.dumps(line) + "\n")
        return starts.Start("fresh", place, 0, "", 1.0)

    good, bad = start("good", "restored"), start("bad", "installed")
    assert stages.Deps().use([good]) == PartUse(True, "restored from a snapshot (copy)")
    assert stages.Deps().use([good, bad]) == PartUse(False, "restored in 1 of 2 starts only")
    assert not stages.Deps().use([]).used


def test_image_caches_need_more_of_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = types.SimpleNamespace(total=100 << 30, free=18 << 30)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    machine.require_space(tmp_path)
    with pytest.raises(NoSpaceError, match="leave 15% of a disk to others; free space"):
        machine.require_space(tmp_path, images=True)
    usage.free = 19 << 30
    machine.require_space(tmp_path, images=True)
    usage.free = 2 << 30
    with pytest.raises(NoSpaceError, match="2048 MiB free, the demo needs 4096; free space"):
        machine.require_space(tmp_path)
