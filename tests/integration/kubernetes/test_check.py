"""`bootseer k8s check` as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.samples.manifests import pod_of


def test_the_command_says_it_in_words_and_in_json(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text(
        pod_of("good") + "---\n" + pod_of("bad").replace("    command: [train]\n", ""),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "bootseer", "k8s", "check", "-f", str(path), "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    good, bad = done.stdout.split("Pod/bad", 1)
    assert "can be injected; tier none" in good
    assert "refused: the command of container main is its image's" in bad
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
    assert [bool(one["refusal"]) for one in told] == [False, True]
    path.write_text(pod_of("good"), encoding="utf-8")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
