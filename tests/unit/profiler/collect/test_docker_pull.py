"""`bootseer import docker`: a timed pull by a real Podman, and Docker's own words for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessDeniedError, NoSpaceError, NotFoundError, StoreUnavailableError
from bootseer.profiler.collect.docker_pull import PullTimes, pull_error
from tests.support.samples.images import Image, file, write_layout

MS = 1_000_000
DIGEST = "sha256:" + "c" * 64


def dockers_words() -> list[tuple[int, dict[str, Any]]]:
    """(milliseconds, line): two layers that travel and one that is there, as Docker tells it."""

    def step(at: int, name: str, status: str, **detail: int) -> tuple[int, dict[str, Any]]:
        return at, {"id": name, "status": status, "progressDetail": detail}

    return [
        (0, {"status": "Pulling from library/x", "id": "1"}),
        step(1, "aa", "Pulling fs layer"),
        step(1, "bb", "Pulling fs layer"),
        step(1, "cc", "Already exists"),
        step(2, "bb", "Waiting"),
        step(10, "aa", "Downloading", current=5, total=1000),
        step(60, "aa", "Verifying Checksum"),
        step(61, "aa", "Download complete"),
        step(62, "bb", "Downloading", current=1, total=50),
        step(70, "aa", "Extracting", current=1, total=1000),
        step(80, "bb", "Download complete"),
        step(100, "aa", "Pull complete"),
        step(130, "bb", "Pull complete"),
        (131, {"status": f"Digest: {DIGEST}"}),
        (131, {"status": "Status: Downloaded newer image for x:1"}),
    ]


def test_dockers_lines_become_downloads_and_extractions() -> None:
    times = PullTimes("x:1", 0)
    for at, line in dockers_words():
        times.take(line, at * MS)
    spans = [
        (s.name, s.attributes.get("container.image.layer"), s.begin_ns // MS, s.end_ns // MS)
        for s in times.spans(140 * MS)
    ]
    assert spans == [
        ("image.pull", None, 0, 140),
        ("image.pull.download", "aa", 10, 60),
        ("image.pull.download", "bb", 62, 80),
        ("image.pull.extract", "aa", 70, 100),
        ("image.pull.extract", "bb", 100, 130),  # told by its end alone: after the one before
    ]
    whole = times.spans(140 * MS)[0].attributes
    assert whole["bootseer.bytes"] == 1050
    assert (whole["bootseer.layers"], whole["bootseer.layers.present"]) == (3, 1)
    assert times.digest == DIGEST
    assert times.not_observed == []


@pytest.mark.parametrize(
    "line",
    [{}, {"id": 5, "status": None}, {"id": "x", "progressDetail": []}, {"status": ["Waiting"]},
     {"id": "x", "status": "Downloading", "progressDetail": {"total": "many"}}],
)  # fmt: skip
def test_lines_of_another_shape_are_borne(line: dict[str, Any]) -> None:
    times = PullTimes("x", 0)
    times.take(line, 5)
    assert times.spans(9)[0].name == "image.pull"
    assert "image.pull.extract" in times.not_observed


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("manifest unknown", NotFoundError),
        ("pull access denied for x, repository does not exist", AccessDeniedError),
        ("write /var/x: no space left on device", NoSpaceError),
        ('Get "https://cdn.io/blob?verify=17-secret%3D": EOF', StoreUnavailableError),
        ("dial tcp: i/o timeout at https://bob:secret@reg.io/?token=secret", StoreUnavailableError),
    ],
)
def test_what_a_program_says_of_a_failure_has_its_class(said: str, kind: type[Exception]) -> None:
    error = pull_error(said, "x:1")
    assert type(error) is kind
    assert "secret" not in str(error)
    times = PullTimes("x:1", 0)
    times.take({"error": said}, 5)
    span = times.spans(9)[0]
    assert (span.status, span.attributes["error.type"]) == ("error", kind.__name__)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "import", "docker", *words],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "BOOTSEER_EVENTS": f"{folder}/ev"},
        timeout=120,
        check=False,
    )


def spans_of(folder: Path) -> list[dict[str, Any]]:
    """The ends that the one event file holds, each with the seconds since its begin."""
    (path,) = (folder / "ev").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begun = {line["span_id"]: line for line in lines if line["event"] == "begin"}
    ends = [line for line in lines if line["event"] == "end"]
    for line in ends:
        line["ns"] = line["time_unix_nano"] - begun[line["span_id"]]["time_unix_nano"]
    path.unlink()
    return ends


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.debian("podman")
def test_a_pull_by_podman_is_timed(registry: Any, podman: Any, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3_000_000)
    made = write_layout(
        tmp_path / "layout", Image([[file("a", data)], [file("b", data[::-1])]]), tag="1"
    )
    image = registry.push(made.source, "import/docker", "1")
    with podman.service() as url:
        done = run(tmp_path, image, "--socket", url, "--anew", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        summary = json.loads(done.stdout)
        assert summary["digest"].startswith("sha256:")
        assert summary["not_observed"] == ["image.pull.extract"]  # Podman does not tell
        ends = spans_of(tmp_path)
        names = [line["name"] for line in ends]
        assert names.count("image.pull") == 1
        assert names.count("image.pull.download") >= 2
        whole = next(line for line in ends if line["name"] == "image.pull")
        assert whole["status"] == "ok"
        assert all(0 < line["ns"] <= whole["ns"] for line in ends)

        again = run(tmp_path, image, "--socket", url)
        assert again.returncode == 0
        assert again.stdout.count("there already") == 2
        spans_of(tmp_path)
        anew = run(tmp_path, image, "--socket", url, "--anew")
        assert "there already" not in anew.stdout
        spans_of(tmp_path)

        missing = run(tmp_path, f"{registry.host}/no/such:1", "--socket", url)
        assert missing.returncode == NotFoundError.exit_code
        assert missing.stderr.count("\n") == 1
        (failed,) = spans_of(tmp_path)
        assert (failed["name"], failed["status"]) == ("image.pull", "error")
    away = run(tmp_path, image, "--socket", url)
    assert away.returncode == StoreUnavailableError.exit_code
    assert "no container program answers" in away.stderr
    assert run(tmp_path, "Not A Name", "--socket", url).returncode == 2
