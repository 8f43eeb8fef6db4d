"""A node with an environment to install into, for tests of `deps run` with real processes.

Every node of a test stands at the same path, as containers of one image do; `fresh` gives the
next one. Each start is a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Fault injection: kills, stops or breaks a start at a named step. Used by tests alone. What it
# passes is noted before: the last step noted is the one that it was killed at, or after.
DRIVER = """
import json, os, signal, sys
from bootseer.depsnap import run
from bootseer.depsnap.settings import DepsSettings
from bootseer.events.writer import open_writer
ask = json.loads(sys.argv[1])
at, action, steps = ask.pop("at"), ask.pop("action"), ask.pop("steps")
def step(name):
    with open(steps, "a") as file:
        file.write(name + "\\n")
    if name == at:
        if action == "raise":
            raise OSError(5, "injected fault")
        if action == "print":
            print(name, flush=True)
            sys.stdin.readline()
            return
        os.kill(os.getpid(), getattr(signal, action))
command = ask.pop("command")
settings = DepsSettings(environ=dict(os.environ), cwd=os.getcwd(), on_step=step, **ask)
with open_writer() as writer:
    outcome = run.execute(settings, command, writer)
sys.stderr.write("; ".join(outcome.reasons))
sys.exit(outcome.code)
"""


# A busy machine that runs the tests is no store that hangs, and no index that cannot be asked.
PATIENT_S = 60


def uv() -> str:
    """The uv of this environment."""
    return os.path.join(os.path.dirname(sys.executable), "uv")


class Node:
    """`place` holds the environment, `home` everything else, `store` is shared by all nodes."""

    def __init__(self, base: Path, wheels: Path, *, tool: str = "pip") -> None:
        self.tool = tool
        self.home = base / "home"
        self.store = base / "store"
        self.events = base / "events"
        self.cache = base / "cache1"
        self.place = self.home / "venv"
        self.wheels = wheels
        self.count = base / "installs"
        self.passed = base / "steps"
        self.number = 1
        self.variables: dict[str, str] = {}
        self.home.mkdir()
        (self.home / "requirements.txt").write_text("bootseer-alpha\n")
        self.make_venv()

    def make_venv(self) -> None:
        venv = [uv(), "venv", "-q", "--python", sys.executable, str(self.place)]
        subprocess.run(venv, check=True)

    def fresh(self) -> None:
        """The next machine: nothing of the last one but the store."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.number += 1
        self.cache = self.cache.with_name(f"cache{self.number}")
        self.make_venv()

    @property
    def install(self) -> list[str]:
        """The install into the venv by this node's tool, counted."""
        return self.counted(self.plain)

    @property
    def plain(self) -> list[str]:
        """The same, uncounted."""
        what = ["--no-index", "--find-links", str(self.wheels), "-r", "requirements.txt"]
        where = ["--python", str(self.place)]
        if self.tool == "uv":
            return [uv(), "pip", "install", "-q", *where, *what]
        return [sys.executable, "-m", "pip", *where, "install", "-q", *what]

    def counted(self, command: Sequence[str]) -> list[str]:
        """A script that notes each time it really runs."""
        if os.path.basename(command[0]).startswith(("python", "uv")):
            return ["sh", "-c", f"exec {shlex.join([self.counting(command[0]), *command[1:]])}"]
        return ["sh", "-c", f"echo x >> {self.count}; exec {shlex.join(command)}"]

    def counting(self, program: str) -> str:
        """A program in place of `program` that notes when it installs or makes an environment."""
        path = self.count.with_name("bin") / os.path.basename(program)
        path.parent.mkdir(exist_ok=True)
        script = (
            "#!/bin/sh\n"
            'case " $* " in *" install "* | *" uninstall "* | *" sync "* | *" venv "*)\n'
            f"  echo x >> {self.count} ;;\n"
            "esac\n"
            f'exec {program} "$@"\n'
        )
        # Once: while it is open for writing, a start that runs beside cannot run it (ETXTBSY).
        if not path.exists() or path.read_text() != script:
            path.write_text(script)
            path.chmod(0o755)
        return str(path)

    @property
    def installs(self) -> int:
        return len(self.count.read_text().split()) if self.count.exists() else 0

    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER", "PIP", "UV"))}
        kept["PATH"] = f"{os.path.dirname(sys.executable)}:{kept['PATH']}"
        kept |= {"BOOTSEER_EVENTS": str(self.events), "HOME": str(self.home.parent)}
        return kept | self.variables

    def cli(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bootseer", "deps", *map(str, words)],
            cwd=self.home,
            env=self.environ(),
            capture_output=True,
            text=True,
            check=False,
        )

    def run(
        self, *options: object, command: Sequence[str] | None = None, cache_shared: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """`deps run`, publishing inline; the cache is this node's own."""
        words: list[object] = ["run", "--store", self.store, "--store-timeout", PATIENT_S]
        words += ["--resolve-timeout", PATIENT_S, "--publish", "inline", *options]
        if cache_shared:
            words += ["--cache", self.cache]
        else:
            words += ["--cache", self.cache, "--form", "archive"]
        return self.cli(*words, "--", *(command or self.install))

    def ask(self, at: str, action: str, **more: Any) -> dict[str, Any]:
        settings = {"form": "archive", "publish": "inline", "lease_beat_s": 0.1}
        settings |= {"lease_ttl_s": 1.0, "store": str(self.store), "cache": str(self.cache)}
        settings |= {"store_timeout_s": PATIENT_S, "resolve_timeout_s": PATIENT_S}
        settings |= {"steps": str(self.passed)}
        return {**settings, "command": self.install, "at": at, "action": action, **more}

    def start(self, at: str = "", action: str = "", **more: Any) -> subprocess.Popen[str]:
        """A start with a fault at a step, in the background; `steps` begins anew."""
        self.passed.unlink(missing_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(self.ask(at, action, **more))],
            cwd=self.home,
            env=self.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, child: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a background start: its exit code and standard error."""
        _, errors = child.communicate(timeout=120)
        return child.returncode, errors

    def steps(self) -> list[str]:
        """What the latest `start` has passed so far, its background publisher included."""
        return self.passed.read_text().splitlines() if self.passed.exists() else []

    def works(self) -> bool:
        """The environment imports, byte code included, and its console script runs."""
        script = self.place / "bin/bootseer_alpha-run"
        if not script.exists():
            return False
        done = subprocess.run([script], capture_output=True, text=True, check=False)
        return done.returncode == 0 and done.stdout.startswith("bootseer_alpha")

    def ends(self) -> list[dict[str, Any]]:
        """The ends of the `deps.install` spans, in order of time."""
        return self.spans("deps.install")

    def spans(self, name: str) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in self.events.glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        found = [e for e in lines if e["event"] == "end" and e["name"] == name]
        return sorted(found, key=lambda e: e["time_unix_nano"])

    def last(self) -> tuple[str, str]:
        """Status and result of the last start."""
        end = self.ends()[-1]
        return end["status"], end["attributes"]["bootseer.deps.result"]

    def reason(self) -> str:
        return str(self.ends()[-1]["attributes"].get("bootseer.reason", ""))

    def archives(self) -> list[Path]:
        return sorted(self.store.glob("deps/*/archive-*"))

    def leftovers(self) -> list[Path]:
        """Temporary files in the store and staging places beside the environment."""
        hidden = [*self.store.rglob(".*"), *self.home.glob(".bootseer-*")]
        return [*hidden, *self.place.glob(".bootseer-*")]
