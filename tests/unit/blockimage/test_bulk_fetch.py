"""The bulk fetch of an image of which the hot set is the most."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from bootseer.blockimage.serve.bulk_fetch import PAUSE_S, WholeFetch
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.blocks.extents import Extent
from bootseer.blocks.fetch.fetcher import Fetcher
from tests.support.mounts.images import some_files
from tests.support.trees.hotsets import Tree

BLOCK = 256 << 10
FILES = some_files()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("trees") / "tree", FILES)


def shuffled(tree: Tree) -> list[Extent]:
    size = tree.source.size_bytes
    blocks = [Extent(at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
    random.Random(4).shuffle(blocks)
    return blocks


def test_all_blocks_are_fetched_into_the_cache(tree: Tree, tmp_path: Path):
    with (
        NodeCache.at(str(tmp_path), 1 << 30) as cache,
        Fetcher(cache=cache) as fetcher,
        cache.open(tree.source) as cached,
    ):
        blocks = -(-tree.source.size_bytes // BLOCK)
        assert len(cached.missing(0, blocks)) == blocks
        WholeFetch(fetcher, tree.source, shuffled(tree)).run()
        end_s = time.monotonic() + 30
        while cached.missing(0, blocks) and time.monotonic() < end_s:
            time.sleep(0.01)  # what arrived is stored soon after
        assert cached.missing(0, blocks) == []


def test_reads_that_do_not_follow_the_order_hold_it(tree: Tree):
    now = [100.0]
    order = shuffled(tree)
    with Fetcher() as fetcher:
        whole = WholeFetch(fetcher, tree.source, order, clock=lambda: now[0])
        assert not whole.holds
        whole.note_miss(order[3].offset + 10)  # soon to come
        assert not whole.holds
        whole.note_miss(tree.source.size_bytes + 5)  # not in it at all
        assert whole.holds
        now[0] += PAUSE_S
        assert not whole.holds
        near = WholeFetch(fetcher, tree.source, order, near_bytes=4 * BLOCK, clock=lambda: now[0])
        near.note_miss(order[3].offset)
        assert not near.holds
        near.note_miss(order[9].offset)  # far down the order
        assert near.holds


def test_what_stands_still_can_be_closed(tree: Tree):
    with Fetcher() as fetcher:
        whole = WholeFetch(fetcher, tree.source, shuffled(tree), clock=lambda: 0.0)
        whole.note_miss(1 << 50)
        thread = threading.Thread(target=whole.run)
        thread.start()
        whole.close()
        whole.close()
        thread.join(30)
        assert not thread.is_alive()
