"""containerd's own test suite for snapshotters, run against ours over its socket.

What it checks, by its own names, and where the same is found among our tests in words:

Basic                       prepare, write, commit, stack, view, remove in order, refuse the rest
StatActive, StatComitted    what Stat says of each kind
TransitivityTest            parents' names along a chain
PreareViewFailingtest       keys that exist, parents that do not or are not committed
Update                      labels by field path; everything else refused
Remove                      keys free again after removal, in any state
Walk                        list, and every filter: name, parent, kind, labels
LayerFileupdate, RemoveDirectoryInLowerLayer, Chown, DirectoryPermissionOnCommit,
DeletedFilesInChildSnapshot, MoveFileFromLowerLayer
                            what overlays show of layers that change each other's files
RemoveIntermediateSnapshot  a parent cannot go before its child
ViewReadonly                a view cannot be written to
StatInWalk, CloseTwice, RootPermission, 128LayersMount
Rename                      left out by the suite itself, on every snapshotter
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]

PASSED = {
    *("Basic", "StatActive", "StatComitted", "TransitivityTest", "PreareViewFailingtest"),
    *("Update", "Remove", "Walk", "LayerFileupdate", "RemoveDirectoryInLowerLayer", "Chown"),
    *("DirectoryPermissionOnCommit", "RemoveIntermediateSnapshot", "DeletedFilesInChildSnapshot"),
    *("MoveFileFromLowerLayer", "ViewReadonly", "StatInWalk", "CloseTwice", "RootPermission"),
    "128LayersMount",
}


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "snap.sock"
    words = ["--root", str(tmp_path / "root"), "--address", str(path), "--plain"]
    command = [sys.executable, "-m", "bootseer", "snapshotter", *words]
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command], stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stderr is not None
        assert "listening" in child.stderr.readline()
        yield path
        child.terminate()
        assert child.wait() == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.debian("golang-github-containerd-containerd-dev")
def test_containerds_own_suite_passes(socket_path: Path, tmp_path: Path) -> None:
    from tools.containerd import suite

    work = tmp_path / "work"
    work.mkdir()
    # In namespaces of its own: what a failed test leaves mounted goes with it.
    isolated = ["unshare", "--mount", "--propagation", "private", "setpriv", "--pdeathsig", "KILL"]
    done = subprocess.run(
        [*isolated, str(suite.program()), "-test.v"],
        env={**os.environ, "SNAPSHOTTER_SOCKET": str(socket_path), "TMPDIR": str(work)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = set(re.findall(r"--- PASS: TestSnapshotter/(\S+)", done.stdout))
    assert passed == PASSED, done.stdout[-3000:]
    assert re.findall(r"--- SKIP: \S+/(\S+)", done.stdout) == ["Rename"]
    assert done.returncode == 0
