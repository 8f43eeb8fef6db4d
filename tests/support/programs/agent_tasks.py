"""Tasks for tests of the fork server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from bootseer.agent.client_programs import ClientPrograms
from bootseer.agent.protocol import ALIVE_S, DECLINED


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


def undo(words: list[str]) -> int:
    """Wait to be interrupted, and undo for longer than a client waits for a sign of life."""
    folder = Path(words[2])
    try:
        (folder / f"begun-{os.getpid()}").touch()
        time.sleep(60.0)
    except KeyboardInterrupt:
        end_s = time.monotonic() + 3 * ALIVE_S
        while time.monotonic() < end_s:
            time.sleep(0.01)
        (folder / "undone").touch()
        raise
    return 0


def die(_: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fail(_: list[str]) -> int:
    raise RuntimeError("as told")


def leave(words: list[str]) -> int:
    sys.exit(int(words[2]))


def decline(_: list[str]) -> int:
    return DECLINED


def have_run_before(_: list[str], programs: ClientPrograms) -> int:
    """Die after a program that is not yet what the client is for."""
    programs.run_before(["true"])
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def have_run_again(_: list[str], programs: ClientPrograms) -> int:
    """Die on the way to a second container, where the first one could not be made."""
    programs.run(["false"])
    programs.run_before(["true"])
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def have_run(words: list[str], programs: ClientPrograms) -> int:
    """Have the client run two programs; files of ours in a folder tell how it went."""
    folder = Path(words[2])
    (folder / f"begun-{os.getpid()}").touch()
    os.environ["FROM_TASK"] = "told"
    signals: list[int] = []
    try:
        codes = [programs.run(words[3:], signals.append), programs.run(["true"])]
        (folder / "codes").write_text(json.dumps([*codes, signals]))
        time.sleep(1.0)  # signs of life are given again
    except BaseException:
        (folder / "undone").touch()
        raise
    return 250
