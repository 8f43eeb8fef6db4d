"""Scans of files that only root can make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.depsnap.capture.scan import scan
from tests.support.trees.snapshots import write


@pytest.mark.root
def test_capabilities_and_foreign_owners_are_seen(tmp_path: Path) -> None:
    file = write(tmp_path / "r/ping")
    os.chown(file, 1234, 4321)
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(file, "security.capability", capability)
    entry = scan(str(tmp_path / "r")).entries["ping"]
    assert (entry.uid, entry.gid) == (1234, 4321)
    assert ("security.capability", capability) in entry.xattrs
