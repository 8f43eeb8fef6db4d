"""A small job with its own install command, started for real through `bootseer start`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load
from tests.support.waiting import until

JOB_EXIT = 7
MARKER = "BOOTSEER_PART_ID"

# Installs one file, counts how often it ran, and does whatever the test put into `extra.sh`.
INSTALL = """
echo run >> installs
[ ! -e extra.sh ] || . ./extra.sh
mkdir -p site && cp payload site/module
echo installed
"""


class Place:
    """A working directory with an install command, a job and the settings for both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events"
        self.store = path / "store"
        self.flags: list[str] = []
        self.environ: dict[str, str] = {}
        self.publish = "inline"
        self.store_timeout_s = 60.0  # a busy disk is no store that hangs
        self._begun: list[subprocess.Popen] = []
        (path / "install.sh").write_text(INSTALL)
        (path / "requirements").write_text("module==1\n")
        (path / "payload").write_bytes(b"payload\n" * 1000)

    def settings(self, more: str = "", job: str = "") -> Path:
        values = {
            "install": ["sh", "install.sh"],
            "key_files": ["requirements"],
            "also": [str(self.path / "site")],
            "store": str(self.store),
            "store_timeout_s": self.store_timeout_s,
            "publish": self.publish,
        }
        lines = "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        path = self.path / "bootseer.toml"
        path.write_text(f"[job]\nuid = 'u'\n{job}\n[deps]\n{lines}{more}\n")
        return path

    @property
    def command(self) -> list[str]:
        # bootseer itself needs no more of this environment than its interpreter.
        return [sys.executable, "-m", "bootseer", "start", *self.flags, "--"]

    @property
    def full_environ(self) -> dict[str, str]:
        foreign = ("BOOTSEER_", "RANK", "WORLD_SIZE", "XDG_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        own = {"HOME": str(self.path / "home"), "BOOTSEER_EVENTS": str(self.events)}
        return {**kept, **own, **self.environ}

    def start(self, job: Sequence[str] = ("sh", "-c", "cmp payload site/module && exit 7"), **more):
        """Run to the end."""
        return subprocess.run(
            [*self.command, *job],
            cwd=self.path,
            env=self.full_environ,
            capture_output=True,
            timeout=120,
            check=False,
            **more,
        )

    def begin(self, job: Sequence[str] = ("touch", "job-began")) -> subprocess.Popen:
        """Start and return at once, in a session of its own."""
        self._begun.append(
            subprocess.Popen(
                [*self.command, *job],
                cwd=self.path,
                env=self.full_environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return self._begun[-1]

    def end(self) -> None:
        """End what was begun and, in a test that failed, still runs."""
        for process in self._begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    @property
    def installs(self) -> int:
        path = self.path / "installs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def extra(self, script: str) -> None:
        """What the install command does besides."""
        (self.path / "extra.sh").write_text(script)

    def module(self, name: str, text: str) -> None:
        """Put a Python module in front of every other one of that name."""
        folder = self.path / "modules"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        self.environ["PYTHONPATH"] = str(folder)

    def fallbacks(self) -> dict[str, str]:
        """Phase -> reason of everything that the report calls fallen back."""
        report = analysis.analyse(load.load([str(self.events)]))
        return {i.phase: i.reason for i in report.incidents if i.status == "fallback"}

    def forget_events(self) -> None:
        for file in self.events.glob("*"):
            file.unlink()

    def remove_installed(self) -> None:
        (self.path / "site" / "module").unlink()
        (self.path / "site").rmdir()


def processes_of_parts(place: Place) -> Iterator[int]:
    """Processes that some part of a start in this place began."""
    here = f"HOME={place.path}/home".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if here in variables and any(v.startswith(MARKER.encode()) for v in variables):
                yield int(name)


def part_process(place: Place) -> int:
    """The process of the deps part, once it is there."""

    def look() -> int | None:
        for pid in processes_of_parts(place):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"bootseer.entrypoint.part_process" in words:
                return pid
        return None

    return until(look)


def kill(pid: int) -> None:
    """End a process; one whose parent went may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_parts(place: Place) -> None:
    """Kill all that a part began, and what it begins meanwhile, until there is none."""

    def none_found() -> bool:
        found = list(processes_of_parts(place))
        for pid in found:
            kill(pid)
        return not found

    until(none_found)


def nothing_left(place: Place) -> None:
    """Wait until all parts of a place have ended by themselves; end those that have not."""
    try:
        until(lambda: not list(processes_of_parts(place)))
    finally:
        for pid in list(processes_of_parts(place)):
            kill(pid)
        place.end()
