"""A process that fills and reads a node cache until it is killed; run as a program by tests.

Arguments: the cache's directory, its limit in bytes, a seed, the number of blocks to handle (0 =
until killed). Every block it reads is compared with what it must be; a difference ends the
process with exit code 3. Prints `ready` when it has handled some, and counts as JSON at its end.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import signal
import sys

from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.storage.local import LocalStore

BLOCK = 8192
BLOCKS = 64
OBJECTS = 6
PR_SET_PDEATHSIG = 1


class Numbered:
    """Object `number`: every block is its own, and can be told without a store."""

    in_place = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = f"numbered {number}"
        self.block_bytes = BLOCK
        self.size_bytes = BLOCKS * BLOCK - 100 * number
        self.store = LocalStore("/nonexistent")

    def block(self, index: int) -> bytes:
        size = min(BLOCK, self.size_bytes - index * BLOCK)
        return random.Random(self.number << 20 | index).randbytes(16) * (size // 16 + 1)

    def raw(self, index: int) -> bytes:
        return self.block(index)[: min(BLOCK, self.size_bytes - index * BLOCK)]


def check_all(directory: str, limit_bytes: int) -> tuple[int, int]:
    """Blocks that are present, and those dropped as corrupt; AssertionError for a wrong byte."""
    present = 0
    with NodeCache.at(directory, limit_bytes) as cache:
        for number in range(OBJECTS):
            source = Numbered(number)
            with cache.open(source) as kept:  # type: ignore[arg-type]
                for index in range(BLOCKS):
                    wanted = source.raw(index)
                    raw = memoryview(bytearray(len(wanted)))
                    if kept.read(index, raw):
                        assert raw == wanted, (number, index)
                        present += 1
        return present, cache.corrupt_blocks


def main(directory: str, limit_bytes: int, seed: int, count: int) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    chance = random.Random(seed)
    hits = 0
    with NodeCache.at(directory, limit_bytes) as cache:
        for done in itertools.count():
            if done == 1:
                print("ready", flush=True)
            source = Numbered(chance.randrange(OBJECTS))
            with cache.open(source) as kept:  # type: ignore[arg-type]
                for index in chance.sample(range(BLOCKS), 8):
                    wanted = source.raw(index)
                    raw = memoryview(bytearray(len(wanted)))
                    if kept.read(index, raw):
                        hits += 1
                        if raw != wanted:
                            return 3
                    elif kept.claim(index):
                        kept.store(index, memoryview(bytearray(wanted)))
                        kept.unclaim(index)
            if count and done >= count:
                print(json.dumps({"hits": hits, "corrupt": cache.corrupt_blocks}))
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5])))
