"""What the page cache has of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.system.page_cache import count_cached_bytes

SIZE = 1 << 20


def test_what_was_just_written_is_cached(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * SIZE)
    with open(tmp_path / "file", "rb") as file:
        assert count_cached_bytes(file.fileno(), 0, SIZE) == SIZE
        assert count_cached_bytes(file.fileno(), 0, 0) == SIZE
        assert count_cached_bytes(file.fileno(), SIZE // 2, SIZE) == SIZE // 2
        assert count_cached_bytes(file.fileno(), SIZE, SIZE) == 0
        os.truncate(tmp_path / "file", 0)
        os.truncate(tmp_path / "file", SIZE)  # a hole, which nobody has read
        assert count_cached_bytes(file.fileno(), 0, SIZE) == 0


def test_a_descriptor_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match=r"Bad file descriptor|not implemented"):
        count_cached_bytes(-1, 0, SIZE)
