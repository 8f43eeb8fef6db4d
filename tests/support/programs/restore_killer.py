"""Kill restores at every step, in forked children; run as a program by the crash tests.

A process of its own, since a forked child of a threaded test process could hang. Prints one JSON
line: how many kills, and what recovery made of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.restore import staging
from bootseer.depsnap.restore.archive_restore import restore
from bootseer.depsnap.restore.commit import recover
from tests.support.trees.snapshots import NS, describe, leftovers, rich, write

Step = Callable[[str], None]


class Case:
    """One archive, the targets' old state as a directory to copy, and both states described."""

    # Making or removing the staging and putting the target's mtime back are two steps: a kill
    # between them, which no fault point hits, leaves that one time at the moment of the kill.
    loose_root_times = False

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.archive = str(folder / "a")
        self.old_copy = folder / "old"
        self.old_copy.mkdir()
        roots = getattr(self, f"_{name}")()
        self.digest = archive.create(self.archive, roots).index_digest
        self.reset()
        self.old = describe(self.work)
        self.steps: list[str] = []
        self.restore(self.steps.append)
        self.new = describe(self.work)
        assert self.old != self.new

    def _absent(self) -> list[RootDelta]:
        root = rich(self.folder / "r")
        self.targets = {str(root): str(self.work / "t")}
        return [RootDelta.of_tree(scan.scan(str(root)))]

    def _merge(self) -> list[RootDelta]:
        root = self.folder / "r"
        for path in ("a/keep", "a/change", "b/gone", "b/gone too", "c/x", "turn/inside"):
            write(root / path, path)
        (root / "link").symlink_to("a")
        for folder, _, _ in os.walk(root, topdown=False):
            os.utime(folder, ns=(NS, NS))
        subprocess.run(["cp", "-a", root, self.old_copy / "t"], check=True)
        before = scan.scan(str(root))
        write(root / "a/change", "changed", mtime_ns=NS + 5)
        write(root / "new/deep/file", "new")
        shutil.rmtree(root / "b")
        (root / "turn/inside").unlink()
        (root / "turn").rmdir()
        write(root / "turn", "a file now")
        (root / "link").unlink()
        write(root / "link/inside", "a directory now")
        (root / "c").chmod(0o700)
        os.setxattr(root / "c", "user.new", b"1")
        self.targets = {str(root): str(self.work / "t")}
        return [RootDelta.of_delta(scan.diff(before, scan.scan(str(root))))]

    def _group(self) -> list[RootDelta]:
        roots = self._merge()
        write(self.folder / "s/one", "1")
        write(self.folder / "s/sub/two", "2")
        self.targets[str(self.folder / "s")] = str(self.work / "s")
        roots.append(RootDelta.of_tree(scan.scan(str(self.folder / "s"))))
        return roots

    def reset(self) -> None:
        if self.work.exists():
            staging.remove_tree(str(self.work))  # read-only directories included
        subprocess.run(["cp", "-a", self.old_copy, self.work], check=True)
        os.utime(self.work, ns=(NS, NS))

    def restore(self, step: Step) -> None:
        restore(self.archive, self.digest, self.targets, jobs=2, on_step=step)

    def check(self) -> str:
        """Recover, then say which state stands; fails on any other."""
        untouched = not leftovers(self.work)
        if untouched:
            assert self._same(self.old) or self._same(self.new), "half a state without a journal"
        for target in self.targets.values():
            recover(target)
        assert not leftovers(self.work), leftovers(self.work)
        if self._same(self.new):
            return "new"
        assert self._same(self.old), f"neither old nor new: {self._differences()}"
        return "old"

    def _differences(self) -> dict[str, list[tuple]]:
        now = describe(self.work)
        return {
            name: [
                (path, now.get(path), state.get(path))
                for path in now.keys() | state.keys()
                if path != "." and now.get(path) != state.get(path)
            ]
            for name, state in (("old", self.old), ("new", self.new))
        }

    def _same(self, wanted: dict[str, tuple]) -> bool:
        now = describe(self.work)
        now["."] = wanted["."]  # the parent's time is not the restore's to keep
        if self.loose_root_times and "t" in now and "t" in wanted:
            now["t"] = (*now["t"][:3], wanted["t"][3])
        return now == wanted


def in_child(action: Callable[[], None]) -> int:
    """Run in a forked child; its exit code, -9 when it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killer(at: int) -> Step:
    """Fault injection: end this process without any clean-up at its `at`th step."""
    seen = iter(range(1 << 30))

    def step(_name: str) -> None:
        if next(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def wait_unlocked() -> None:
    """Workers of a killed restore end at once, but not in the same instant; they hold its lock."""
    time.sleep(0.01)


def every_step(case: Case, *, nested: int) -> Counter[str]:
    """Kill at each step; with `nested`, kill each recovery at every `nested`th step too."""
    found: Counter[str] = Counter()
    for at in range(len(case.steps)):
        case.reset()
        assert in_child(lambda at=at: case.restore(killer(at))) == -signal.SIGKILL
        wait_unlocked()
        if not nested or at % nested:
            found[case.check()] += 1
            continue
        for again in range(len(case.steps)):
            target = next(iter(case.targets.values()))
            code = in_child(lambda again=again, t=target: recover(t, killer(again)) and None)
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            found["recoveries killed"] += 1
        found[case.check()] += 1
    return found


def killed_in_the_middle(case: Case, after_s: float) -> bool:
    """Kill a restore some time after its first step; False when it was faster."""
    begun, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        case.restore(lambda _: os.write(tell, b".") and None)
        os._exit(0)
    os.close(tell)
    with open(begun, "rb", buffering=0) as steps:
        assert steps.read(1) == b".", "the restore never began"
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def at_random(case: Case, count: int, seed: int) -> Counter[str]:
    """Kill from outside at random moments, until `count` kills met a restore at work."""
    chance = random.Random(seed)
    case.loose_root_times = True
    found: Counter[str] = Counter()
    for _ in range(20 * count):
        if found["kills"] == count:
            break
        case.reset()
        found["kills"] += killed_in_the_middle(case, chance.random() * 0.06)
        deadline = time.monotonic() + 5
        while True:
            try:
                found[case.check()] += 1
                break
            except Exception as error:
                if type(error).__name__ != "BusyError" or time.monotonic() > deadline:
                    raise
                wait_unlocked()
    return found


def main() -> None:
    name, nested, count, seed = sys.argv[1], *map(int, sys.argv[2:5])
    with tempfile.TemporaryDirectory(dir=sys.argv[5]) as folder:
        case = Case(Path(folder), name)
        if count:
            found = at_random(case, count, seed)
        else:
            found = every_step(case, nested=nested)
            assert found["old"] + found["new"] == len(case.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
