"""A prefetch that lets the job go first."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.stripedfs.mount import expected_load, prefetch
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import content, store_of, tree_at
from tests.support.waiting import until


def niceness() -> set[int]:
    """That of this process's threads; of those that end meanwhile nothing."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return found


@pytest.mark.root
@pytest.mark.parametrize("ended_by", ["opening", "end"])
def test_a_starting_job_goes_first_until_it_opens_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """Fetching is held up meanwhile."""
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events"))
    fetcher = Fetcher(FetchSettings(memory_bytes=64 << 20))
    before, go_on, fetch = niceness(), threading.Event(), fetcher.prefetch

    def fetch_later(*arguments: Any) -> Any:
        assert go_on.wait(10)
        return fetch(*arguments)

    monkeypatch.setattr(fetcher, "prefetch", fetch_later)
    (tmp_path / "source").mkdir()
    for name, size_bytes in (("large", expected_load.SMALL_BYTES + 1), ("small", 100)):
        (tmp_path / "source" / name).write_bytes(content(size_bytes))
    put_into(store_of(tmp_path / "s"), "run", str(tmp_path / "source"))
    tree = tree_at(StripedTree, store_of(tmp_path / "s"), "run", fetcher)
    work = prefetch.Prefetch(tree, "", most_bytes=None, is_starting=True)
    tree.set_companion(work)
    work.start()
    lower = {one + prefetch.YIELDING_STEPS for one in before}
    until(lambda: niceness() == lower, "the job goes first")
    small, large = sorted(
        expected_load.find_expected(tree, ""), key=lambda node: node.info.size_bytes
    )
    tree.open(small.inode, os.O_RDONLY)
    assert niceness() == lower
    if ended_by == "opening":
        tree.open(large.inode, os.O_RDONLY)
        assert niceness() == before
    go_on.set()
    until(lambda: not work._thread.is_alive(), "the prefetch has ended")
    assert niceness() == before
    assert work.fetched_bytes == expected_load.SMALL_BYTES + 101
    tree.destroy()
    fetcher.close()
