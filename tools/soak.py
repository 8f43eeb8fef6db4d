"""Run the long counts (`make soak`) and keep what they came to in `tests/soak-result.txt`.

    python -m tools.soak                 what has no result of this revision
    python -m tools.soak --stale         only what has none, failed, or measured other code
    python -m tools.soak MODULE...       these modules, such as soak/profiler/test_truth
    python -m tools.soak --note          none; only note which tests exist and were not taken
    python -m tools.soak --list          what stands in the result, and what of it is stale

The result is kept module by module as each one ends, so a run that was stopped goes on where it
stopped. Each module's result names the revision, the time and the machine that it was taken with,
and a digest of the files that its tests reach: where these have changed since, it is stale. A tree
with uncommitted changes is refused, for its revision would not say what ran. Tests that no run
has reached yet stand in the result as not taken yet, and its first line counts them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET  # pytest's own report of a run that we started
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "tests" / "soak-result.txt"
WORKERS = 2
_PACKAGES = ("bootseer", "bench", "tests", "tools")
_AGES_NOTHING = (":!tests/soak-result.txt", ":!docs", ":!*.md")
_HEAD = re.compile(
    r"(?P<module>[\w/]*test_\w+): (?P<outcome>passed|FAILED), revision (?P<revision>\S+), "
    r"(?P<when>\S+), (?P<machine>Python \S+, kernel \S+), (?P<seconds>[\d.]+) s, "
    r"code (?P<code>\w+)"
)
_LINE = re.compile(r"  (?P<outcome>passed|FAILED) +(?P<seconds>[\d.]+) s  (?P<test>\S.*)")
_NOT_TAKEN = "not taken yet"
_UNTAKEN_LINE = re.compile(rf"  {_NOT_TAKEN}  (?P<test>\S.*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One test: its name within the module, whether it passed, how long it took."""

    test: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        return f"  {_word(self.passed)} {self.seconds:8.1f} s  {self.test}"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a module came to. `code` is the digest of the files that its tests reach."""

    module: str
    revision: str
    when: str
    machine: str
    seconds: float
    code: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    def __str__(self) -> str:
        head = f"{self.module}: {_word(self.passed)}, revision {self.revision}, {self.when}, "
        head += f"{self.machine}, {self.seconds:.1f} s, code {self.code}"
        return "\n".join([head, *map(str, self.outcomes)])


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The whole file: what was taken, and the tests that were not, both by module."""

    by_module: dict[str, Result]
    untaken: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RESULT) -> Self:
        """Nothing where there is no file. ValueError names a line that is none of ours."""
        made = cls({})
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for paragraph in text.split("\n\n")[1:]:
            first, *rest = paragraph.strip("\n").splitlines()
            if not made._take(first, rest):
                raise ValueError(f"{path}: not a result of tools.soak: {first}")
        return made

    def _take(self, first: str, rest: list[str]) -> bool:
        """One module's paragraph; False where it is none."""
        head = _HEAD.fullmatch(first)
        outcomes = []
        module = head["module"] if head else first.removesuffix(f": {_NOT_TAKEN}")
        for line in rest:
            if untaken := _UNTAKEN_LINE.fullmatch(line):
                self.untaken.setdefault(module, []).append(untaken["test"])
            elif taken := _LINE.fullmatch(line):
                passed = taken["outcome"] == "passed"
                outcomes.append(Outcome(taken["test"], passed, float(taken["seconds"])))
            else:
                return False
        if head is not None:
            about = (head["revision"], head["when"], head["machine"], float(head["seconds"]))
            self.by_module[module] = Result(module, *about, head["code"], tuple(outcomes))
        return head is not None or first == f"{module}: {_NOT_TAKEN}"

    def known(self, exist: dict[str, list[str]]) -> Self:
        """Without modules and tests that are gone, and with all that were not taken."""
        by_module, untaken = {}, {}
        for module, tests in exist.items():
            result = self.by_module.get(module)
            if result is not None:
                kept = tuple(outcome for outcome in result.outcomes if outcome.test in tests)
                by_module[module] = dataclasses.replace(result, outcomes=kept)
            taken = {outcome.test for outcome in result.outcomes} if result else set()
            untaken[module] = sorted({*tests} - taken)
        return dataclasses.replace(self, by_module=by_module, untaken=untaken)

    def write(self, path: Path = RESULT) -> None:
        """Sorted by module, below a line that says what is missing and of which revisions."""
        parts = [summary(self)]
        for module in sorted({*self.by_module, *self.untaken}):
            result, untaken = self.by_module.get(module), self.untaken.get(module, [])
            lines = [str(result) if result else f"{module}: {_NOT_TAKEN}"]
            parts.append("\n".join([*lines, *(f"  {_NOT_TAKEN}  {test}" for test in untaken)]))
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def summary(whole: Results) -> str:
    """The file's first line."""
    results = list(whole.by_module.values())
    tests = sum(len(result.outcomes) for result in results)
    failed = sum(not outcome.passed for result in results for outcome in result.outcomes)
    revisions = sorted({result.revision for result in results})
    of = f"revision {revisions[0]}" if len(revisions) == 1 else f"{len(revisions)} revisions"
    verdict = f"{failed} FAILED" if failed else "passed"
    untaken = sum(map(len, whole.untaken.values()))
    verdict = f"IN PART, {untaken} tests {_NOT_TAKEN}; {verdict}" if untaken else verdict
    seconds = sum(result.seconds for result in results)
    return (
        f"make soak: {verdict}, {tests} tests in {len(results)} modules, {seconds / 60:.0f} min, "
        f"of {of}"
    )


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"


