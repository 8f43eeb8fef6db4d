"""Drafts: what their readers see, what they leave, and what is synced when."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.system.atomic import Draft, replace_file


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the operating system, in order; the calls themselves are real."""
    made: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        made.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        fsync(fd)

    def renamed(old: str, new: str) -> None:
        made.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    return made


def bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_bytes_are_durable_before_the_name_and_the_name_after(
    tmp_path: Path, calls: list[str]
) -> None:
    replace_file(str(tmp_path / "x"), b"new")
    assert calls == ["sync file", "rename", "sync folder"]
    assert (tmp_path / "x").read_bytes() == b"new"


def test_what_need_not_last_is_not_synced(tmp_path: Path, calls: list[str]) -> None:
    replace_file(str(tmp_path / "x"), b"new", sync=False)
    assert calls == ["rename"]


def test_a_name_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file("x", b"new")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.usefixtures("umask")
def test_permission_bits(tmp_path: Path) -> None:
    replace_file(str(tmp_path / "usual"), b"")
    replace_file(str(tmp_path / "exact"), b"", mode=0o664, exact_mode=True)
    assert (bits(tmp_path / "usual"), bits(tmp_path / "exact")) == (0o640, 0o664)


def test_a_block_left_by_an_exception_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with Draft(str(path), prefix=".mine-") as draft:
            draft.write(b"half")
            assert any(name.startswith(".mine-") for name in os.listdir(tmp_path))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_name_that_is_a_folder_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == ["x"]


def test_of_racing_creators_one_wins_and_its_bytes_are_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    won: list[bytes] = []
    gate = threading.Barrier(8)

    def create(number: int) -> None:
        data = bytes([number]) * 100_000
        with Draft(path) as draft:
            draft.write(data)
            gate.wait()
            if draft.publish_new():
                won.append(data)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [Path(path).read_bytes()]
    assert os.listdir(tmp_path) == ["x"]


def test_a_name_that_was_taken_for_a_moment_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"theirs")
    link = os.link

    def lost(source: str, target: str) -> None:
        try:
            link(source, target)
        finally:
            os.unlink(target)  # by whoever had it

    monkeypatch.setattr(os, "link", lost)
    with Draft(str(tmp_path / "x")) as draft:
        draft.write(b"ours")
        assert not draft.publish_new()
    assert list(tmp_path.iterdir()) == []
