"""When reading ahead has to be guessed although there is a hot set."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.blockimage.pack_format import EMPTY
from bootseer.blockimage.serve.byte_source import FITTING_MISSES, Bytes, Frames
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import Priority
from tests.support.samples.block_sources import make_source
from tests.support.samples.fetch_sources import Arrival

BLOCK = 4096


@pytest.mark.parametrize(("priority", "guesses"), [(Priority.DEMAND, True), (Priority.HOT, False)])
def test_programs_that_miss_much_are_read_ahead_for(
    tmp_path: Path, priority: Priority, guesses: bool
) -> None:
    source = make_source(tmp_path / "source", 400 * BLOCK)
    with Fetcher() as fetcher:
        supply = Bytes(source.size_bytes, Frames(EMPTY, memory_bytes=1), lambda: (fetcher, source))

        def read(block: int) -> bytes:
            there = Arrival()
            held = supply.hold(block * BLOCK, BLOCK, there.set, priority)
            if held is None:
                assert there.wait(30)
                held = there.held()
            found = b"".join(held.views)
            held.release()
            return found

        raw = (tmp_path / "source/object-0").read_bytes()
        assert not supply.read_ahead
        for block in range(FITTING_MISSES // 4):
            assert read(7 * block) == raw[7 * block * BLOCK : (7 * block + 1) * BLOCK]
        assert not supply.read_ahead
        for block in range(200, 200 + FITTING_MISSES + 1):
            assert read(block) == raw[block * BLOCK : (block + 1) * BLOCK]
        assert supply.read_ahead is guesses
