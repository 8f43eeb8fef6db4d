"""What keeps mounted images right when things happen in an unlucky order, part by part."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage.pack_format import Frame, Index, Warm
from bootseer.blockimage.serve import image_server, page_cache_warmer
from bootseer.blockimage.serve.byte_source import Bytes, Cold, Coming, Frames
from bootseer.blockimage.serve.data_file import DATA, DataFile
from bootseer.blockimage.serve.image_server import ImageServer, ServeSettings
from bootseer.blockimage.serve.opened_image import BlockImage
from bootseer.blocks.extents import Extent
from bootseer.errors import StoreUnavailableError, UsageError
from bootseer.fuse.operations import Data, Handle
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.image_cache import ImageCache, KeptImage
from bootseer.imageprefetch.mount import mount, server_registry
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.system import file_lock

PAGE = 4096


def an_index(frames: int = 1, warm_ranges: tuple[Warm, ...] = ()) -> Index:
    made = tuple(
        Frame(n * 1000, 1000, b"", (Extent(n * PAGE, PAGE),), warm_ranges) for n in range(frames)
    )
    return Index(made, (b"file",) if warm_ranges else ())


class Answer:
    """A reply that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[bytes | int] = []
        self.there = threading.Event()

    def __call__(self) -> Answer:
        return self

    def data(self, data: Data) -> None:
        self.got.append(b"".join(map(bytes, data.views)))
        if data.release is not None:
            data.release()
        self.there.set()

    def error(self, number: int) -> None:
        self.got.append(number)
        self.there.set()

    interrupted = False


class Here:
    """Blocks that are in memory."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views

    def release(self) -> None: ...


def a_file(size_bytes: int = 8 * PAGE) -> DataFile:
    file = DataFile(on_release=lambda: None, on_error=lambda *_: None)
    file.set_size(size_bytes)
    return file


# --- frames ------------------------------------------------------------------------------------


def test_while_nothing_arrives_nobody_waits_for_frames() -> None:
    frames = Frames(an_index(2), memory_bytes=1 << 20)
    resumed: list[int] = []
    assert frames.pieces(0, PAGE) == Coming(0)
    assert frames.wait(0, lambda: resumed.append(0))
    frames.stand_still()
    assert resumed == [0]
    assert frames.pieces(0, PAGE) == [Cold(0, PAGE)]
    frames.add_frame(0, bytes(PAGE))
    assert frames.pieces(PAGE, PAGE) == Coming(1)


def test_a_stream_that_hangs_keeps_no_reader_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is a fake that says nothing until it is closed."""
    from tests.support.samples.block_sources import FileSource

    monkeypatch.setattr(image_server, "STANDS_STILL_S", 0.05)
    content = os.urandom(8 * PAGE)
    (tmp_path / "data").write_bytes(content)

    class Hangs:
        def __init__(self) -> None:
            self.closed = threading.Event()

        def readinto(self, view: memoryview, /) -> int:
            self.closed.wait(60)
            return 0

        def spoil(self) -> None: ...

        def close(self) -> None:
            self.closed.set()

        def __enter__(self) -> Hangs:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    stream = Hangs()
    index = an_index(8)
    image = BlockImage(
        meta_path="",
        data_bytes=len(content),
        source=lambda: FileSource(tmp_path / "data"),
        index=lambda: index,
        frames=stream,
    )
    file = a_file()
    server = ImageServer(image, file, ServeSettings(warm=False), say=lambda *_: None)
    try:
        server.begin("")
        answer = Answer()
        assert file.read(DATA, Handle(1), PAGE, PAGE, answer) is None
        assert answer.there.wait(30)
        assert answer.got == [content[PAGE : 2 * PAGE]]
        assert not stream.closed.is_set()
    finally:
        server.close()


def test_who_is_answered_at_once_is_not_counted_as_waiting_for_ever() -> None:
    """The blocks are a fake that arrive before whoever asked for them has heard that they do."""

    class Quick(Bytes):
        def hold(self, offset: int, length: int, deliver: Any, priority: Any) -> Any:
            here = Here([memoryview(bytes(length))])
            thread = threading.Thread(target=deliver, args=(here,))
            thread.start()
            thread.join()

    frames = Frames(an_index(1), memory_bytes=1 << 20)
    file = a_file()
    file.supply(Quick(8 * PAGE, frames, lambda: None))  # type: ignore[arg-type,return-value]
    answer = Answer()
    assert file.read(DATA, Handle(1), 0, PAGE, answer) is None  # waits for the frame
    frames.drop(0)
    assert answer.there.wait(10)
    assert answer.got == [bytes(PAGE)]
    assert file.cold_waits == 0


def test_a_read_that_is_answered_while_it_begins_to_wait_is_never_counted_below_none() -> None:
    """The file is a fake that counts slowly: the blocks arrive meanwhile."""

    class Slow(DataFile):
        def _begin_cold_wait(self) -> None:
            threading.Thread(target=asked[0]).start()
            answer.there.wait(0.5)  # in vain: it is counted before it is answered
            super()._begin_cold_wait()

        def _end_cold_wait(self) -> None:
            super()._end_cold_wait()
            counts.append(self.cold_waits)

    class Late(Bytes):
        def hold(self, offset: int, length: int, deliver: Any, priority: Any) -> Any:
            here = Here([memoryview(bytes(length))])
            asked.append(lambda: deliver(here))

    asked: list[Callable[[], None]] = []
    counts: list[int] = []
    frames = Frames(an_index(1), memory_bytes=1 << 20)
    file = Slow(on_release=lambda: None, on_error=lambda *_: None)
    file.set_size(8 * PAGE)
    file.supply(Late(8 * PAGE, frames, lambda: None))  # type: ignore[arg-type,return-value]
    answer = Answer()
    assert file.read(DATA, Handle(1), 0, PAGE, answer) is None  # waits for the frame
    frames.drop(0)
    assert answer.there.wait(10)
    assert answer.got == [bytes(PAGE)]
    assert counts == [0]


