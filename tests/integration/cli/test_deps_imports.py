"""What a start of `deps run` imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.samples.wheels import make_wheel

HEAVY = {"click", "logging", "concurrent.futures", "uuid", "tempfile", "shutil", "hmac", "urllib"}

UNNEEDED_BY_A_PLACEMENT = HEAVY | {
    "ast",
    "copy",
    "dataclasses",
    "fnmatch",
    "glob",
    "hashlib",
    "inspect",
    "locale",
    "mmap",
}

UNNEEDED_BY_A_PLACEMENT |= {"_hashlib", "random", "shlex", "subprocess", "weakref"}


@pytest.mark.parametrize("starts", [2, pytest.param(3, marks=pytest.mark.root)])
def test_a_start_that_restores_imports_nothing_it_does_not_need(
    tmp_path: Path, starts: int
) -> None:
    """Each module that is read from a cold disk delays the job."""
    make_wheel(tmp_path / "wheels", "bootseer_alpha", "1.0")
    venv = tmp_path / "venv"
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "-q"]
    pip += ["--no-index", "--find-links", str(tmp_path / "wheels"), "bootseer_alpha==1.0"]
    words = ["deps", "run", "--store", str(tmp_path / "store"), "--cache", str(tmp_path / "cache")]
    words += ["--publish", "inline", "--", *pip]
    code = (
        "import sys; from bootseer import __main__ as main; code = main.main(sys.argv[1:]); "
        "print(code, *sorted(sys.modules))"
    )
    shown = []
    # Install, restore, and place, which root alone can.
    for unneeded in (set(), HEAVY, UNNEEDED_BY_A_PLACEMENT)[:starts]:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        try:
            start = [sys.executable, "-I", "-c", code, *words]
            done = subprocess.run(start, capture_output=True, text=True, check=True)
            installed = list(venv.rglob("bootseer_alpha/__init__.py"))
        finally:
            if os.path.ismount(venv):
                subprocess.run(["umount", str(venv)], check=True)
        assert (done.stderr, len(installed)) == ("", 1)
        shown = done.stdout.split()
        assert shown[0] == "0"
        assert set(shown) & unneeded == set()
        subprocess.run(["rm", "-r", str(venv)], check=True)
    assert starts == 2 or "bootseer.depsnap.shared_tree.forms" in shown
