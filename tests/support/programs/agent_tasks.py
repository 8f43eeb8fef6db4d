"""Tasks for tests of the fork server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def describe(words: list[str]) -> int:
    """Write what the task was given, as mounting does: without Python's stream."""
    about = {"words": words, "directory": os.getcwd(), "given": os.environ.get("GIVEN")}
    os.write(1, json.dumps(about).encode() + b"\n")
    return 7


def wait(words: list[str]) -> int:
    """Wait for the file `go` in a folder, where the files of ours tell how it went."""
    folder = Path(words[2])
    try:
        (folder / f"begun-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    except KeyboardInterrupt:
        (folder / f"interrupted-{os.getpid()}").touch()
        raise
    return 0


def die(_: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fail(_: list[str]) -> int:
    raise RuntimeError("as told")


def leave(words: list[str]) -> int:
    sys.exit(int(words[2]))
