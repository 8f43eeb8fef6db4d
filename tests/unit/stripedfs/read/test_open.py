"""Opening checkpoints and plain files: what is checked, and what is told."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.open import open_store
from bootseer.storage.store import BlockLocation, Stat, Store
from bootseer.stripedfs.format.manifest import Manifest
from bootseer.stripedfs.format.pointer import Version
from bootseer.stripedfs.read import open as opening
from bootseer.stripedfs.read.sources import (
    MIN_PLAIN_BLOCK_BYTES,
    PLAIN_BLOCK_BYTES,
    FileSource,
    PlainSource,
    Stretches,
    open_plain_file,
    plain_block_bytes,
)
from bootseer.stripedfs.workers import call_in_parallel
from bootseer.stripedfs.write.put import put_into
from tests.support.faulty_store import WrappedStore
from tests.support.mounts.checkpoints import CHUNK, SMALL, WIDTH, content, put_bytes, store_of
from tests.support.samples.stripes import open_source

SIZE = 7 * CHUNK + 5


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path / "store")


@pytest.fixture
def striped(store: Store, tmp_path: Path) -> Path:
    """The folder of the current version of a striped file `ckpt`."""
    put_bytes(store, "ckpt", content(SIZE), tmp_path)
    return next((tmp_path / "store" / "ckpt.stripes").glob("v-*"))


def read_all(store: Store, name: str) -> bytes:
    source = open_source(store, name)
    buffer = bytearray(source.size_bytes)
    with Fetcher(FetchSettings(tries=2, corrupt_tries=1, backoff_s=0.01)) as fetcher:
        fetcher.read_into(source, 0, buffer)
    return bytes(buffer)


@pytest.mark.parametrize("name", ["ckpt", "ckpt.stripes"])
def test_a_striped_file_is_found_by_either_name(store: Store, striped: Path, name: str) -> None:
    assert read_all(store, name) == content(SIZE)


def test_a_plain_object_is_taken_when_nothing_was_published(store: Store, tmp_path: Path) -> None:
    store.replace("plain", content(SIZE))
    (tmp_path / "store" / "plain.stripes" / ".tmp-unfinished").mkdir(parents=True)
    assert read_all(store, "plain") == content(SIZE)


def test_nothing_of_that_name_is_said_to_be_missing(store: Store) -> None:
    with pytest.raises(NotFoundError, match="nothing-here"):
        open_source(store, "nothing-here")


def test_a_folder_is_no_file(store: Store, tmp_path: Path) -> None:
    store.mkdir("folder")
    with pytest.raises(UsageError, match="is a folder"):
        open_source(store, "folder")
    (tmp_path / "source").mkdir()
    put_into(store, "tree", str(tmp_path / "source"), settings=SMALL)
    with pytest.raises(UsageError, match="directory checkpoint"):
        open_source(store, "tree")


def damage_missing(folder: Path) -> None:
    (folder / "stripe-00001").unlink()


def damage_short(folder: Path) -> None:
    os.truncate(folder / "stripe-00002", 5)


def damage_long(folder: Path) -> None:
    with (folder / "stripe-00000").open("ab") as file:
        file.write(b"more")


def damage_manifest_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damage_manifest_truncated(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def damage_manifest_lying(folder: Path) -> None:
    """A size that no stripe has, in a document that is otherwise in order."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    document["size_bytes"] += 1
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (damage_missing, CorruptDataError, "stripe-00001 .* is missing"),
        (damage_short, CorruptDataError, "has 5 bytes and the manifest says"),
        (damage_long, CorruptDataError, "bytes and the manifest says"),
        (damage_manifest_missing, CorruptDataError, "gone or incomplete"),
        (damage_manifest_truncated, CorruptDataError, "truncated or damaged"),
        (damage_manifest_lying, CorruptDataError, "damaged"),
    ],
)
def test_damage_is_told_at_open(
    store: Store,
    striped: Path,
    damage: Callable[[Path], None],
    error: type[BootseerError],
    said: str,
) -> None:
    damage(striped)
    with pytest.raises(error, match=said):
        open_source(store, "ckpt")


def test_a_newer_format_is_said_to_be_newer(store: Store, striped: Path) -> None:
    path = striped.parent / "CURRENT"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(NotSupportedError, match="version 99"):
        open_source(store, "ckpt")


