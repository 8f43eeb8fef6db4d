"""What a capture of a whole machine passes over."""

from __future__ import annotations

import io
from typing import Any

import pytest

from bootseer.depsnap.capture import capture


def test_a_carriage_return_in_a_mount_points_name_hides_no_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n90 22 0:57 / /a\rb rw - ext4 /dev/sdb rw\n"

    def opened(_path: str, **options: Any) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(text), **options)

    monkeypatch.setattr(capture, "open", opened, raising=False)
    assert capture._mounts(every=True) == ["/a\rb"]