# --- what exists, and what it reaches -----------------------------------------------------------


def collect_tests(root: Path = ROOT) -> dict[str, list[str]]:
    """The soak tests that exist, by module. RuntimeError where pytest cannot collect them."""
    modules = [path for path in root.glob("tests/**/test_*.py") if "mark.soak" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--soak", "--collect-only", "-q", *map(str, modules)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the soak tests cannot be collected: {done.stdout}{done.stderr}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        path, mark, test = line.partition("::")
        if mark:
            found.setdefault(_module_of(path), []).append(test)
    return found


def _module_of(path: str) -> str:
    """A module's name here: its place below `tests/`, without the suffix."""
    return Path(path).relative_to("tests").with_suffix("").as_posix()


def digest_of(module: str, root: Path = ROOT) -> str:
    """The digest of every Python file that a test module reaches.

    Followed are imports, those inside functions too, and programs of `tests/` that a text names.
    A file that starts `-m bootseer` reaches all of our commands, which are found by name: so it
    reaches the whole package. The laboratories behind fixtures are not followed.
    """
    seen: set[Path] = set()
    waiting = [root / "tests" / f"{module}.py"]
    while waiting:
        path = waiting.pop()
        if path not in seen and path.is_file():
            seen.add(path)
            waiting += _reached(path, root)
    whole = hashlib.sha256()
    for path in sorted(seen):
        whole.update(f"{path.relative_to(root)}\n".encode())
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:12]


def _reached(path: Path, root: Path) -> Iterator[Path]:
    """The files of ours that one file imports or starts."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from _files((alias.name for alias in node.names), root)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from _files([base, *(f"{base}.{alias.name}" for alias in node.names)], root)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if path.is_relative_to(root / "tests"):
                if node.value == "bootseer":
                    yield from (root / "bootseer").rglob("*.py")
                elif re.fullmatch(r"[\w./]+\.py", node.value):
                    yield root / "tests" / node.value
            elif re.fullmatch(rf"({'|'.join(_PACKAGES)})(\.\w+)+", node.value):
                yield from _files([node.value], root)


def _files(names: Iterable[str], root: Path) -> Iterator[Path]:
    """The files that may stand behind dotted names; some of them do not exist."""
    for name in names:
        words = name.split(".")
        if words[0] in _PACKAGES:
            for count in range(1, len(words) + 1):
                place = root.joinpath(*words[:count])
                yield place / "__init__.py"
                yield place.with_suffix(".py")


def problems(results: Results, exist: dict[str, list[str]]) -> list[str]:
    """What the result lacks, holds too much of, or shows as failed; a line each."""
    out = []
    for module in sorted({*exist, *results.by_module}):
        result = results.by_module.get(module)
        shown = {outcome.test for outcome in result.outcomes} if result else set()
        shown |= {*results.untaken.get(module, ())}
        out += [
            f"{module}::{test}: not in the result"
            for test in sorted({*exist.get(module, ())} - shown)
        ]
        out += [
            f"{module}::{test}: no such test" for test in sorted(shown - {*exist.get(module, ())})
        ]
        if result is not None:
            failed = [outcome.test for outcome in result.outcomes if not outcome.passed]
            out += [f"{module}::{test}: failed" for test in failed]
    return out


# --- running ------------------------------------------------------------------------------------


def revision_here(root: Path = ROOT) -> str:
    """The last revision that changed more than documents and this result.

    RuntimeError where files differ from what is committed.
    """
    changed = _git(root, "status", "--porcelain", "--", ".", ":!tests/soak-result.txt")
    if changed:
        raise RuntimeError(f"commit first: the tree is not what any revision says:\n{changed}")
    return _git(root, "log", "-1", "--format=%h", "--", ".", *_AGES_NOTHING)


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_module(module: str, revision: str, workers: int = WORKERS) -> Result:
    """Run one module's soak tests; RuntimeError where pytest ended without a report."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = f"Python {platform.python_version()}, kernel {platform.release()}"
    code = digest_of(module)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "--soak", "-q", f"--junitxml={report}"]
        command += ["-n", str(workers), "--dist", "worksteal", f"tests/{module}.py"]
        # Long counts are long: what ends a stuck test of `make test` would end these.
        command += ["--timeout=7200", "-o", "faulthandler_timeout=0"]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            raise RuntimeError(f"{module}: pytest ended with code {done.returncode}, no report")
        outcomes = tuple(sorted(_outcomes(report), key=lambda outcome: outcome.test))
    seconds = time.monotonic() - begun
    return Result(module, revision, when, machine, seconds, code, outcomes)


