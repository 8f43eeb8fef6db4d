"""Help answers at once: it loads nothing of the features that its commands use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HELP = """
import contextlib, io, json, sys
from bootseer.cli import root
with contextlib.redirect_stdout(io.StringIO()) as shown:
    try:
        code = root.main([*sys.argv[1:], "--help"])
    except SystemExit as end:
        code = end.code
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("bootseer.")}
print(json.dumps([code, "Usage:" in shown.getvalue(), sorted(rooms)]))
"""


@pytest.mark.parametrize(
    "words",
    [
        "",
        "deps",
        "deps restore",
        "history",
        "image",
        "image hotset",
        "image files",
        "k8s",
        "stripe",
    ],
)
def test_help_loads_no_feature(words: str) -> None:
    command = [sys.executable, "-c", HELP, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    code, shown, rooms = json.loads(done.stdout)
    assert (code, shown) == (0, True)
    assert {"cli", "errors"} <= set(rooms) <= {"cli", "errors", "system"}
