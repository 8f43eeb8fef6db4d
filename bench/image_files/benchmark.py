"""A container's start: its files read ahead from inside it, or not.

    python -m bench image_files        all cases
    python -m bench.image_files CASE…  these alone, put into the results in place of older ones

The image is a stock one (Debian, Python, numpy, pyarrow, torch). `ours` is the container's command
behind `bootseer start` with `[image] traces`, from the init container's payload: replay runs beside
the job, in the container, by no privilege beyond the container's own. `plain` is the command
alone; `start alone` is `bootseer start` with nothing to do. Seconds until the program's first line.

*cold overlayfs*: podman runs the image unpacked on plain overlayfs. The page cache is emptied
before each start, then podman, runc and the wrapper are warmed by a container that does nothing.
`warm` is the command alone with everything in memory, the limit. *recording*: there is no trace
yet, so that `ours` is recorded beside the job, in turns with the same start that is not; three
times the rounds, as the difference is small. *stargz*: see `bench.image_files.lazy`. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import harness
from bench.image.lab import MARK, WORK
from bench.image_files import lazy
from tools.images import real
from tools.initimage import __main__ as initimage
from tools.initimage import payload
from tools.podman import Podman
from tools.registry import Registry

MEASURES = (
    "bootseer/__main__.py",
    "bootseer/cli/image/files/group*.py",
    "bootseer/cli/start*.py",
    "bootseer/entrypoint",
    "bootseer/imageprefetch",
    "tools/initimage",
    "bench/image_files/benchmark.py",
    "bench/image_files/lazy.py",
    "bench/image/lab.py",
    "bench/image/peers.py",
)
COLD, RECORDING = "cold overlayfs", "recording"
KINDS = (COLD, RECORDING)
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
        return self.command(*_wrapped(work, settings))

    def record(self, work: str) -> list[str]:
        """A program whose start is recorded."""
        return self.command(*_recorded(work))


def _wrapped(work: str, settings: str) -> list[str]:
    return [WRAPPER, "start", "-c", f"/shared/{settings}.toml", "--", *_program(work)]


def _recorded(work: str) -> list[str]:
    words = [WRAPPER, "image", "files", "record", *_traces(work), "--path", "/"]
    return [*words, "--", *_program(work)]


def _name(work: str) -> str:
    return work.replace("+", "-")


def _program(work: str) -> list[str]:
    return ["python3", "-c", WORK[work]]


def _traces(work: str) -> list[str]:
    return ["--traces", "/shared/traces", "--image", IMAGE, "--workload", _name(work)]


def names() -> list[str]:
    """All cases."""
    return [
        *(f"{work} {kind}" for work in WORK for kind in KINDS),
        *lazy.names(),
    ]


def run(options: harness.Options) -> list[harness.Case]:
    """Measure all cases; quickly: one program on a local disk."""
    wanted = [f"numpy+pyarrow {kind}" for kind in KINDS] if options.quick else names()
    return measure(wanted, options.runs, "python" if options.quick else "torch")


def measure(wanted: Sequence[str], rounds: int, image: str = "torch") -> list[harness.Case]:
    """Measure these cases."""
    cases: list[harness.Case] = []
    lazily = [name for name in wanted if name in lazy.names()]
    locally = [name for name in wanted if name not in lazily]
    scratch = Path(tempfile.mkdtemp(prefix="bf-"))
    try:
        with initimage._locked(None) as cache:
            payload.build(scratch / "root", cache, payload.ROOT / "bootseer")
        home, shared = scratch / "root/payload", scratch / "shared"
        shared.mkdir()
        with _place(scratch, image) as here:
            _record(here, [work for work in WORK if any(n.startswith(work) for n in wanted)])
            cases += _locally(here, locally, rounds)
        if lazily:
            cases += _lazily(home, shared, lazily, rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return cases


@contextmanager
def _place(scratch: Path, image: str) -> Iterator[Place]:
    registry = Registry(scratch / "r")
    with registry, Podman(scratch / "p", trusted=[registry.host]) as podman:
        made = podman.pull(registry.push(real.image(image).source, "bench/image", "1"))
        yield Place(podman, made, scratch / "root/payload", scratch / "shared")


def _record(here: Place, works: Sequence[str]) -> None:
    """Record programs on the local disk; lazily loaded, the same image has the same files."""
    for work in works:
        cold(here)
        first_line(here, here.record(work))
        write_settings(here.shared, work)


def _locally(here: Place, wanted: Sequence[str], rounds: int) -> list[harness.Case]:
    cases: list[harness.Case] = []
    for work in WORK:
        kinds = [kind for kind in KINDS if f"{work} {kind}" in wanted]
        for kind in kinds:
            count = 3 * rounds if kind == RECORDING else rounds
            cases += _measure(here, work, kind, count)
    return cases


def _lazily(home: Path, shared: Path, wanted: Sequence[str], rounds: int) -> list[harness.Case]:
    works = [work for work in WORK if f"{work} {lazy.NAME}" in wanted]

    def sides(work: str) -> dict[str, Sequence[str]]:
        return {
            harness.OURS: _wrapped(work, _name(work)),
            lazy.NAME: _program(work),
        }

    with lazy.place(home, shared) as here:
        return lazy.measure(here, sides, works, rounds)


def write_settings(shared: Path, work: str) -> None:
    """Write the settings by which a program's start is replayed, recorded, or left alone."""
    known = {"traces": "/shared/traces", "image": IMAGE, "workload": _name(work)}
    _settings(shared, _name(work), {**known, "record": "never"})
    # Its container ends before a trace would be kept, so each start is a first one.
    _settings(shared, "first", {"traces": "/shared/none", "record": "always"})
    _settings(shared, "unrecorded", {"traces": "/shared/none", "record": "never"})
    _settings(shared, "nothing", {})


def _settings(shared: Path, name: str, values: Mapping[str, str]) -> None:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (shared / f"{name}.toml").write_text(f"[image]\n{lines}", encoding="utf-8")


def _measure(here: Place, work: str, kind: str, rounds: int) -> list[harness.Case]:
    def side(command: Sequence[str], *, warm: bool = False) -> Callable[[], float]:
        def turn() -> float:
            if not warm:
                cold(here)
            return first_line(here, command)

        return turn

    plain = here.command(*_program(work))
    if kind == RECORDING:
        sides = {
            harness.OURS: side(here.wrapped(work, "first")),
            "not recording": side(here.wrapped(work, "unrecorded")),
        }
    else:
        sides = {
            harness.OURS: side(here.wrapped(work, _name(work))),
            "plain": side(plain),
            "start alone": side(here.wrapped(work, "nothing")),
            "warm": side(plain, warm=True),
        }
    values = harness.interleave(sides, rounds=rounds, warmup=0)
    dropped = "no agent; page cache dropped but for podman and our wrapper"
    conditions = dict.fromkeys(sides, dropped) | {"warm": "no agent; page cache warm"}
    return harness.cases_of(f"{work} {kind}", values, unit="s", conditions=conditions)


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


def main() -> int:
    """Measure some cases and put them into the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.image_files", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("case", nargs="+", choices=names())
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    command = harness.command_line("image_files", sys.argv[1:])
    cases = measure(arguments.case, arguments.runs)
    print(harness.table(cases))
    harness.keep("image_files", cases, names=names(), command=command)
    return 0
