"""The suite that every store passes. Inherit `StoreContract` and give a `store` fixture."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import BlockLocation, Store, WriteHints


class StoreContract:
    """`store` is a fresh, empty store; `twin` opens the same place again, as another host would.

    `races` and `replacements` are counts: lower where each costs a server's answer.
    """

    no_names = ""
    """Characters that this kind of store refuses in names, and says so."""
    races = 10
    replacements = 20

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
        name = store.temporary_name("f")
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
        for name in (f"r{n}" for n in range(self.races)):
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
        for _ in range(self.replacements):
            store.replace("x", b"b" * 50_000)
            store.replace("x", b"a" * 50_000)
        stop.set()
        reader.join()
        assert seen <= {b"a" * 50_000, b"b" * 50_000}

    @pytest.mark.parametrize("name", ["a b/ü%20#?&=+", "100%/~x'(1);,@:$!*", 'f/[x]{y}|\\^`"'])
    def test_any_character_may_be_in_a_name(self, store: Store, twin: Store, name: str) -> None:
        for character in self.no_names:
            name = name.replace(character, "")
        assert store.create(name, b"12")
        assert twin.read(name, limit_bytes=2) == b"12"
        assert [s.name for s in twin.list(name.partition("/")[0])] == [name]
        twin.rename(name, "plain")
        assert store.stat("plain").size_bytes == 2

    def test_scattered_read_fills_each_buffer_and_says_so_in_order(self, store: Store) -> None:
        data = bytes(range(256)) * 4096
        store.create("x", data)
        sizes = [1, 0, 4096, 1, 70_000, 300_000]
        buffers = [memoryview(bytearray(size)) for size in sizes]
        told: list[tuple[int, bytes]] = []
        attempt = Attempt()
        store.read_scatter(
            "x", 77, buffers, attempt, lambda number: told.append((number, bytes(buffers[number])))
        )
        wanted, at = [], 77
        for number, size in enumerate(sizes):
            wanted.append((number, data[at : at + size]))
            at += size
        assert told == wanted  # whole already when it was told
        assert attempt.received_bytes == sum(sizes)

    def test_scattered_read_of_nothing(self, store: Store) -> None:
        store.create("x", b"")
        told: list[int] = []
        store.read_scatter("x", 0, [memoryview(bytearray(0))], Attempt(), told.append)
        store.read_scatter("x", 0, [], Attempt(), told.append)
        assert told == [0]

    def test_scattered_read_past_the_end(self, store: Store) -> None:
        store.create("x", bytes(100))
        with pytest.raises(CorruptDataError, match="truncated"):
            store.read_scatter("x", 90, [memoryview(bytearray(5))] * 3, Attempt())

    def test_a_cancelled_try_fails_as_one_that_may_heal(self, store: Store) -> None:
        store.create("x", bytes(100))
        attempt = Attempt()
        attempt.cancel()
        with pytest.raises(StoreUnavailableError):
            store.read_scatter("x", 0, [memoryview(bytearray(100))], attempt)

    @pytest.mark.parametrize("size", [0, 1, 100_000])
    def test_places_cover_an_object_without_gaps(self, store: Store, size: int) -> None:
        store.create("x", bytes(size))
        _check_cover(store.locations("x"), size)
        with pytest.raises(NotFoundError):
            store.locations("no")

    def test_preferences_can_be_used(self, store: Store) -> None:
        assert store.preferred.range_bytes >= 1 << 20
        assert store.preferred.streams >= 1

    def test_writer_shows_nothing_before_its_end(self, store: Store, twin: Store) -> None:
        with store.writer("f/x") as writer:
            for piece in (b"one ", bytearray(b"two "), memoryview(b"three"), b""):
                writer.write(piece)
            writer.write(bytes(3 << 20))
            with pytest.raises(NotFoundError):
                twin.stat("f/x")
        writer.close()
        assert twin.stat("f/x").size_bytes == 13 + (3 << 20)
        start = bytearray(13)
        twin.read_range("f/x", 0, start)
        assert start == b"one two three"
        assert [s.name for s in twin.list("f")] == ["f/x"]
        assert not list(twin.temporaries("f"))

    def test_writer_replaces(self, store: Store) -> None:
        store.create("x", b"before")
        with store.writer("x") as writer:
            writer.write(b"after that")
        assert store.read("x", limit_bytes=20) == b"after that"

    def test_writer_of_nothing_makes_an_empty_object(self, store: Store) -> None:
        with store.writer("x"):
            pass
        assert store.read("x", limit_bytes=0) == b""

    def test_writer_given_up_leaves_the_old_object_and_nothing_else(self, store: Store) -> None:
        store.create("f/x", b"old")

        def fail() -> None:
            with store.writer("f/x") as writer:
                writer.write(bytes(1 << 20))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        unused = store.writer("f/x")
        unused.abort()
        unused.abort()
        assert store.read("f/x", limit_bytes=3) == b"old"
        assert not list(store.temporaries("f"))

    def test_writers_take_every_place_that_is_offered(self, store: Store, twin: Store) -> None:
        for number, place in enumerate(["", *store.write_nodes()]):
            with store.writer(f"x{number}", WriteHints(node=place, replication=1)) as writer:
                writer.write(b"here")
            assert twin.read(f"x{number}", limit_bytes=4) == b"here"
            # Which of several servers on one host took it, only separate hosts can show.
            assert not place or len(twin.locations(f"x{number}")[0].replicas) == 1

    def test_version_changes_with_the_bytes(self, store: Store, twin: Store) -> None:
        store.create("x", b"1")
        before = store.stat("x").version
        assert before
        assert twin.stat("x").version == before
        store.replace("x", b"2")
        assert store.stat("x").version != before

    def test_delete_tree(self, store: Store) -> None:
        store.create("f/g/x", b"1")
        store.create("f/y", b"1")
        store.create("z", b"1")
        store.delete_tree("f")
        store.delete_tree("f")
        store.delete_tree("z")
        assert not list(store.list(""))

    def test_delete_spares_a_folder_that_is_not_empty(self, store: Store) -> None:
        store.create("f/x", b"1")
        with pytest.raises((BusyError, StoreUnavailableError)):
            store.delete("f")
        assert store.read("f/x", limit_bytes=1) == b"1"

    def test_folder_can_be_renamed(self, store: Store, twin: Store) -> None:
        store.create("f/g/x", b"1")
        store.rename("f", "new/place")
        assert twin.read("new/place/g/x", limit_bytes=1) == b"1"
        with pytest.raises(NotFoundError):
            twin.stat("f")

    def test_folder_never_moves_into_or_over_another(self, store: Store) -> None:
        store.create("f/x", b"1")
        store.create("taken/y", b"2")
        with pytest.raises(BusyError):
            store.rename("f", "taken")
        assert store.read("f/x", limit_bytes=1) == b"1"
        assert [s.name for s in store.list("taken")] == ["taken/y"]

    def test_object_never_moves_into_a_folder(self, store: Store) -> None:
        store.create("x", b"1")
        store.create("taken/y", b"2")
        with pytest.raises(BootseerError):
            store.rename("x", "taken")
        assert not store.create("taken", b"3")
        with pytest.raises(BootseerError):
            store.replace("taken", b"3")
        assert [s.name for s in store.list("taken")] == ["taken/y"]
        assert not list(store.temporaries(""))

    def test_a_closed_store_opens_again(self, store: Store) -> None:
        store.create("x", b"1")
        store.close()
        store.close()
        assert store.read("x", limit_bytes=1) == b"1"


def _check_cover(places: list[BlockLocation], size: int) -> None:
    assert places
    end = 0
    for placed in places:
        assert placed.offset == end
        end += placed.length
    assert end == size


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
