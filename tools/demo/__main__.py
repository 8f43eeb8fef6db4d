"""Start a real training job plainly and through bootseer, several times each, and compare.

    python -m tools.demo

Sides take turns, and each start has a node made fresh, with an empty page cache where that is
allowed. Success (exit code 0) means that every start did the right thing: the environments are
the same to the byte, the job computed the same, nothing fell back, and the speedup on a fresh
node reaches its floor.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from rich.console import Console

from bootseer.errors import BootseerError, NotSupportedError
from bootseer.profiler.report.model import PartUse
from tools import machine
from tools.demo import containers, options, outcome, stages, starts
from tools.demo.lab import Lab
from tools.demo.starts import Kind, Start

FLOOR_MISSED = 1
CONTAINER_FLOOR = 5.0
"""The least speedup of a fresh node where the job runs in its container."""


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, _end)
    try:
        return run(options.parse(arguments), console)
    except BootseerError as error:
        console.print(f"demo: {error}", soft_wrap=True, markup=False)
        return error.exit_code


def _end(number: int, _: FrameType | None) -> None:
    """Leave through the context managers, which clean up."""
    raise SystemExit(128 + number)


def run(chosen: options.Options, console: Console) -> int:
    """Run a demonstration; reports go to `chosen.out`, the printed one to standard output."""
    begun = time.monotonic()
    say = Progress(console)
    chosen.out.mkdir(parents=True, exist_ok=True)
    chosen.kept.mkdir(parents=True, exist_ok=True)
    chosen.scratch.parent.mkdir(parents=True, exist_ok=True)
    why = "left out, as asked" if not chosen.containers else containers.missing()
    if chosen.floor is not None:
        machine.require_space(chosen.scratch.parent, images=not why)
    if not why:
        result = containers.run(chosen, say)
    else:
        say(f"not in a container: {why}")
        result = _on_files(chosen, say, why)
    page, data = outcome.write(result, chosen.out)
    outcome.show(result, Console(highlight=False))
    console.print(f"done in {time.monotonic() - begun:.0f} s")
    console.print(f"written: {page} and {data}", soft_wrap=True)
    floor = chosen.floor if why or chosen.floor is None else CONTAINER_FLOOR
    return _verdict(result, floor, console)


def _on_files(chosen: options.Options, say: Progress, why: str) -> outcome.Result:
    """The job on this machine's files: what needs no privilege. `why` not in its container."""
    cold = chosen.cold and machine.drop_page_cache()
    parts = stages.all_stages()
    with Lab(chosen) as lab:
        _set_up(lab, parts, say)
        done, faults = _all_starts(lab, parts, say)
        restored = [start for start in done if start.restores]
        used = {part.name: part.use(restored) for part in parts}
        emulated = [*_emulated(chosen, cold), *(line for part in parts for line in part.emulated())]
        used = {"image": PartUse(False, why), **used}
        labels = {str(kind): label for kind, label in starts.LABELS.items()}
        return outcome.evaluate(done, used, faults, emulated, labels)


class Progress:
    """Lines for who waits, each with the seconds since the demonstration began."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        took = time.monotonic() - self._begun
        self._console.print(f"{took:4.0f} s  {text}", soft_wrap=True, markup=False)


def _set_up(lab: Lab, parts: tuple[stages.Stage, ...], say: Progress) -> None:
    """Everything that is there before a start: packages, Python, the checkpoint."""
    say("preparing: the example's packages, which a first run downloads ...")
    if lab.fetch_wheels():
        say(f"downloaded the example's packages to {lab.wheels}")
    say("preparing: a Python without them, and an install to make the checkpoint ...")
    lab.make_base()
    lab.fresh_node()
    lab.call(lab.install, "install the example's packages")
    script = str(lab.options.job / "train.py")
    make = [lab.python, script, "--checkpoint", str(lab.made), "--make"]
    lab.call([*make, *lab.options.checkpoint_arguments], "make the checkpoint")
    size = lab.made.stat().st_size
    lab.place.keep(lab.made)
    say(f"checkpoint made: {size / 1e9:.2f} GB")
    settings = [stage.settings(lab) for stage in parts]
    (lab.options.scratch / "bootseer.toml").write_text("\n".join(settings), encoding="utf-8")


def _all_starts(
    lab: Lab, parts: tuple[stages.Stage, ...], say: Progress
) -> tuple[list[Start], list[str]]:
    """The recording start, then rounds in which the three kinds take turns at being first."""
    done: list[Start] = []
    faults: list[str] = []
    kinds: list[Kind] = ["plain", "fresh", "second"]
    plan: list[tuple[Kind, int]] = [("record", 1)]
    for number in range(lab.options.rounds):
        turn = number % len(kinds)
        # The node's cache for a second start comes from the fresh one, so plain goes first.
        order = kinds if number == 0 else kinds[turn:] + kinds[:turn]
        plan += [(kind, number + 1) for kind in order]
    for kind, number in plan:
        if kind in ("fresh", "record"):
            lab.fresh_node()
        else:
            lab.second_start()
        start = starts.launch(lab, kind, number, lab.options.scratch / "bootseer.toml")
        found = _faults(lab, parts, start, done)
        faults += found
        done.append(start)
        seconds = "no first step" if start.wall_s is None else f"{start.wall_s:.2f} s"
        say(f"{starts.LABELS[kind]}: {seconds}")
        for fault in found:
            say(f"  wrong: {fault}")
        if start.exit_code != 0:
            raise NotSupportedError(f"the job failed ({start.exit_code}): {start.output.strip()}")
    return done, faults


def _faults(
    lab: Lab, parts: tuple[stages.Stage, ...], start: Start, before: list[Start]
) -> list[str]:
    """Why a start was not right; empty when it was."""
    out = []
    if start.kind == "record" and not starts.settle(start):
        out.append("the snapshot was not published")
    if start.exit_code != 0 or start.wall_s is None:
        out.append(f"exit code {start.exit_code}, first step at {start.wall_s}")
    if before and start.output != before[0].output:
        out.append(f"the job printed {start.output!r}, not {before[0].output!r}")
    out += [f"fell back: {reason}" for reason in start.fallbacks()]
    for part in parts:
        out += part.faults(lab, start)
    return [f"{start.kind}: {text}" for text in out]


def _emulated(chosen: options.Options, cold: bool) -> list[str]:
    if cold:
        page_cache = "the page cache is emptied before each start"
    elif chosen.cold:
        page_cache = "the page cache stays warm, because emptying it needs root"
    else:
        page_cache = "the page cache stays warm, as asked"
    return [f"fresh node: this machine with its environment put back; {page_cache}"]


def _verdict(result: outcome.Result, floor: float | None, console: Console) -> int:
    for fault in result.faults:
        console.print(f"wrong: {fault}", style="red", soft_wrap=True, markup=False)
    comparison = result.report.comparison
    speedup = comparison.speedup if comparison is not None else None
    if result.faults or speedup is None:
        return FLOOR_MISSED
    if floor is not None and speedup < floor:
        console.print(f"the speedup {speedup:.2f} misses its floor of {floor}")
        return FLOOR_MISSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
