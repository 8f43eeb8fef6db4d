"""The history on a full disk, and when its writer is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from bootseer.errors import NoSpaceError
from bootseer.profiler.history import store as history_store
from tests.support.mounts.tmpfs import tmpfs
from tests.support.paths import ROOT
from tests.support.samples.history_records import names, record


@pytest.mark.root
def test_a_full_disk_is_said_and_leaves_the_rest_whole(tmp_path):
    with tmpfs(tmp_path / "small", "40k") as mount:
        added = 0
        with pytest.raises(NoSpaceError, match="history"):  # noqa: PT012 - which one fails varies
            while added < 100:
                history_store.add(str(mount), record(added))
                added += 1
        records, problems = history_store.read_all(str(mount))
        assert len(records) == added
        assert problems == []
        assert not any(name.startswith(".tmp-") for name in names(mount))


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from bootseer.profiler.history import store as history_store
from tests.support.samples.history_records import record
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(history_store.os, sys.argv[3], die)
history_store.add(sys.argv[1], record())
"""


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_a_killed_writer_leaves_nothing_that_counts(tmp_path, moment):
    here = str(ROOT)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), here, moment], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(".tmp-") for name in names(tmp_path))
    assert history_store.read_all(str(tmp_path)) == ([], [])
    assert history_store.add(str(tmp_path), record()) == "added"
    assert names(tmp_path) == [record().trace_id + ".parquet"]
