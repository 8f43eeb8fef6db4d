"""A container's start from a cold local disk: its files read ahead from inside it, or not.

    python -m bench image_files

Podman runs a stock image (Debian, Python, numpy, pyarrow, torch) unpacked on plain overlayfs. The
page cache is emptied before each start, then podman, runc and the wrapper are warmed by a
container that does nothing. `ours` is the container's command behind `bootseer start` with
`[image] traces`, from the init container's payload: replay runs beside the job, in the container,
by no privilege beyond the container's own. `plain` is the command alone; `warm` is the command
alone with everything in memory, the limit; `start alone` is `bootseer start` with nothing to do.
Seconds until the program's first line. In `recording` there is no trace yet, so that `ours` is
recorded beside the job. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.image_lab import MARK, WORK
from tools.images import real
from tools.initimage import __main__ as initimage
from tools.initimage import payload
from tools.podman import Podman
from tools.registry import Registry

IMAGE = "bench"
HOME = "/opt/bootseer"
WRAPPER = f"{HOME}/bin/bootseer"


@dataclass(frozen=True, slots=True)
class Place:
    """A podman that holds the image, and what is shown to its containers."""

    podman: Podman
    image: str
    home: Path
    shared: Path

    def command(self, *words: str) -> list[str]:
        """A container that runs these words, with the wrapper and the traces in it."""
        shown = ["-v", f"{self.home}:{HOME}:ro", "-v", f"{self.shared}:/shared"]
        return self.podman.command("run", "--rm", *shown, self.image, *words)

    def wrapped(self, work: str, settings: str) -> list[str]:
        """A program behind `bootseer start` with settings of that name."""
        config = f"/shared/{settings}.toml"
        return self.command(WRAPPER, "start", "-c", config, "--", *_program(work))

    def record(self, work: str) -> list[str]:
        """A program whose start is recorded."""
        words = [*_traces(work), "--path", "/", "--", *_program(work)]
        return self.command(WRAPPER, "image", "files", "record", *words)


def _name(work: str) -> str:
    return work.replace("+", "-")


def _program(work: str) -> list[str]:
    return ["python3", "-c", WORK[work]]


def _traces(work: str) -> list[str]:
    return ["--traces", "/shared/traces", "--image", IMAGE, "--workload", _name(work)]


def run(options: harness.Options) -> list[harness.Case]:
    """Measure each program."""
    cases: list[harness.Case] = []
    with place("python" if options.quick else "torch") as here:
        for work in ["numpy+pyarrow"] if options.quick else list(WORK):
            publish(here, work)
            cases += _measure(here, work, options.runs)
    return cases


@contextmanager
def place(image: str) -> Iterator[Place]:
    """The image pulled, the wrapper laid out; all of it is gone afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="bf-"))
    try:
        with initimage._locked(None) as cache:
            payload.build(scratch / "root", cache, payload.ROOT / "bootseer")
        (scratch / "shared").mkdir()
        registry = Registry(scratch / "r")
        with registry, Podman(scratch / "p", trusted=[registry.host]) as podman:
            made = podman.pull(registry.push(real.image(image).source, "bench/image", "1"))
            yield Place(podman, made, scratch / "root/payload", scratch / "shared")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(here: Place, work: str) -> None:
    """Record a program's start, and write the settings by which it is replayed."""
    cold(here)
    first_line(here, here.record(work))
    known = {"traces": "/shared/traces", "image": IMAGE, "workload": _name(work)}
    _settings(here, _name(work), {**known, "record": "never"})
    # Its container ends before a trace would be kept, so each start is a first one.
    _settings(here, "first", {"traces": "/shared/none", "record": "always"})
    _settings(here, "nothing", {})


def _settings(here: Place, name: str, values: Mapping[str, str]) -> None:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (here.shared / f"{name}.toml").write_text(f"[image]\n{lines}", encoding="utf-8")


def _measure(here: Place, work: str, rounds: int) -> list[harness.Case]:
    def side(command: Sequence[str], *, warm: bool = False) -> Callable[[], float]:
        def turn() -> float:
            if not warm:
                cold(here)
            return first_line(here, command)

        return turn

    plain = here.command(*_program(work))
    sides = {
        harness.OURS: side(here.wrapped(work, _name(work))),
        "plain": side(plain),
        "start alone": side(here.wrapped(work, "nothing")),
        "warm": side(plain, warm=True),
        "recorded": side(here.wrapped(work, "first")),
    }
    values = harness.interleave(sides, rounds=rounds, warmup=0)
    recorded = {harness.OURS: values.pop("recorded"), "start alone": values["start alone"]}
    return [
        *harness.cases_of(f"{work} cold overlayfs", values, unit="s"),
        *harness.cases_of(f"{work} recording", recorded, unit="s"),
    ]


def cold(here: Place) -> None:
    """Nothing in memory but what starts containers, and the wrapper."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    _call(here, here.command(WRAPPER, "start", "--", "/bin/true"))


def first_line(here: Place, command: Sequence[str]) -> float:
    """Seconds from the command's start to the first line that it prints."""
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        env=here.podman.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begun
        _, errors = process.communicate()
    if process.returncode or not line.startswith(MARK):
        raise RuntimeError(f"{line!r} {errors.decode(errors='replace')[-2000:]}")
    return seconds


def _call(here: Place, command: Sequence[str]) -> None:
    subprocess.run(command, env=here.podman.environment, stdin=subprocess.DEVNULL, check=True)