# --- warming -----------------------------------------------------------------------------------


def test_in_a_foreign_tree_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    slash = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        os.close(page_cache_warmer.open_regular_below(root, b"file"))
        for name in (b"pipe", b"link", b"../file"):
            with pytest.raises(OSError, match=r"."):
                page_cache_warmer.open_regular_below(root, name)
        with pytest.raises(OSError, match="cross-device"):
            page_cache_warmer.open_regular_below(slash, b"proc/self/status")
    finally:
        os.close(root)
        os.close(slash)


def test_a_pack_cannot_have_more_warmed_than_its_frames_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    asked: list[int] = []
    monkeypatch.setattr(
        page_cache_warmer.os, "posix_fadvise", lambda fd, at, size, how: asked.append(size)
    )
    lies = (Warm(0, 0, PAGE), Warm(0, 0, (1 << 32) - 1), Warm(0, 0, PAGE))
    done = threading.Event()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    warmer = page_cache_warmer.Warmer(root, an_index(1, lies), lambda _: None, finished=done.set)
    warmer.start()
    warmer.put(0)
    warmer.end()
    assert done.wait(30)
    assert asked == [PAGE]


# --- what servers keep on the node ----------------------------------------------------------------


def test_a_server_that_is_just_being_born_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looked = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not looked:
            looked.append(1)
            server_registry.list_servers(str(tmp_path))  # another mount begins at this very moment
        real(fd, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    state = server_registry.ServerFolder.create(str(tmp_path))
    try:
        assert looked
        assert os.path.isdir(state.front)
        assert os.path.exists(os.path.join(state.folder, server_registry.LOCK))
        assert os.listdir(tmp_path / "images") == [os.path.basename(state.folder)]
    finally:
        state.release()
    server_registry.sweep(state.folder)
    assert not os.listdir(tmp_path / "images")


def test_what_was_killed_before_it_was_born_goes_in_time(tmp_path: Path) -> None:
    young, old = (tmp_path / "images" / name for name in ("a" * 32, "b" * 32))
    for folder in (young, old):
        (folder / server_registry.FRONT).mkdir(parents=True)
    os.utime(old, (1, 1))
    assert server_registry.list_servers(str(tmp_path)) == []
    assert young.exists()
    assert not old.exists()


def test_what_an_earlier_version_was_killed_while_writing_goes_too(tmp_path: Path) -> None:
    folder = tmp_path / "images" / ("a" * 32)
    (folder / server_registry.FRONT).mkdir(parents=True)
    (folder / f"{server_registry.SERVER}.new").write_text("{")
    os.utime(folder, (1, 1))
    assert server_registry.list_servers(str(tmp_path)) == []
    assert not folder.exists()


def test_what_was_fetched_of_images_that_nobody_mounts_goes(tmp_path: Path) -> None:
    store = ImageCache(str(tmp_path))
    old, used, mounted = (f"sha256:{letter * 64}" for letter in "abc")
    for digest in (old, used, mounted):
        for kind in ("meta", "table"):
            store.keep(digest, kind, digest, b"bytes")
        store.keep_image(digest, KeptImage("x", "x", 1, digest, digest))
        os.makedirs(store.trace_folder(digest))
        os.utime(os.path.join(store.folder_of(digest), "image.json"), (1.6e9, 1.6e9))
    store.mark_used(used)
    store.expire([mounted])
    assert os.listdir(store.folder_of(old)) == ["traces"]
    assert len(os.listdir(store.folder_of(used))) == 4
    assert len(os.listdir(store.folder_of(mounted))) == 4


@pytest.mark.parametrize("what", ["late", "interrupted"])
def test_a_server_that_nobody_waits_for_ends(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, tell = os.pipe()
    real = daemon.readable

    def interrupted(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(daemon, "readable", real)
        raise KeyboardInterrupt

    def serve(_: daemon.Send) -> None:
        os.write(tell, str(os.getpid()).encode())
        time.sleep(60)

    if what == "interrupted":
        monkeypatch.setattr(daemon, "readable", interrupted)
    expected = KeyboardInterrupt if what == "interrupted" else StoreUnavailableError
    with pytest.raises(expected):
        daemon.start(serve, mountpoint="x", limit_s=0.5)
    os.close(tell)
    pid = int(os.read(told, 100) or 0)
    os.close(told)
    if pid:  # else it had not even begun
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    """Whether a child of ours has not ended; one that has is waited for."""
    return os.waitpid(pid, os.WNOHANG)[0] == 0


@pytest.mark.parametrize("ref", ["oci://user:secret@host.example/image:1", "user:secret@host/i"])
def test_a_login_in_a_name_is_refused_and_told_nobody(
    ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events"))
    with pytest.raises(UsageError) as caught:
        mount.mount(MountSettings(ref=ref, directory=str(tmp_path)))
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "events").exists()


def test_a_workload_that_could_name_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no workload"):
        mount.mount(MountSettings(ref="image", directory=str(tmp_path), workload="../x"))