def _outcomes(report: Path) -> Iterator[Outcome]:
    """One a test; what failed in its set-up or its end, or at its first try, has failed."""
    found: dict[str, Outcome] = {}
    for case in ET.parse(report).iter("testcase"):
        name = case.get("name", "")
        passed = not any(case.find(fault) is not None for fault in _FAULTS)
        seconds = float(case.get("time", "0"))
        before = found.get(name, Outcome(name, True, 0.0))
        found[name] = Outcome(name, before.passed and passed, before.seconds + seconds)
    yield from found.values()


_FAULTS = ("failure", "error", "skipped", "rerun")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--stale", action="store_true", help="leave out what is not stale")
    parser.add_argument("--note", action="store_true", help="list new tests, run nothing")
    parser.add_argument("--list", action="store_true", help="show the result's state, run nothing")
    parser.add_argument("--workers", type=int, default=WORKERS, help="tests side by side")
    given = parser.parse_args()
    exist, results = collect_tests(), Results.read()
    if given.note:
        results.known(exist).write()
    if given.list or given.note:
        return _show(Results.read(), exist)
    unknown = sorted({*given.modules} - {*exist})
    if unknown:
        parser.error(f"no soak tests in {', '.join(unknown)}; there are {', '.join(sorted(exist))}")
    try:
        revision = revision_here()
        for module in given.modules or _due(results, exist, revision, stale_only=given.stale):
            print(f"{module}: {len(exist[module])} tests", flush=True)
            results.by_module[module] = run_module(module, revision, given.workers)
            results = results.known(exist)
            results.write()
    except RuntimeError as error:
        print(f"make soak: {error}", file=sys.stderr)
        return 2
    return _show(results, exist)


def _due(
    results: Results, exist: dict[str, list[str]], revision: str, *, stale_only: bool
) -> list[str]:
    """The modules to run: of another revision, or merely stale."""
    out = []
    for module in sorted(exist):
        result = results.by_module.get(module)
        fresh = result is not None and result.passed
        if result is not None and stale_only:
            fresh = fresh and result.code == digest_of(module)
        elif result is not None:
            fresh = fresh and result.revision == revision
        if result is None or not fresh or {o.test for o in result.outcomes} != {*exist[module]}:
            out.append(module)
    return out


def _show(results: Results, exist: dict[str, list[str]]) -> int:
    """Print the state; 1 where anything is missing or failed, stale results are only named."""
    print(summary(results))
    for module, result in sorted(results.by_module.items()):
        stale = "" if result.code == digest_of(module) else ", STALE: its code has changed since"
        print(
            f"  {module}: {_word(result.passed)}, {result.seconds:.0f} s, {result.revision}{stale}"
        )
    lines = problems(results, exist)
    lines += [
        f"{m}::{test}: {_NOT_TAKEN}" for m, tests in results.untaken.items() for test in tests
    ]
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
