"""A process that reads a lot and tells how much memory that took; run as a program by tests.

Arguments as JSON: `what` (`stream`, `small`, `held`), `url` of a file, `budget_bytes`, `parts` to
stream (first byte and the one after the last), `count` of small reads. Prints JSON: `read_bytes`,
`marks` (the bytes found at the positions in `positions`), `grown_bytes` (`stream`: the peak above
what the process had before the first read; else from a fifth of the reads to the last).
"""

from __future__ import annotations

import ctypes
import gc
import json
import queue
import random
import signal
import sys
from pathlib import Path
from typing import Any

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings, HeldBytes

PR_SET_PDEATHSIG = 1


def memory_bytes(field: str, pid: str = "self") -> int:
    """`VmRSS` or `VmHWM` (the peak) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field}")


def stream(file: Any, words: dict[str, Any]) -> dict[str, Any]:
    before = memory_bytes("VmRSS")
    buffer = bytearray(1 << 20)
    total, marks = 0, []
    for start, end in words["parts"]:
        at = file.seek(start)
        while at < end and (count := file.readinto(buffer)):
            marks += [buffer[p - at] for p in words["positions"] if at <= p < at + count]
            at += count
        total += at - start
    return {
        "read_bytes": total,
        "marks": marks,
        "grown_bytes": memory_bytes("VmHWM") - before,
    }


def hold(fetcher: Fetcher, source: Any, offset: int, length: int) -> HeldBytes:
    """As a FUSE server does: ask, and wait for the call."""
    arrived: queue.SimpleQueue[HeldBytes | Exception] = queue.SimpleQueue()
    held = fetcher.hold(source, offset, length, arrived.put) or arrived.get(timeout=60)
    assert isinstance(held, HeldBytes)
    return held


def many(file: Any, fetcher: Fetcher, words: dict[str, Any]) -> dict[str, Any]:
    chance = random.Random(1)
    buffer = bytearray(4096)
    total = grown = 0
    for number in range(words["count"]):
        # Mostly near the last place, sometimes anywhere, so that blocks come and go.
        if number % 20 == 0:
            near = chance.randrange(file.size - (1 << 20))
        offset = near + chance.randrange(1 << 18)
        if words["what"] == "small":
            total += file.read_at(offset, buffer)
        else:
            held = hold(fetcher, file.source, offset, len(buffer))
            total += sum(map(len, held.views))
            held.release()
        if number == words["count"] // 5:
            gc.collect()
            grown = memory_bytes("VmRSS")
    gc.collect()
    return {"read_bytes": total, "marks": [], "grown_bytes": memory_bytes("VmRSS") - grown}


def main(words: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with (
        Fetcher(FetchSettings(memory_bytes=words["budget_bytes"])) as fetcher,
        stripedfs.open(words["url"], fetcher=fetcher) as file,
    ):
        found = stream(file, words) if words["what"] == "stream" else many(file, fetcher, words)
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