def test_swapped_stripes_of_one_length_are_found_by_their_digests(
    store: Store, tmp_path: Path
) -> None:
    put_bytes(store, "even", content(6 * CHUNK), tmp_path)
    folder = next((tmp_path / "store" / "even.stripes").glob("v-*"))
    (folder / "stripe-00000").rename(folder / "kept")
    (folder / "stripe-00001").rename(folder / "stripe-00000")
    (folder / "kept").rename(folder / "stripe-00001")
    with pytest.raises(CorruptDataError, match="does not match its digest"):
        read_all(store, "even")


def test_every_flipped_byte_is_found(store: Store, striped: Path) -> None:
    for stripe in range(WIDTH):
        path = striped / f"stripe-{stripe:05d}"
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 1
            path.write_bytes(bad)
            with pytest.raises(CorruptDataError, match="does not match its digest"):
                read_all(store, "ckpt")
        path.write_bytes(good)
    assert read_all(store, "ckpt") == content(SIZE)


def test_a_version_replaced_while_it_is_opened_gives_the_new_one(
    store: Store, striped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = opening.open_striped_file
    calls = []

    def replaced_meanwhile(*words: object) -> object:
        if not calls:
            put_bytes(store, "ckpt", content(SIZE, seed=2), tmp_path)
            shutil.rmtree(striped)
        calls.append(words)
        return real(*words)

    monkeypatch.setattr(opening, "open_striped_file", replaced_meanwhile)
    assert read_all(store, "ckpt") == content(SIZE, seed=2)
    assert len(calls) == 2


def test_a_name_that_is_published_again_and_again_is_given_up(
    store: Store, striped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = opening.open_striped_file
    calls: list[str] = []

    def replaced_meanwhile(store: Store, version: Version, manifest: Manifest) -> FileSource:
        calls.append(version.folder)
        assert len(calls) < 20
        put_bytes(store, "ckpt", content(SIZE, seed=len(calls)), tmp_path)
        shutil.rmtree(tmp_path / "store" / version.folder)
        return real(store, version, manifest)

    monkeypatch.setattr(opening, "open_striped_file", replaced_meanwhile)
    with pytest.raises(CorruptDataError, match="is missing"):
        open_source(store, "ckpt")
    assert len(set(calls)) == len(calls) == opening.MOST_VERSIONS


class OnePointer(WrappedStore):
    """Reads the pointer once; then it is out of reach."""

    pointers = 0

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        self.pointers += name.endswith("/CURRENT")
        if self.pointers > 1:
            raise StoreUnavailableError("it is away; wait")
        return self.inner.read(name, limit_bytes=limit_bytes)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (damage_manifest_truncated, CorruptDataError, "truncated or damaged"),
        # What was removed may have been replaced.
        (damage_manifest_missing, StoreUnavailableError, "away"),
        (damage_missing, StoreUnavailableError, "away"),
    ],
)
def test_a_damaged_manifest_is_told_though_the_pointer_cannot_be_read_again(
    store: Store,
    striped: Path,
    damage: Callable[[Path], None],
    error: type[BootseerError],
    said: str,
) -> None:
    damage(striped)
    with pytest.raises(error, match=said):
        open_source(OnePointer(store), "ckpt")


