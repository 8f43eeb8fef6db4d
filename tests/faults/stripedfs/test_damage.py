"""Damage is named and never served; a full disk or a refusal leaves the old checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
)
from bootseer.stripedfs.read import get
from bootseer.stripedfs.read.get import get_from_store
from bootseer.stripedfs.read.namespace import look_up
from bootseer.stripedfs.read.verify import VerifyReport, describe_damage, verify_in_store
from bootseer.stripedfs.write.put import put
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.mounts.tmpfs import tmpfs
from tests.support.samples.stripes import (
    CHUNK,
    make_tree,
    opened,
    read_back,
    sample,
    version_folder,
    whole,
)

SMALL = WriteSettings(chunk_bytes=CHUNK, width=3, keep_bytes=0)
QUICK = FetchSettings(tries=2, corrupt_tries=2, backoff_s=0.001)
DATA = sample(20 * CHUNK + 9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version of a stored checkpoint `f`."""
    with StripedWriter.begin(opened(tmp_path / "s"), "f", SMALL) as out:
        out.write(DATA)
    return version_folder(tmp_path / "s", "f")


def _verified(store: Path, name: str = "f") -> VerifyReport:
    with Fetcher(QUICK) as fetcher:
        return verify_in_store(opened(store), name, fetcher)


def _flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def _flip_one(folder: Path) -> None:
    _flip(folder / "stripe-00001", 2 * CHUNK + 17)  # chunk 7


def _swap(folder: Path) -> None:
    (folder / "stripe-00000").rename(folder / "x")
    (folder / "stripe-00002").rename(folder / "stripe-00000")
    (folder / "x").rename(folder / "stripe-00002")


def _swap_equal(folder: Path) -> None:
    """Stripes of one length: only their digests tell."""
    first, second = ((folder / f"stripe-0000{n}").read_bytes() for n in (0, 1))
    (folder / "stripe-00000").write_bytes(second[: len(first)])
    (folder / "stripe-00001").write_bytes(first[: len(second)])


Damage = Callable[[Path], None]
DAMAGES: list[tuple[Damage, str, list[str]]] = [
    (_flip_one, "chunk 7 ", ["chunk 7 of stripe-00001"]),
    (lambda f: (f / "stripe-00001").unlink(), "stripe-00001", ["stripe-00001 is missing"]),
    (lambda f: os.truncate(f / "stripe-00002", 5), "stripe-00002", ["stripe-00002 has 5 bytes"]),
    (lambda f: os.truncate(f / "stripe-00000", 10**6), "stripe-00000", ["stripe-00000 has"]),
    (_swap, "stripe-0000", ["stripe-00000 has", "stripe-00002 has"]),
    (_swap_equal, "chunk ", ["stripe-00000", "stripe-00001"]),
]


@pytest.mark.parametrize(("damage", "read", "named"), DAMAGES)
def test_damage_is_named_and_never_served(
    tmp_path: Path, folder: Path, damage: Damage, read: str, named: list[str]
) -> None:
    assert _verified(tmp_path / "s").damages == ()
    damage(folder)
    with pytest.raises(CorruptDataError, match=read):
        read_back(opened(tmp_path / "s"), "f")
    report = _verified(tmp_path / "s")
    lines = [describe_damage(each) for each in report.damages]
    for words in named:
        assert any(words in line for line in lines), lines
    assert report.checked_bytes < len(DATA)
    store = opened(tmp_path / "s")
    with Fetcher(QUICK) as fetcher, pytest.raises(CorruptDataError):
        get_from_store(store, look_up(store, "f"), str(tmp_path / "out"), fetcher)
    assert not (tmp_path / "out").exists()


def test_verify_names_every_chunk_and_goes_on(tmp_path: Path, folder: Path) -> None:
    for chunk in (0, 4, 20):
        _flip(folder / f"stripe-{chunk % 3:05d}", chunk // 3 * CHUNK + 1)
    report = _verified(tmp_path / "s")
    assert [(d.stripe, d.chunk) for d in report.damages] == [(0, 0), (1, 4), (2, 20)]
    assert report.checked_bytes == len(DATA) - 2 * CHUNK - 9


def test_verify_reads_what_is_left_of_a_lost_stripe(tmp_path: Path, folder: Path) -> None:
    (folder / "stripe-00002").unlink()
    _flip_one(folder)
    report = _verified(tmp_path / "s")
    assert [(d.stripe, d.chunk) for d in report.damages] == [(2, -1), (1, 7)]
    assert report.checked_bytes == len(DATA) - (6 * CHUNK + 9) - CHUNK


def test_verify_of_a_directory(tmp_path: Path) -> None:
    put(str(make_tree(tmp_path / "src")), str(tmp_path / "s/ck"), settings=SMALL)
    assert _verified(tmp_path / "s", "ck").damages == ()
    data = version_folder(tmp_path / "s", "ck") / "data"
    _flip(data / "model.bin/stripe-00000", CHUNK)
    _flip(data / "sub/deep/small.json", 0)
    (data / "sub/exact/manifest.json").write_text("{}")
    (data / "sub/nothing").unlink()
    report = _verified(tmp_path / "s", "ck")
    assert [(d.path, d.chunk) for d in report.damages] == [
        ("model.bin", 3),
        ("sub/deep/small.json", -1),
        ("sub/exact", -1),
        ("sub/nothing", -1),
    ]
    with Fetcher(QUICK) as fetcher, pytest.raises(CorruptDataError):
        get_from_store(
            opened(tmp_path / "s"),
            look_up(opened(tmp_path / "s"), "ck"),
            str(tmp_path / "out"),
            fetcher,
        )
    assert not (tmp_path / "out").exists()


def _rewrite(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changed}))


