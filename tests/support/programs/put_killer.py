"""Kill puts at every step, in forked children; run as a program by the crash tests.

A step is a call that changes the store, before it and after it. After each kill the checkpoint
must be the old one or the new one, whole; the same put must then go through; and gc must leave
nothing else. Prints one JSON line. A process of its own, since forks and threads do not mix.
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
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootseer.storage.local import LocalStore, LocalWriter
from bootseer.storage.store import NO_HINTS, WriteHints
from bootseer.stripedfs.write.gc import collect_garbage
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import (
    CHUNK,
    leftovers,
    local_tree,
    make_tree,
    sample,
    tree_of,
    whole,
)

WISHES = WriteSettings(chunk_bytes=CHUNK, width=3, jobs=2, keep_bytes=0)


class Steps:
    """Fault injection: ends this process without any clean-up at its `at`th step."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)


class Killing(LocalStore):
    """A local store with steps before and after each of its changes."""

    def __init__(self, root: str, step: Steps) -> None:
        super().__init__(root)
        self.step = step

    def _stepped(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.step()
        result = call(*args, **more)
        self.step()
        return result

    def _publish(self, *args: Any, **more: Any) -> bool:
        return self._stepped(super()._publish, *args, **more)

    def rename(self, *args: Any) -> None:
        self._stepped(super().rename, *args)

    def mkdir(self, *args: Any) -> None:
        self._stepped(super().mkdir, *args)

    def delete(self, *args: Any) -> None:
        self._stepped(super().delete, *args)

    def delete_tree(self, *args: Any) -> None:
        self._stepped(super().delete_tree, *args)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
        return KillingWriter(self, name, self._draft(name))


class KillingWriter(LocalWriter):
    """Its steps: each write, and the two sides of its end."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._store.step()  # type: ignore[attr-defined]
        super().write(data)

    def close(self) -> None:
        self._store.step()  # type: ignore[attr-defined]
        super().close()
        self._store.step()  # type: ignore[attr-defined]


class Case:
    """One checkpoint that is put a second time, with other content, and killed at it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.store = folder / "s"
        self.source = folder / "source"
        self.kind = kind
        self.old = self._make(1)
        self.put(LocalStore(str(self.store)))
        shutil.copytree(self.store, folder / "before")
        self._before = folder / "before"
        self.new = self._make(2)
        assert self.old != self.new

    def _make(self, seed: int) -> object:
        if self.kind == "file":
            self.source.write_bytes(sample(17 * CHUNK + 3, seed))
            return self.source.read_bytes()
        if self.source.exists():
            shutil.rmtree(self.source)
        make_tree(self.source, seed=seed)
        return local_tree(self.source)

    def reset(self) -> None:
        shutil.rmtree(self.store)
        shutil.copytree(self._before, self.store)

    def put(self, store: LocalStore) -> int:
        return put_into(store, "ck", str(self.source), settings=WISHES).kept_bytes

    def seen(self) -> str:
        """Which state stands; fails on any other."""
        read = whole if self.kind == "file" else tree_of
        found = read(self.store, "ck")
        assert found in (self.old, self.new), "neither the old nor the new checkpoint"
        return "old" if found == self.old else "new"

    def after_kill(self, found: Counter[str]) -> None:
        found[self.seen()] += 1
        plain = LocalStore(str(self.store))
        found["kept"] += self.put(plain) > 0
        assert self.seen() == "new"
        list(collect_garbage(plain, "ck", grace_s=0))
        left = leftovers(self.store, "ck")
        # What has no lease yet is let alone for a minute: somebody may just be making it.
        base = self.store / "ck.stripes"
        leased = [p for p in left if list((base / p).glob("writing/lease/0*")) or p[0] == "v"]
        assert not leased, left
        assert self.seen() == "new"


def every_step(case: Case) -> Counter[str]:
    """Kill at each step until a put goes through."""
    found: Counter[str] = Counter()
    at = 0
    while True:
        case.reset()
        pid = os.fork()
        if pid == 0:
            try:
                case.put(Killing(str(case.store), Steps(at)))
            except BaseException as error:
                sys.stderr.write(f"{error!r}\n")
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            assert case.seen() == "new"
            return found
        assert code == -signal.SIGKILL, code
        found["kills"] += 1
        case.after_kill(found)
        at += 1


def at_random(case: Case, count: int, seed: int) -> Counter[str]:
    """Kill the real command from outside at random moments, until `count` kills met its work.

    That begins with the first change of the store; the first put measures how long it takes.
    """
    chance, found = random.Random(seed), Counter[str]()
    words = [sys.executable, "-m", "bootseer", "stripe", "put", "--chunk", "4k", "--width", "3"]
    words += [str(case.source), str(case.store / "ck")]
    work_s = 0.0
    for turn in range(20 * count + 1):
        if found["kills"] == count:
            break
        case.reset()
        versions = set(os.listdir(case.store / "ck.stripes"))
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as child:
            while set(os.listdir(case.store / "ck.stripes")) == versions:
                assert child.poll() is None, "the put ended before it began"
                time.sleep(0.0005)
            began = time.monotonic()
            if not turn:
                assert child.wait() == 0
                work_s = time.monotonic() - began
                continue
            time.sleep(work_s * chance.uniform(0.0, 1.0))
            child.kill()
        assert child.returncode in (0, -signal.SIGKILL)
        if child.returncode:
            found["kills"] += 1
            case.after_kill(found)
    return found


def main() -> None:
    kind, count, seed = sys.argv[1], *map(int, sys.argv[2:4])
    with tempfile.TemporaryDirectory(dir=sys.argv[4]) as folder:
        case = Case(Path(folder), kind)
        found = at_random(case, count, seed) if count else every_step(case)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