def test_a_file_of_a_tree_is_verified_whether_striped_or_whole(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small").write_bytes(b"small")
    (folder / "large").write_bytes(content(SIZE))
    put_into(store, "tree", str(folder), settings=SMALL)
    root = tmp_path / "store"
    with stripedfs.open(f"{root}/tree/small") as file:
        assert file.read() == b"small"
    with stripedfs.open(f"{root}/tree/large") as file:
        assert file.read() == content(SIZE)
    for path in (root / "tree.stripes").rglob("*"):
        if path.is_file() and path.read_bytes() == b"small":
            path.write_bytes(b"smalL")
    with (
        stripedfs.open(f"{root}/tree/small") as file,
        pytest.raises(CorruptDataError, match="does not match"),
    ):
        file.read()


# --- plain files that change ------------------------------------------------------------------


class Changing(WrappedStore):
    """A fake around a real store: changes an object just before the first request for bytes."""

    def __init__(self, inner: Store, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self.before, self.stats = before, 0

    def read_scatter(self, *words: Any, **named: Any) -> None:
        before, self.before = self.before, lambda: None
        before()
        self.inner.read_scatter(*words, **named)

    def stat(self, name: str) -> Stat:
        self.stats += 1
        return self.inner.stat(name)


def test_a_plain_file_replaced_while_it_is_read_gives_an_error(
    store: Store, tmp_path: Path
) -> None:
    store.replace("plain", content(SIZE))
    changing = Changing(store, lambda: store.replace("plain", content(SIZE, seed=1)))
    source = open_plain_file(changing, "plain")
    with stripedfs.StripedFile(source) as file:
        for _ in range(2):  # and it stays an error
            with pytest.raises(CorruptDataError, match="changed while it was read"):
                file.read(10)


def test_a_plain_file_removed_while_it_is_read_gives_an_error(store: Store, tmp_path: Path) -> None:
    store.replace("plain", content(SIZE))
    fd = os.open(tmp_path / "store" / "plain", os.O_RDONLY)
    try:
        source = open_plain_file(store, "plain")
        source.open_block(0, memoryview(b""), memoryview(b""))  # as if its bytes had arrived
        store.delete("plain")
        assert source.doubtful(0, 10)
        with pytest.raises(CorruptDataError, match="changed while it was read"):
            source.confirm()
    finally:
        os.close(fd)


def test_the_version_is_asked_once_for_bytes_that_came_together(store: Store) -> None:
    size = 8 * PLAIN_BLOCK_BYTES
    store.replace("plain", bytes(size))
    counting = Changing(store)
    source = open_plain_file(counting, "plain")
    before = counting.stats
    with stripedfs.StripedFile(source) as file:
        file.read()
        assert counting.stats == before + 1
        file.seek(0)
        for _ in range(100):
            file.read(10)
        assert counting.stats <= before + 2


def test_callers_who_doubt_at_the_same_time_share_one_answer(store: Store) -> None:
    store.replace("plain", bytes(100))
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Changing):
        def stat(self, name: str) -> Stat:
            found = super().stat(name)
            if self.stats == 2:
                entered.set()
                assert go_on.wait(30)
            return found

    slow = Slow(store)
    source = open_plain_file(slow, "plain")
    threads = [threading.Thread(target=source.confirm) for _ in range(20)]
    threads[0].start()
    assert entered.wait(30)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    # One that had begun before the others came, and one for all of them (or two, if some were late)
    assert 3 <= slow.stats <= 5


def test_an_outage_while_checking_is_an_error_that_may_heal(store: Store) -> None:
    store.replace("plain", bytes(100))

    class Failing(Changing):
        def stat(self, name: str) -> Stat:
            found = super().stat(name)
            if self.stats == 2:
                raise StoreUnavailableError("the store is away")
            return found

    source = open_plain_file(Failing(store), "plain")
    source.open_block(0, memoryview(b""), memoryview(b""))
    with pytest.raises(StoreUnavailableError, match="away"):
        source.confirm()
    assert source.doubtful(0, 100)
    source.confirm()
    assert not source.doubtful(0, 100)


def test_blocks_of_a_plain_file_lie_within_stretches() -> None:
    assert plain_block_bytes([0]) == PLAIN_BLOCK_BYTES
    assert plain_block_bytes([0, 128 << 20, 256 << 20]) == PLAIN_BLOCK_BYTES
    assert plain_block_bytes([0, 192 << 10]) == MIN_PLAIN_BLOCK_BYTES
    assert plain_block_bytes([0, 1001]) == PLAIN_BLOCK_BYTES  # no size would do


def test_a_file_still_being_written_is_refused() -> None:
    store = open_store("/nowhere")
    with pytest.raises(CorruptDataError, match="being written"):
        PlainSource(store, Stat("x", 10, 0.0, False, "v"), [BlockLocation(0, 8)])


def test_stretches_are_found_by_offset() -> None:
    stretches = Stretches([BlockLocation(0, 10, ("a",)), BlockLocation(10, 5, ("b",))])
    assert [stretches.end(o) for o in (0, 9, 10, 14)] == [10, 10, 15, 15]
    assert [stretches.at(o).replicas for o in (0, 9, 10, 14, 99)] == [
        ("a",),
        ("a",),
        ("b",),
        ("b",),
        ("b",),
    ]
    assert Stretches([]).length == 0


def test_in_parallel_keeps_the_order_and_raises_the_first_error() -> None:
    assert call_in_parallel(lambda n: n * n, range(50)) == [n * n for n in range(50)]

    def fails(number: int) -> None:
        if number in (3, 7):
            raise NotFoundError(str(number))

    with pytest.raises(NotFoundError, match="3"):
        call_in_parallel(fails, range(10))
