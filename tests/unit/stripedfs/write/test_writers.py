"""Files put and streamed: sizes around every border, writers at once, stores that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import BusyError, StoreUnavailableError, UsageError
from bootseer.storage.local import LocalStore, LocalWriter
from bootseer.storage.store import NO_HINTS, WriteHints
from bootseer.stripedfs.write import stripe_upload
from bootseer.stripedfs.write.put import put, put_into
from bootseer.stripedfs.write.stripe_stream import StripedWriter, StripeStream
from bootseer.stripedfs.write.write_settings import WriteSettings, plan_write
from tests.support.examples import examples
from tests.support.samples.stripes import (
    CHUNK,
    leftovers,
    opened,
    read_back,
    sample,
    version_folder,
    whole,
)

SMALL = WriteSettings(chunk_bytes=CHUNK, width=3, keep_bytes=0)
SIZES = sorted({0, 1, *(n * CHUNK + d for n in (1, 2, 3, 6, 7) for d in (-1, 0, 1))})


@pytest.mark.parametrize("size", SIZES)
def test_put_keeps_every_byte(tmp_path: Path, size: int) -> None:
    data = sample(size)
    (tmp_path / "f").write_bytes(data)
    report = put(str(tmp_path / "f"), str(tmp_path / "s/f"), settings=SMALL)
    assert report.size_bytes == size
    assert whole(tmp_path / "s", "f") == data
    assert leftovers(tmp_path / "s", "f") == []
    store = opened(tmp_path / "s")
    assert read_back(store, "f") == data
    assert read_back(store, "f.stripes") == data


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_is_stored_as_a_file_is(tmp_path: Path, size: int) -> None:
    data = sample(size)
    with StripedWriter.begin(opened(tmp_path), "f", SMALL) as writer:
        for start in range(0, size, 1000):
            assert writer.write(data[start : start + 1000]) == len(data[start : start + 1000])
        assert writer.tell() == size
    (tmp_path / "source").write_bytes(data)
    put(str(tmp_path / "source"), str(tmp_path / "g"), settings=SMALL)
    for name in ("f", "g"):
        assert whole(tmp_path, name) == data
    manifests = [(version_folder(tmp_path, n) / "manifest.json").read_bytes() for n in "fg"]
    assert manifests[0] == manifests[1]


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.integers(0, 3 * CHUNK), max_size=8),
    width=st.integers(1, 5),
    chunks=st.integers(1, 2),
)
def test_any_pieces_make_the_same_stripes(
    tmp_path: Path, pieces: list[int], width: int, chunks: int
) -> None:
    store, data = opened(tmp_path), sample(sum(pieces))
    with StripedWriter.begin(
        store, "f", WriteSettings(chunk_bytes=chunks * CHUNK, width=width)
    ) as out:
        start = 0
        for length in pieces:
            out.write(memoryview(data)[start : start + length])
            start += length
    assert whole(tmp_path, "f") == data


def test_a_large_sparse_file(tmp_path: Path) -> None:
    size = (4 << 30) + 12345
    with open(tmp_path / "f", "wb") as file:
        file.truncate(size)
        for place in (0, (2 << 30) - 3, (4 << 30) - 1, size - 10):
            os.pwrite(file.fileno(), b"0123456789", place)
    store = _Discarding(str(tmp_path / "s"))
    wishes = WriteSettings(chunk_bytes=64 << 20, width=5, jobs=2)
    report = put_into(store, "f", str(tmp_path / "f"), settings=wishes)
    assert report.size_bytes == size
    folder = version_folder(tmp_path / "s", "f")
    lengths = [(folder / f"stripe-{n:05d}").stat().st_size for n in range(5)]
    assert sum(lengths) == size
    # Chunk 64 is the one past 4 GiB: stripe 64 mod 5, row 12.
    with open(folder / "stripe-00004", "rb") as stripe:
        stripe.seek(12 * (64 << 20) + 12345 - 10)
        assert stripe.read() == b"0123456789"
    store.delete_tree("f.stripes")


class _Discarding(LocalStore):
    """Writes zeros as holes, so that a test of 4 GiB costs little disk."""

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
        return _SparseWriter(self, name, self._draft(name))


ZEROS = bytes(1 << 20)


class _SparseWriter(LocalWriter):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), 1 << 20):
            piece = view[start : start + (1 << 20)]
            if piece.tobytes() == ZEROS[: len(piece)]:
                end = os.lseek(self._draft.fd, len(piece), os.SEEK_CUR)
                os.ftruncate(self._draft.fd, end)
            else:
                super().write(piece)


def test_put_replaces_and_the_old_version_stays_until_gc(tmp_path: Path) -> None:
    old, new = sample(5 * CHUNK, 1), sample(7 * CHUNK, 2)
    (tmp_path / "f").write_bytes(old)
    put(str(tmp_path / "f"), str(tmp_path / "s/f"), settings=SMALL)
    before = version_folder(tmp_path / "s", "f")
    (tmp_path / "f").write_bytes(new)
    put(str(tmp_path / "f"), str(tmp_path / "s/f"), settings=SMALL)
    assert whole(tmp_path / "s", "f") == new
    assert (before / "stripe-00000").exists()
    assert leftovers(tmp_path / "s", "f") == [before.name]


def test_of_writers_at_once_one_is_current_and_all_are_whole(tmp_path: Path) -> None:
    datas = [sample(20 * CHUNK + n, n) for n in range(4)]
    start = threading.Barrier(4)

    def write(data: bytes) -> None:
        with StripedWriter.begin(opened(tmp_path), "f", SMALL) as out:
            start.wait()
            out.write(data)

    threads = [threading.Thread(target=write, args=(data,)) for data in datas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole(tmp_path, "f") in datas
    assert len(leftovers(tmp_path, "f")) == 3
    found = set()
    for name in [*leftovers(tmp_path, "f"), version_folder(tmp_path, "f").name]:
        body = (tmp_path / "f.stripes" / name / "stripe-00000").read_bytes()
        found.add(next(n for n, data in enumerate(datas) if data.startswith(body[:CHUNK])))
    assert found == {0, 1, 2, 3}


def test_an_exception_in_the_block_publishes_nothing(tmp_path: Path) -> None:
    out = StripedWriter.begin(opened(tmp_path), "f", SMALL)

    def fail() -> None:
        with out:
            out.write(sample(9 * CHUNK))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list((tmp_path / "f.stripes").iterdir()) == []
    with pytest.raises(UsageError, match="closed"):
        out.write(b"x")
    out.abort()


def test_a_writer_that_is_dropped_publishes_nothing(tmp_path: Path) -> None:
    writer = StripedWriter.begin(opened(tmp_path), "f", SMALL)
    writer.write(sample(9 * CHUNK))
    writer.abort()
    writer.abort()
    writer.close()
    with pytest.raises(UsageError, match="closed"):
        writer.write(b"x")
    assert not (tmp_path / "f.stripes/CURRENT").exists()


class _Failing(LocalStore):
    """Fault injection: `fail(name, written bytes)` is asked before every write of an object."""

    def __init__(self, root: str, fail: Callable[[str, int], None]) -> None:
        super().__init__(root)
        self.fail = fail
        self.begun: list[str] = []

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
        self.begun.append(name)
        return _FailingWriter(self, name, self._draft(name))


class _FailingWriter(LocalWriter):
    written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._store.fail(self._name, self.written)  # type: ignore[attr-defined]
        self.written += len(data)
        super().write(data)


def _gone(part: str, times: int = 1 << 30) -> Callable[[str, int], None]:
    left = [times]

    def fail(name: str, written: int) -> None:
        if name.endswith(part) and written and left[0]:
            left[0] -= 1
            raise StoreUnavailableError("the server went away")

    return fail


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe_upload, "BACKOFF_S", 0.001)
    monkeypatch.setattr(stripe_upload, "MAX_BACKOFF_S", 0.001)


def test_a_stripe_that_fails_is_written_anew(tmp_path: Path) -> None:
    data = sample(20 * CHUNK)
    (tmp_path / "f").write_bytes(data)
    store = _Failing(str(tmp_path / "s"), _gone("stripe-00001", times=3))
    seen: list[int] = []
    put_into(store, "f", str(tmp_path / "f"), settings=SMALL, progress=_Counting(seen))
    assert whole(tmp_path / "s", "f") == data
    assert sum(name.endswith("stripe-00001") for name in store.begun) == 4
    assert sum(seen) == len(data)  # what was sent in vain is taken back


class _Counting:
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def expect(self, size_bytes: int) -> None: ...

    def advance(self, size_bytes: int) -> None:
        self.seen.append(size_bytes)


@pytest.mark.parametrize("part", ["manifest.json", "CURRENT"])
@pytest.mark.parametrize("times", [2, 1 << 30])
def test_small_objects_are_written_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, times: int
) -> None:
    left = [times]
    real = LocalStore.replace

    def replace(self: LocalStore, name: str, data: bytes, **more: bool) -> None:
        if name.endswith(part) and left[0]:
            left[0] -= 1
            raise StoreUnavailableError("the server went away")
        real(self, name, data, **more)

    monkeypatch.setattr(LocalStore, "replace", replace)
    out = StripedWriter.begin(opened(tmp_path), "f", SMALL)
    out.write(sample(9 * CHUNK))
    if times == 2:
        out.close()
        assert whole(tmp_path, "f") == sample(9 * CHUNK)
    else:
        with pytest.raises(StoreUnavailableError, match="went away"):
            out.close()
        assert list((tmp_path / "f.stripes").iterdir()) == []


def test_a_lease_whose_first_answers_were_lost_is_taken_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [2], LocalStore.create

    def create(self: LocalStore, name: str, data: bytes, **more: bool) -> bool:
        made = real(self, name, data, **more)
        if "/lease/" in name and left[0]:
            left[0] -= 1
            raise StoreUnavailableError("the answer was lost")
        return made

    monkeypatch.setattr(LocalStore, "create", create)
    with StripedWriter.begin(opened(tmp_path), "f", SMALL) as out:
        out.write(sample(9 * CHUNK))
    assert left == [0]
    assert whole(tmp_path, "f") == sample(9 * CHUNK)


def test_a_file_of_too_many_chunks_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.truncate((3_000_000 << 12) + 1)
    with pytest.raises(UsageError, match="larger chunk"):
        put(str(tmp_path / "f"), str(tmp_path / "s/f"), settings=SMALL)
    assert list((tmp_path / "s/f.stripes").iterdir()) == []


def test_a_store_that_stays_away_ends_the_put(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(sample(20 * CHUNK))
    store = _Failing(str(tmp_path / "s"), _gone("stripe-00001"))
    with pytest.raises(StoreUnavailableError, match="went away"):
        put_into(store, "f", str(tmp_path / "f"), settings=SMALL, resume=False)
    assert list((tmp_path / "s/f.stripes").iterdir()) == []


@pytest.mark.parametrize("stripe", [0, 1, 2])
def test_a_stream_tells_the_error_of_a_stripe(tmp_path: Path, stripe: int) -> None:
    store = _Failing(str(tmp_path), _gone(f"stripe-{stripe:05d}"))
    writer = StripedWriter.begin(store, "f", SMALL)
    with pytest.raises(StoreUnavailableError, match="went away"):
        writer.write(sample(1000 * CHUNK))  # more than fits into all buffers: it must not hang
    with pytest.raises(StoreUnavailableError, match="went away"):
        writer.close()
    assert list((tmp_path / "f.stripes").iterdir()) == []


def test_a_stripe_that_fails_at_its_end_fails_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: LocalWriter) -> None:
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(LocalWriter, "close", close)
    writer = StripedWriter.begin(opened(tmp_path), "f", SMALL)
    writer.write(sample(9 * CHUNK))
    with pytest.raises(StoreUnavailableError, match="no answer"):
        writer.close()
    assert not (tmp_path / "f.stripes/CURRENT").exists()


def test_a_stripe_kept_shorter_than_sent_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalWriter.close

    def cut(self: LocalWriter) -> None:
        if self._name.endswith("stripe-00002") and self._draft.fd >= 0:
            os.ftruncate(self._draft.fd, CHUNK)
        real(self)

    monkeypatch.setattr(LocalWriter, "close", cut)
    (tmp_path / "f").write_bytes(sample(20 * CHUNK))
    with pytest.raises(StoreUnavailableError, match=r"stripe-00002 .*holds 4096 of"):
        put(str(tmp_path / "f"), str(tmp_path / "s/f"), settings=SMALL)
    out = StripedWriter.begin(opened(tmp_path / "s"), "g", SMALL)
    out.write(sample(20 * CHUNK))
    with pytest.raises(StoreUnavailableError, match=r"stripe-00002 .*holds 4096 of"):
        out.close()
    assert not list(tmp_path.glob("s/*.stripes/CURRENT"))


def test_memory_of_a_stream_is_bounded(tmp_path: Path) -> None:
    plan = plan_write(SMALL, opened(tmp_path))
    stream = StripeStream(opened(tmp_path), plan, "f")
    made: set[int] = set()
    for _ in range(200):
        stream.write(sample(CHUNK - 1))
        if stream._current is not None:
            made.add(id(stream._current.obj))
    stream.finish()
    assert 1 < len(made) <= 2 * plan.width


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(sample(20 * CHUNK))

    def grow(name: str, written: int) -> None:
        with open(source, "ab") as file:
            file.write(b"more")

    with pytest.raises(BusyError, match="changed while it was put"):
        put_into(_Failing(str(tmp_path / "s"), grow), "f", str(source), settings=SMALL)

    def cut(name: str, written: int) -> None:
        os.truncate(source, 0)

    with pytest.raises(BusyError, match="changed while it was put"):
        put_into(_Failing(str(tmp_path / "s"), cut), "f", str(source), settings=SMALL)
    assert list((tmp_path / "s/f.stripes").iterdir()) == []


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, words in (("pipe", "no ordinary file"), ("none", "No such file")):
        with pytest.raises(Exception, match=words) as caught:
            put(str(tmp_path / source), str(tmp_path / "s/f"), settings=SMALL)
        assert caught.value.exit_code in (2, 3)  # type: ignore[attr-defined]


def test_a_place_is_given_to_each_stripe(tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    class Placing(LocalStore):
        def write_nodes(self) -> list[str]:
            return ["a", "b", "c"]

        def writer(self, name: str, hints: WriteHints = NO_HINTS) -> LocalWriter:
            given[name[-12:]] = hints
            return super().writer(name, hints)

    (tmp_path / "f").write_bytes(sample(20 * CHUNK))
    wishes = WriteSettings(chunk_bytes=CHUNK, replication=1)
    put_into(Placing(str(tmp_path / "s")), "f", str(tmp_path / "f"), settings=wishes)
    places = [given[f"stripe-{n:05d}"].node for n in range(6)]
    assert sorted(places[:3]) == sorted(places[3:]) == ["a", "b", "c"]
    assert all(hints.replication == 1 for hints in given.values())