DOCUMENTS: list[tuple[Damage, type[BootseerError], str]] = [
    (lambda f: (f / "manifest.json").unlink(), CorruptDataError, "gone or incomplete"),
    (lambda f: os.truncate(f / "manifest.json", 50), CorruptDataError, r"manifest\.json.*damaged"),
    (lambda f: _rewrite(f / "manifest.json", version=2), NotSupportedError, "version 2.*newer"),
    (lambda f: _rewrite(f / "manifest.json", size_bytes=1), CorruptDataError, "damaged"),
    (lambda f: _rewrite(f / "manifest.json"), CorruptDataError, "not the one that was published"),
    (lambda f: os.truncate(f.parent / "CURRENT", 50), CorruptDataError, "CURRENT.*damaged"),
    (lambda f: os.truncate(f.parent / "CURRENT", 0), CorruptDataError, "CURRENT.*damaged"),
    (lambda f: os.truncate(f.parent / "CURRENT", 1 << 20), CorruptDataError, "more than the"),
    (lambda f: _rewrite(f.parent / "CURRENT", version=9), NotSupportedError, "version 9.*newer"),
    (lambda f: _rewrite(f.parent / "CURRENT", size_bytes=1), CorruptDataError, "its pointer says"),
    (lambda f: shutil.rmtree(f), CorruptDataError, "gone or incomplete"),
]


@pytest.mark.parametrize(("damage", "error", "words"), DOCUMENTS)
def test_damaged_documents(
    tmp_path: Path, folder: Path, damage: Damage, error: type[BootseerError], words: str
) -> None:
    damage(folder)
    with pytest.raises(error, match=words):
        read_back(opened(tmp_path / "s"), "f")
    with pytest.raises(error, match=words):
        _verified(tmp_path / "s")


def test_verify_of_what_is_not_striped(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"1")
    for name in ("plain", "none"):
        with pytest.raises(NotFoundError, match="no striped checkpoint"):
            _verified(tmp_path, name)


# --- full and read-only disks ---------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "2m") as folder:
        yield folder


@pytest.mark.root
@pytest.mark.parametrize("kind", ["file", "tree", "stream"])
def test_a_full_disk_keeps_the_old_checkpoint(small_disk: Path, tmp_path: Path, kind: str) -> None:
    with StripedWriter.begin(opened(small_disk), "f", SMALL) as out:
        out.write(DATA)
    before = sorted(p.name for p in (small_disk / "f.stripes").iterdir())
    (tmp_path / "src").mkdir()
    (tmp_path / "src/big").write_bytes(sample(3 << 20))
    source = tmp_path / "src" if kind == "tree" else tmp_path / "src/big"

    def write() -> None:
        if kind == "stream":
            with StripedWriter.begin(opened(small_disk), "f", SMALL) as out:
                out.write(source.read_bytes())
        else:
            put(str(source), str(small_disk / "f"), settings=SMALL)

    with pytest.raises(NoSpaceError, match="free space"):
        write()
    assert sorted(p.name for p in (small_disk / "f.stripes").iterdir()) == before
    assert whole(small_disk, "f") == DATA


@pytest.mark.root
def test_a_read_only_store_refuses(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    put(str(tmp_path / "f"), str(small_disk / "f"), settings=SMALL)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(AccessDeniedError):
        put(str(tmp_path / "f"), str(small_disk / "f"), settings=SMALL)
    assert whole(small_disk, "f") == DATA


@pytest.mark.root
def test_a_get_that_has_no_room_leaves_nothing(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StripedWriter.begin(opened(tmp_path / "s"), "f", SMALL) as out:
        out.write(sample(3 << 20))
    store = opened(tmp_path / "s")
    with Fetcher(QUICK) as fetcher:
        with pytest.raises(NoSpaceError, match="needs 3145728 bytes"):
            get_from_store(store, look_up(store, "f"), str(small_disk / "out"), fetcher)
        assert list(small_disk.iterdir()) == []
        # The room is there when it is looked at, and gone when it is used.
        monkeypatch.setattr(
            "bootseer.stripedfs.read.partial_download.PartialDownload.check_room", lambda *_: None
        )
        with pytest.raises(NoSpaceError):
            get_from_store(store, look_up(store, "f"), str(small_disk / "out"), fetcher)
    assert list(small_disk.iterdir()) == []


def test_a_destination_that_cannot_be_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(get.os, "pwrite", refuse)
    store = opened(tmp_path / "s")
    with Fetcher(QUICK) as fetcher, pytest.raises(AccessDeniedError, match="Permission denied"):
        get_from_store(store, look_up(store, "f"), str(tmp_path / "out"), fetcher)
    assert not (tmp_path / "out").exists()
