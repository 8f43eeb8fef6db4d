"""The suite that every store passes. Inherit `StoreContract` and give a `store` fixture."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bootseer.errors import CorruptDataError, NotFoundError, UsageError
from bootseer.storage.base import Store


class StoreContract:
    """`store` is a fresh, empty store; `twin` opens the same place again, as another host would."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def twin(self, store: Store) -> Store:
        raise NotImplementedError

    def test_created_object_reads_back_through_another_handle(
        self, store: Store, twin: Store
    ) -> None:
        assert store.create("a/b/c", b"hello world")
        assert twin.stat("a/b/c").size_bytes == 11
        assert twin.read("a/b/c", limit_bytes=11) == b"hello world"

    def test_range_fills_the_whole_buffer(self, store: Store) -> None:
        store.create("x", bytes(range(256)))
        buffer = bytearray(10)
        store.read_range("x", 100, buffer)
        assert bytes(buffer) == bytes(range(100, 110))
        store.read_range("x", 256, bytearray(0))

    @pytest.mark.parametrize(("offset", "size"), [(250, 10), (256, 1), (1000, 1), (0, 257)])
    def test_range_past_the_end_raises(self, store: Store, offset: int, size: int) -> None:
        store.create("x", bytes(256))
        with pytest.raises(CorruptDataError, match="truncated"):
            store.read_range("x", offset, bytearray(size))

    def test_create_never_overwrites(self, store: Store, twin: Store) -> None:
        assert store.create("x", b"first")
        assert not twin.create("x", b"second")
        assert store.read("x", limit_bytes=10) == b"first"
        assert [s.name for s in store.list("")] == ["x"]
        assert not list(store.temporaries(""))

    def test_replace_overwrites_and_makes(self, store: Store) -> None:
        store.replace("x", b"one")
        store.replace("x", b"two!")
        assert store.read("x", limit_bytes=10) == b"two!"

    def test_create_from_file(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"z" * 100_000)
        assert store.create_from_file("big", str(source))
        assert not store.create_from_file("big", str(source))
        assert store.stat("big").size_bytes == 100_000

    def test_limit_refuses_a_larger_object(self, store: Store) -> None:
        store.create("x", b"12345")
        with pytest.raises(CorruptDataError, match="5 bytes"):
            store.read("x", limit_bytes=4)

    def test_missing_objects(self, store: Store) -> None:
        for action in (
            lambda: store.stat("no"),
            lambda: store.read("no", limit_bytes=1),
            lambda: store.read_range("no", 0, bytearray(1)),
            lambda: list(store.list("no")),
            lambda: store.rename("no", "x"),
        ):
            with pytest.raises(NotFoundError):
                action()
        store.delete("no")

    def test_list_shows_children_only(self, store: Store) -> None:
        store.create("f/one", b"1")
        store.create("f/g/two", b"22")
        found = {s.name: (s.size_bytes, s.is_folder) for s in store.list("f")}
        assert found == {"f/one": (1, False), "f/g": (0, True)}

    def test_temporaries_are_hidden_until_renamed(self, store: Store) -> None:
        name = store.temporary("f")
        store.create(name, b"half")
        assert not list(store.list("f"))
        assert [s.name for s in store.temporaries("f")] == [name]
        store.rename(name, "f/whole")
        assert [s.name for s in store.list("f")] == ["f/whole"]

    def test_rename_replaces(self, store: Store) -> None:
        store.create("old", b"new content")
        store.create("there", b"before")
        store.rename("old", "there")
        assert store.read("there", limit_bytes=20) == b"new content"
        with pytest.raises(NotFoundError):
            store.stat("old")

    def test_delete_removes_objects_and_empty_folders(self, store: Store) -> None:
        store.create("f/x", b"1")
        store.delete("f/x")
        store.delete("f")
        assert not list(store.list(""))

    def test_mkdir_twice(self, store: Store) -> None:
        store.mkdir("a/b")
        store.mkdir("a/b")
        assert store.stat("a/b").is_folder

    @pytest.mark.parametrize("name", ["", "/x", "a//b", "../x", "a/../../x", ".", "a/", "a\0b"])
    def test_names_that_could_leave_the_store(self, store: Store, name: str) -> None:
        with pytest.raises(UsageError):
            store.create(name, b"")
        with pytest.raises(UsageError):
            store.read_range(name, 0, bytearray(1))

    def test_one_of_many_creators_wins(self, store: Store, twin: Store) -> None:
        for name in (f"r{n}" for n in range(10)):
            won = _race([store, twin] * 4, name)
            assert len(won) == 1
            assert store.read(name, limit_bytes=2) == won[0]

    def test_readers_see_old_or_new_while_it_is_replaced(self, store: Store, twin: Store) -> None:
        store.replace("x", b"a" * 50_000)
        stop = threading.Event()
        seen: set[bytes] = set()

        def read() -> None:
            while not stop.is_set():
                seen.add(twin.read("x", limit_bytes=100_000))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(20):
            store.replace("x", b"b" * 50_000)
            store.replace("x", b"a" * 50_000)
        stop.set()
        reader.join()
        assert seen <= {b"a" * 50_000, b"b" * 50_000}


def _race(handles: list[Store], name: str) -> list[bytes]:
    """Let every handle create the name at once; return what the winners wrote."""
    won: list[bytes] = []
    start = threading.Barrier(len(handles))

    def create(handle: Store, data: bytes) -> None:
        start.wait()
        if handle.create(name, data):
            won.append(data)

    threads = [
        threading.Thread(target=create, args=(handle, str(n).encode()))
        for n, handle in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
