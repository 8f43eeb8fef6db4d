"""Regular files: opened as such, and moved whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bootseer.system.regular_files import read_fully, reopen_to_read, write_fully


def test_what_an_o_path_descriptor_names_is_opened_if_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("file")
    for name, fits in (("file", True), ("fifo", False), ("link", False), (".", False)):
        place = os.open(tmp_path / name, os.O_PATH | os.O_NOFOLLOW)
        if fits:
            fd = reopen_to_read(place)
            assert os.read(fd, 10) == b"content"
            os.close(fd)
        else:
            with pytest.raises(OSError, match="not a regular file: 'its name'"):
                reopen_to_read(place, "its name")
        os.close(place)


def test_a_file_that_ends_before_fills_less(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    view = memoryview(bytearray(8))
    with open(tmp_path / "f", "rb") as file:
        assert read_fully(file.fileno(), view, 1) == 8
        assert view.tobytes() == b"12345678"
        assert read_fully(file.fileno(), view, 7) == 3
        assert view[:3].tobytes() == b"789"
        assert read_fully(file.fileno(), view, 99) == 0
        assert read_fully(file.fileno(), view[:0], 0) == 0


def test_all_is_written_though_the_kernel_takes_it_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe takes 64 KiB; FAKE: a medium that takes three bytes at a time."""
    data, out = os.urandom(1 << 20), bytearray()
    read, write = os.pipe()

    def drain() -> None:
        while piece := os.read(read, 10_000):
            out.extend(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    write_fully(write, data)
    os.close(write)
    reader.join()
    os.close(read)
    assert out == data
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: really(fd, view[:3], at))
    with open(tmp_path / "f", "wb+") as file:
        write_fully(file.fileno(), data[:1000], 5)
    assert (tmp_path / "f").read_bytes() == bytes(5) + data[:1000]
