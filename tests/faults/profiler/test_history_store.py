"""The history on a full disk."""

from __future__ import annotations

import os
import subprocess

import pytest

from bootseer.errors import NoSpaceError
from bootseer.profiler.history import store as history_store
from tests.support.samples.history_records import record


def names(store) -> list[str]:
    return sorted(n for n in os.listdir(store / "history") if n != ".lock")


@pytest.mark.root
def test_a_full_disk_is_said_and_leaves_the_rest_whole(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(mount)], check=True)
    try:
        added = 0
        with pytest.raises(NoSpaceError, match="history"):  # noqa: PT012 - which one fails varies
            while added < 100:
                history_store.add(str(mount), record(added))
                added += 1
        records, problems = history_store.read_all(str(mount))
        assert len(records) == added
        assert problems == []
        assert not any(name.startswith(".tmp-") for name in names(mount))
    finally:
        subprocess.run(["umount", str(mount)], check=True)
