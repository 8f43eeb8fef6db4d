"""What a capture of a whole machine passes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.depsnap.capture import exclusions
from bootseer.system import mountinfo


def test_a_carriage_return_in_a_mount_points_name_hides_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n90 22 0:57 / /a\rb rw - ext4 /dev/sdb rw\n"
    (tmp_path / "mountinfo").write_bytes(text)
    monkeypatch.setattr(mountinfo, "MOUNTINFO", str(tmp_path / "mountinfo"))
    assert exclusions._mount_points(of_all_kinds=True) == ["/a\rb"]
