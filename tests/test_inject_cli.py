"""`bootseer inject` and `uninject` as commands: files, pipes, refusals, what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """\
# the job
kind: Pod
metadata: {name: good}
spec:
  containers:
  - name: main
    image: x
    command: [train, --fast]
"""
BAD = GOOD.replace("good", "bad").replace("    command: [train, --fast]\n", "")


def bootseer(*words: str | Path, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "bootseer", *map(str, words)]
    return subprocess.run(command, input=data, capture_output=True, check=False)


def test_a_file_is_injected_in_place_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD, encoding="utf-8")
    path.chmod(0o640)
    done = bootseer("inject", "-f", path, "-o", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert "bootseer-init" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o640
    assert bootseer("uninject", "-f", path, "-o", path).returncode == 0
    assert path.read_text(encoding="utf-8") == GOOD
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_keeps_every_byte() -> None:
    raw = GOOD.replace("\n", "\r\n").replace("the job", "der Auftrag: ü").encode()
    injected = bootseer("inject", "-f", "-", "--store", "pvc:c", data=raw).stdout
    assert injected.count(b"\n") == injected.count(b"\r\n") > raw.count(b"\n")
    assert bootseer("inject", "-f", "-", "--store", "pvc:c", data=injected).stdout == injected
    assert bootseer("uninject", "-f", "-", data=injected).stdout == raw


def test_one_refused_pod_keeps_all_from_being_written(tmp_path: Path) -> None:
    path, out = tmp_path / "two.yaml", tmp_path / "out.yaml"
    path.write_text(f"{GOOD}---\n{BAD}", encoding="utf-8")
    done = bootseer("inject", "-f", path, "-o", out, "--offline")
    assert done.returncode == 7
    assert b"Pod/bad" in done.stderr
    assert b"1 of its pods cannot be injected, nothing was written" in done.stderr
    assert not out.exists()
    done = bootseer("inject", "-f", path, "-o", out, "--offline", "--skip-refused")
    assert done.returncode == 0
    assert b"Pod/bad" in done.stderr
    good, bad = out.read_text(encoding="utf-8").split("---\n")
    assert "bootseer-init" in good
    assert bad == BAD
    done = bootseer("inject", "-f", path, "--offline", "--command", "python 'a b.py'")
    assert done.stdout.count(b"name: bootseer-init") == 2
    assert b"a b.py" in done.stdout


def test_explaining_says_each_change_and_its_reason_and_writes_no_manifest() -> None:
    done = bootseer("inject", "-f", "-", "--explain", data=GOOD.encode())
    said = done.stdout.decode()
    assert done.returncode == 0
    assert "line 6: Pod/good spec: command: /opt/bootseer/bin/bootseer, start, --" in said
    assert "    copies the wrapper into the pod" in said
    assert "kind: Pod" not in said
    done = bootseer("inject", "-f", "-", "--explain", "--json", "--offline", data=BAD.encode())
    assert done.returncode == 7
    (refusal,) = json.loads(done.stdout)["refusals"]
    assert refusal["pod"] == "Pod/bad spec"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--parts", "events,nonsense"), 2, "unknown 'nonsense'; there are events, image, deps"),
        (("--tier", "fuse"), 2, "needs --fuse-resource"),
        (("--events", "somewhere"), 2, "write pvc:CLAIM or host:/DIRECTORY"),
        (("--cache", "host:relative"), 2, "write pvc:CLAIM or host:/DIRECTORY"),
        (("-f", "/no/such/file"), 3, "/no/such/file"),
        (("-o", "/no/such/folder/x"), 3, "/no/such/folder/x"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(words: tuple[str, ...], code: int, message: str) -> None:
    done = bootseer("inject", "-f", "-", *words, data=GOOD.encode())
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_a_manifest_without_pods_is_written_as_it_was() -> None:
    raw = b"kind: ConfigMap\ndata: {a: b}\n"
    done = bootseer("inject", "-f", "-", data=raw)
    assert (done.returncode, done.stdout) == (0, raw)
    assert b"no pod in it" in done.stderr
