"""What CPython's own suites are refused on a `--rw` mount: what docs name, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.mounts.checkpoints import CHUNK, WIDTH, served
from tests.support.mounts.fuse import in_time
from tests.support.paths import DATA, ROOT

pytestmark = [pytest.mark.root, pytest.mark.slow]

LISTS = DATA / "refused"
"""Of each suite the tests that are refused something, as Python 3.11's versions have them; one
that this Python's suite lacks, or leaves out, is passed over."""
OTHERWISE = "otherwise"
"""In a list: for another reason than an error that docs name."""
CHOSEN = {"test_pathlib": "*PosixPathTest*"}
"""`Path`, and a class made of it, are tested by the same calls again."""
RUN = """
import json, sys, unittest

class Told(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.ran, self.refused = set(), {}

    def startTest(self, test):
        super().startTest(test)
        self.ran.add(test.id())

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.ran.discard(test.id())

    def tell(self, test, error):
        self.refused.setdefault(test.id(), []).append(self._exc_info_to_string(error, test))

    def addError(self, test, error):
        super().addError(test, error)
        self.tell(test, error)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.tell(test, error)

    def addSubTest(self, test, part, error):
        super().addSubTest(test, part, error)
        if error is not None:
            self.tell(test, error)

suite, chosen, answer = sys.argv[1:]
loader = unittest.TestLoader()
loader.testNamePatterns = [chosen]
told = Told()
loader.loadTestsFromName(suite).run(told)
with open(answer, "w") as file:
    json.dump([sorted(told.ran), told.refused], file)
"""


@pytest.mark.debian("libpython3.11-testsuite")  # of Debian's Python; any other has them
@pytest.mark.parametrize("suite", sorted(each.stem for each in LISTS.iterdir()))
def test_pythons_own_tests_are_refused_what_is_listed_and_nothing_else(
    tmp_path: Path, suite: str
) -> None:
    assert find_spec(f"test.{suite}"), "this Python was installed without its own tests"
    listed = read_list(suite)
    answer = tmp_path / "answer.json"
    writing = {"width": WIDTH, "chunk_bytes": CHUNK}
    with served(tmp_path / "store", tmp_path / "mnt", writable=True, writing=writing) as mount:
        words = [sys.executable, "-c", RUN, f"test.{suite}", CHOSEN.get(suite, "*"), str(answer)]
        done = subprocess.run(
            words,
            cwd=mount.directory,
            env={**os.environ, "TMPDIR": str(mount.directory)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        assert in_time(lambda: (mount.directory / "after").write_bytes(b"x")) == 1
    ran, told = json.loads(answer.read_text())
    assert len(ran) > len(listed)
    there = {short(name) for name in ran}
    refused = {
        short(name): OTHERWISE if listed.get(short(name)) == OTHERWISE else errors_of(texts)
        for name, texts in told.items()
    }
    assert refused == {name: why for name, why in listed.items() if name in there}


def test_each_listed_reason_stands_in_docs() -> None:
    docs = (ROOT / "docs" / "checkpoints.md").read_text()
    reasons = {why for each in LISTS.iterdir() for why in read_list(each.stem).values()}
    assert reasons > {OTHERWISE}
    for why in reasons - {OTHERWISE}:
        assert re.search(rf"\b{why}\b", docs), why


def read_list(suite: str) -> dict[str, str]:
    """Why each listed test of a suite is refused, by its class and name."""
    lines = (LISTS / f"{suite}.txt").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    listed = {name: why for why, name in words}
    assert len(listed) == len(words)
    return listed


def short(name: str) -> str:
    """A test's class and name: versions of Python keep it in modules of different names."""
    return ".".join(name.split(".")[-2:])


def errors_of(texts: list[str]) -> str:
    """The errors that what a test told has in it; each text must have one."""
    found = [set(re.findall(r"^\w+: \[Errno (\d+)\]", text, re.MULTILINE)) for text in texts]
    assert all(found), texts
    return " ".join(sorted(errno.errorcode[int(n)] for n in set.union(*found)))
