"""What a run on bare ground comes to: a line a step, and one word for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PASSED, FAILED = "passed", "FAILED"
_BETWEEN = " | "
_SUMMARY = re.compile(r"^=+ (?P<counts>.*\d+ \w+.*) in [\d.]+s\b.*=+$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|rerun)\b")
_WRITTEN = re.compile(r"(\d+) passed, (\d+) failed, (\d+) second tries")


@dataclass(frozen=True, slots=True)
class Counts:
    """Of pytest: tests that passed and failed (errors among them), and tests run once more."""

    passed: int
    failed: int
    second_tries: int


@dataclass(frozen=True, slots=True)
class Line:
    """Of one step. `counts` is None where it runs no tests."""

    command: str
    user: str
    outcome: str
    seconds: int
    counts: Counts | None = None


def read_counts(output: str) -> Counts | None:
    """What the last summary of pytest says; None where there is none."""
    found = list(_SUMMARY.finditer(output))
    if not found:
        return None
    totals = dict.fromkeys(("passed", "failed", "rerun"), 0)
    for number, word in _COUNT.findall(found[-1]["counts"]):
        totals["failed" if word.startswith("error") else word] += int(number)
    return Counts(totals["passed"], totals["failed"], totals["rerun"])


def judge(code: int, counts: Counts | None, *, tests: bool) -> str:
    """The outcome of a step: its exit code, and for tests that some ran and none failed."""
    if code == 0 and (not tests or (counts is not None and counts.passed and not counts.failed)):
        return PASSED
    return FAILED


def to_text(revision: str, lines: Sequence[Line], wanted: int) -> str:
    """The result file; `passed` only if all `wanted` steps are there and passed."""
    whole = len(lines) == wanted and all(line.outcome == PASSED for line in lines)
    last = PASSED if whole else FAILED
    return "\n".join([revision, *map(line_text, lines), last, ""])


def line_text(line: Line) -> str:
    """One step's line."""
    parts = [line.command, line.user, line.outcome, f"{line.seconds} s"]
    if line.counts is not None:
        c = line.counts
        parts.append(f"{c.passed} passed, {c.failed} failed, {c.second_tries} second tries")
    return _BETWEEN.join(parts)


def from_text(text: str) -> tuple[str, list[Line], str]:
    """The revision, the steps and the last word. Raises ValueError for any other text."""
    rows = text.splitlines()
    if len(rows) < 2 or rows[-1] not in (PASSED, FAILED):
        raise ValueError("a result begins with a revision and ends with passed or FAILED")
    return rows[0], [_read_line(row) for row in rows[1:-1]], rows[-1]


def _read_line(row: str) -> Line:
    command, user, outcome, took, *more = row.split(_BETWEEN)
    seconds = took.removesuffix(" s")
    if outcome not in (PASSED, FAILED) or not seconds.isdigit() or len(more) > 1:
        raise ValueError(f"not a step: {row}")
    counts = None
    if more:
        found = _WRITTEN.fullmatch(more[0])
        if not found:
            raise ValueError(f"not counts of tests: {more[0]}")
        counts = Counts(*map(int, found.groups()))
    return Line(command, user, outcome, int(seconds), counts)
