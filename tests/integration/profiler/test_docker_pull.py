"""`bootseer import docker`: a timed pull by a real Podman."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import NotFoundError, StoreUnavailableError
from tests.support.samples.images import Image, file, write_layout


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
