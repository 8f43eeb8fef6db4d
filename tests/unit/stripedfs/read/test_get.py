"""Gets that were interrupted go on, and believe nothing that they cannot check."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from bootseer.errors import BusyError, StoreUnavailableError, UsageError
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.read import batches
from bootseer.stripedfs.write.put import put_into
from tests.support.samples.stripes import (
    CHUNK,
    ONE_BY_ONE,
    Watched,
    get_quickly,
    local_tree,
    make_tree,
    sample,
    store_sample,
)


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MIN_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(batches, "MAX_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr("bootseer.stripedfs.read.partial_download.SAVE_S", 0.0)


def _cut_off(store: Path, after: int) -> Watched:
    left = [after]

    def before(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreUnavailableError("the server went away")

    return Watched(store, before)


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("name", ["f", "plain"])
def test_a_get_goes_on_where_it_was_cut(tmp_path: Path, name: str) -> None:
    data = store_sample(tmp_path, 6 << 20)
    to = tmp_path / "out"
    with pytest.raises(StoreUnavailableError):
        get_quickly(_cut_off(tmp_path / "s", 3 if name == "plain" else 12), name, to)
    assert not to.exists()
    report = get_quickly(LocalStore(str(tmp_path / "s")), name, to)
    assert to.read_bytes() == data
    assert 0 < report.kept_bytes < len(data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s"]


@pytest.mark.usefixtures("_small_batches")
def test_what_a_get_kept_is_verified(tmp_path: Path) -> None:
    data = store_sample(tmp_path, 6 << 20)
    with pytest.raises(StoreUnavailableError):
        get_quickly(_cut_off(tmp_path / "s", 12), "f", tmp_path / "out")
    part = tmp_path / ".out.bootseer-part"
    with open(part, "r+b") as file:
        for place in range(0, len(data), 8 * CHUNK):
            file.seek(place)
            file.write(b"rot")
    report = get_quickly(LocalStore(str(tmp_path / "s")), "f", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert report.kept_bytes < len(data)


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("how", ["told", "replaced", "torn", "rebooted", "no boot is told"])
def test_a_get_begins_anew_when_it_must(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "no boot is told":
        monkeypatch.setattr("bootseer.stripedfs.read.partial_download._boot_id", lambda: "")
    data = store_sample(tmp_path, 4 << 20)
    with pytest.raises(StoreUnavailableError):
        get_quickly(_cut_off(tmp_path / "s", 8), "f", tmp_path / "out")
    note = tmp_path / ".out.bootseer-get"
    match how:
        case "replaced":
            data = store_sample(tmp_path, (4 << 20) + 1)
        case "torn":
            note.write_bytes(note.read_bytes()[:-30])
        case "rebooted":
            body = json.loads(note.read_bytes())
            note.write_text(json.dumps({**body, "boot": "another"}))
    report = get_quickly(
        LocalStore(str(tmp_path / "s")), "f", tmp_path / "out", resume=how != "told"
    )
    assert report.kept_bytes == 0
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.usefixtures("_small_batches")
def test_a_directory_get_goes_on(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src")
    (source / "z.bin").write_bytes(sample(1500 * CHUNK, 9))
    put_into(LocalStore(str(tmp_path / "s")), "ck", str(source), settings=ONE_BY_ONE)
    # Two batches of at most 14 and 4 requests are under way at once: one has ended by the 22nd.
    with pytest.raises(StoreUnavailableError):
        get_quickly(_cut_off(tmp_path / "s", 22), "ck", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = get_quickly(LocalStore(str(tmp_path / "s")), "ck", tmp_path / "out")
    assert report.kept_bytes > 0
    assert local_tree(tmp_path / "out") == local_tree(source)


def test_of_two_gets_to_one_place_the_second_waits_its_turn(tmp_path: Path) -> None:
    data = store_sample(tmp_path)
    reached, go_on = threading.Event(), threading.Event()

    def before(name: str) -> None:
        reached.set()
        go_on.wait(30)

    slow = Watched(tmp_path / "s", before)
    first = threading.Thread(target=get_quickly, args=(slow, "f", tmp_path / "out"))
    first.start()
    reached.wait(30)
    with pytest.raises(BusyError, match="another get"):
        get_quickly(LocalStore(str(tmp_path / "s")), "f", tmp_path / "out")
    go_on.set()
    first.join()
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("name", ["f", "plain"])
@pytest.mark.parametrize("how", ["missing", "short", "another", "rotten", "grown from nothing"])
def test_what_is_left_of_a_part_is_checked(tmp_path: Path, name: str, how: str) -> None:
    data = store_sample(tmp_path, 6 << 20)
    with pytest.raises(StoreUnavailableError):
        get_quickly(_cut_off(tmp_path / "s", 3 if name == "plain" else 12), name, tmp_path / "out")
    part = tmp_path / ".out.bootseer-part"
    match how:
        case "missing":
            part.unlink()
        case "short":
            os.truncate(part, 1 << 20)
        case "another":
            other = tmp_path / "other"
            other.write_bytes(bytes(len(data)))
            other.rename(part)
        case "rotten":
            with open(part, "r+b") as file:
                for place in range(0, len(data), 64 << 10):
                    file.seek(place)
                    file.write(b"rot")
        case _:
            os.truncate(part, 0)
            os.truncate(part, len(data))
    report = get_quickly(LocalStore(str(tmp_path / "s")), name, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert report.kept_bytes == 0


@pytest.mark.usefixtures("_small_batches")
def test_one_rotten_stretch_costs_no_other(tmp_path: Path) -> None:
    data = store_sample(tmp_path, 6 << 20)
    for reads in (3, 2):  # of six
        with pytest.raises(StoreUnavailableError):
            get_quickly(_cut_off(tmp_path / "s", reads), "plain", tmp_path / "out")
        with open(tmp_path / ".out.bootseer-part", "r+b") as file:
            file.write(b"rot")  # in the first MiB, which the second get fetches again
    report = get_quickly(LocalStore(str(tmp_path / "s")), "plain", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert 0 < report.kept_bytes < len(data)


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    store_sample(tmp_path)
    put_into(LocalStore(str(tmp_path / "s")), "ck", str(make_tree(tmp_path / "src")))
    os.mkfifo(tmp_path / "pipe")
    bound = socket.socket(socket.AF_UNIX)
    with bound:
        bound.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "output").symlink_to(f"/proc/{os.getpid()}/exe")
    before = sorted(tmp_path.iterdir())
    for target in ("pipe", "socket", "link", "output"):
        kind = os.lstat(tmp_path / target)
        for name in ("f", "plain", "ck"):
            with pytest.raises(UsageError, match="no ordinary file"):
                get_quickly(LocalStore(str(tmp_path / "s")), name, tmp_path / target)
        assert os.path.samestat(os.lstat(tmp_path / target), kind)
    assert sorted(tmp_path.iterdir()) == before
