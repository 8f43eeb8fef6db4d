"""What Python programs do with the fsspec file system besides reading: lines, JSON, errors."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.options import StoreOptions
from bootseer.stripedfs.file import PEEK_BYTES, StripedFile
from bootseer.stripedfs.file_errors import file_error
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.examples import examples
from tests.support.mounts.checkpoints import CHUNK, SMALL, content, put_bytes, store_of


@pytest.fixture
def fs() -> StripedFileSystem:
    return StripedFileSystem(writing=SMALL)


def test_lines_are_read_in_pieces_not_one_by_one(
    fs: StripedFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"a line of a data set\n" * 50_000
    fs.pipe_file(f"{tmp_path}/x", data)
    reads: list[int] = []
    read_at = StripedFile.read_at
    monkeypatch.setattr(
        StripedFile, "read_at", lambda f, *given: reads.append(given[0]) or read_at(f, *given)
    )
    most = len(data) // (PEEK_BYTES - 100) + 2
    for count in (
        lambda file: sum(1 for _ in file),
        lambda file: len(file.readlines()),
        lambda file: sum(1 for _ in iter(file.readline, b"")),
        lambda file: sum(1 for _ in iter(lambda: next(file, b""), b"")),
    ):
        reads.clear()
        with fs.open(f"{tmp_path}/x") as file:
            assert count(file) == 50_000
        assert 0 < len(reads) <= most


def take(file: Any, step: str) -> object:
    """One step of a program that reads lines; what it got."""
    if step in ("loop", "back"):
        found = []
        for line in file:
            found.append(line)
            if step == "back":
                file.seek(max(0, file.tell() - 3))
            if step == "back" or len(line) % 2:
                break
        return found
    steps: dict[str, Callable[[], object]] = {
        "line": file.readline,
        "short": lambda: [file.readline(7), file.readline(0), file.readline(70_000)],
        "next": lambda: next(file, None),
        "read": lambda: file.read(5),
        "peek": lambda: file.peek(1)[:1],
        "rest": lambda: file.readlines(9),
    }
    return steps[step]()


@settings(deadline=None, max_examples=examples(100))
@given(
    lines=st.lists(st.integers(0, 40_000), max_size=8),
    end=st.binary(max_size=3).filter(lambda b: b"\n" not in b),
    steps=st.lists(
        st.sampled_from(["line", "short", "next", "loop", "read", "back", "peek", "rest"]),
        max_size=12,
    ),
)
def test_lines_are_those_of_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], end: bytes, steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    data = b"".join(b"x" * length + b"\n" for length in lines) + end
    (folder / "x").write_bytes(data)

    with open(folder / "x", "rb") as plain, StripedFileSystem().open(f"{folder}/x") as ours:
        for step in steps:
            assert take(ours, step) == take(plain, step)
            assert ours.tell() == plain.tell()


def test_a_loop_over_lines_obeys_what_is_done_meanwhile(
    fs: StripedFileSystem, tmp_path: Path
) -> None:
    fs.pipe_file(f"{tmp_path}/x", b"one\ntwo\nthree\nfour\n")
    with fs.open(f"{tmp_path}/x") as file:
        found = []
        for line in file:
            found.append(line)
            if line == b"two\n" and len(found) == 2:
                file.seek(0)
        assert found == [b"one\n", b"two\n", b"one\n", b"two\n", b"three\n", b"four\n"]
    with fs.open(f"{tmp_path}/x") as file:
        lines = iter(file)
        next(lines)
    with pytest.raises(ValueError, match="closed"):
        next(lines)
    with pytest.raises(ValueError, match="closed"):
        file.readline()


def test_a_file_system_with_settings_goes_through_json(tmp_path: Path) -> None:
    given = StripedFileSystem(
        target_protocol="webhdfs",
        target_options={"host": "nn", "port": 9870, "user": "alice"},
        options=StoreOptions(token_file="/t", hosts=("nn2:9870",), redirects="any"),
        writing=WriteSettings(width=3, chunk_bytes=CHUNK),
        fetcher=(fetcher := Fetcher()),
    )
    for again in (
        fsspec.AbstractFileSystem.from_json(given.to_json()),
        fsspec.AbstractFileSystem.from_dict(given.to_dict()),
        pickle.loads(pickle.dumps(given)),
    ):
        assert isinstance(again, StripedFileSystem)
        assert again.fsid == given.fsid == "striped_webhdfs://nn:9870/"
        assert again._options == given._options
        assert again._options.hosts == ("nn2:9870",)
        assert again._writing == given._writing
    fetcher.close()
    plain = StripedFileSystem(target_options=None)
    assert fsspec.AbstractFileSystem.from_json(plain.to_json()).fsid == plain.fsid
    cached = fsspec.filesystem(
        "simplecache", fs=StripedFileSystem(writing=SMALL), cache_storage=f"{tmp_path}/cache"
    )
    plain.pipe_file(f"{tmp_path}/x", b"some bytes")
    again = fsspec.AbstractFileSystem.from_json(cached.to_json())
    assert again.fs._writing == SMALL
    assert again.cat_file(f"{tmp_path}/x") == b"some bytes"


def test_settings_may_be_mappings(tmp_path: Path) -> None:
    """As configuration files of other programs have them."""
    options = {"options": {"hosts": ["nn2:9870"], "token_file": "/t"}, "writing": {"width": 2}}
    made = fsspec.filesystem("striped", **options)
    assert made._options == StoreOptions(hosts=("nn2:9870",), token_file="/t")
    assert made._writing == WriteSettings(width=2)
    with pytest.raises(TypeError, match="wide"):
        fsspec.filesystem("striped", writing={"wide": 2})


def test_a_file_that_is_written_cannot_be_read(fs: StripedFileSystem, tmp_path: Path) -> None:
    with fs.open(f"{tmp_path}/x", "wb") as file:
        file.write(b"x")
        steps = (
            lambda: file.read(1),
            file.read,
            file.readline,
            lambda: file.readinto(bytearray(1)),
        )
        for step in steps:
            with pytest.raises(OSError, match="not readable"):
                step()
    assert fs.cat(f"{tmp_path}/x") == b"x"


def test_every_error_of_a_file_is_an_os_error(fs: StripedFileSystem, tmp_path: Path) -> None:
    put_bytes(store_of(tmp_path), "damaged", content(9 * CHUNK), tmp_path, SMALL)
    for stripe in tmp_path.glob("damaged.stripes/*/stripe-00001"):
        stripe.write_bytes(b"?" * stripe.stat().st_size)
    with fs.open(f"{tmp_path}/damaged") as file, pytest.raises(OSError, match="damaged") as caught:
        file.read()
    assert isinstance(caught.value, CorruptDataError)
    assert caught.value.errno == errno.EIO
    [found] = fs.cat_ranges([f"{tmp_path}/damaged"], [0], [9 * CHUNK])
    assert isinstance(found, CorruptDataError)
    assert isinstance(found, OSError)
    with pytest.raises(OSError, match="too long") as caught:
        fs.pipe_file(f"{tmp_path}/{'n' * 300}", b"x")
    assert isinstance(caught.value, UsageError)
    gone = fsspec.filesystem(
        "striped",
        target_protocol="webhdfs",
        target_options={"host": "127.0.0.1", "port": 1},
        options={"retry_s": 0.0},
    )
    with pytest.raises(OSError, match="not reachable") as caught:
        gone.info("/x")
    assert isinstance(caught.value, StoreUnavailableError)


@pytest.mark.parametrize("kind", BootseerError.__subclasses__())
def test_an_error_stays_ours_and_keeps_what_it_says(kind: type[BootseerError]) -> None:
    error = kind("what happened; what to do")
    if isinstance(error, StoreUnavailableError):
        error.retry_after_s = 7.0
    made = file_error(error)
    for each in (made, pickle.loads(pickle.dumps(made))):
        assert isinstance(each, kind)
        assert isinstance(each, OSError)
        assert str(each) == "what happened; what to do"
        assert each.errno
        assert each.exit_code == error.exit_code
        assert getattr(each, "retry_after_s", 7.0) == 7.0
    assert isinstance(made, TimeoutError) is (kind is DeadlineError)
    assert file_error(made) is made


# `WriteSettings(width=12)`, pickled by an earlier version.
EARLIER = (
    b"\x80\x04\x95T\x00\x00\x00\x00\x00\x00\x00\x8c\x1bbootseer.stripedfs.settings\x94\x8c\rWriteSettings"
    b"\x94\x93\x94)\x81\x94]\x94(K\x0cJ\x00\x00@\x00K\x00K\x00\x8c\x04auto\x94K\x00K\x10J\x00\x00\x00\x01eb."
)


def test_settings_that_an_earlier_version_pickled_load() -> None:
    assert pickle.loads(EARLIER) == WriteSettings(width=12)
    from bootseer.stripedfs import fs

    assert fs.WriteSettings is WriteSettings
