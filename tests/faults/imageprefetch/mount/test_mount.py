"""Mounted images when something breaks: the right bytes or an error, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.imageprefetch.mount import mount, server_registry
from bootseer.storage.oci import media_types
from bootseer.storage.options import StoreOptions
from tests.support.labs.registry_proxy import Gate, Halves
from tests.support.labs.web_servers import Request
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    noise,
    publish,
    some_files,
    tree_of,
    unread_bytes,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(24, 400_000)
NAMES = sorted(FILES)
HOT = NAMES[:12]


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def own(own_registry: Any) -> Any:
    return own_registry()


@pytest.fixture
def image(own: Any, tmp_path: Path) -> Published:
    ref = own.reference("faults/image", "1")
    return publish(ref, FILES, tmp_path / "image", hot={"": HOT})


def read(mounted: mount.MountedImage, path: str) -> bytes:
    return (Path(mounted.directory) / path).read_bytes()


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# --- the registry --------------------------------------------------------------------------------


def test_a_server_that_others_share_is_not_hurried_by_one(mounts: Mounts, image: Published) -> None:
    one, two = mounts.mount(image.ref), mounts.mount(image.ref)
    server = mounts.server()
    assert two.state == one.state == server.state
    assert not server_registry.is_asked_to_end(server)
    server_registry.note_end_request(one.state, one.directory)
    assert not server_registry.is_asked_to_end(server)
    mounts.umount(two)
    assert server_registry.is_asked_to_end(server)
    os.utime(f"{server.state}/{server_registry.ASKED}", (0, 0))
    assert not server_registry.is_asked_to_end(server), "it did not mean to end"
    server_registry.note_end_request(one.state, one.directory)
    assert server_registry.is_asked_to_end(server)
    later = mounts.mount(image.ref)
    mounts.umount(one)
    assert later.state == one.state
    assert not server_registry.is_asked_to_end(server), "it was the other that was asked"
    mounts.umount(later)
    assert mounts.gone()


def test_a_lost_registry_gives_errors_and_a_found_one_the_bytes(
    mounts: Mounts, own: Any, image: Published
) -> None:
    mounted = mounts.mount(image.ref, hot=False, deadline_s=1.0)
    own.stop()
    with pytest.raises(OSError, match="Input/output error"):
        read(mounted, NAMES[0])
    assert "input/output error" in mounts.log
    own.start()
    assert tree_of(mounted.directory) == FILES


def test_a_hanging_registry_is_waited_for(mounts: Mounts, own: Any, image: Published) -> None:
    mounted = mounts.mount(image.ref, hot=False)
    own.pause()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read(mounted, NAMES[0])))
    reader.start()
    try:
        until(lambda: unread_bytes(own.host), "a request that the registry has not read")
        assert found == []
    finally:
        own.resume()
    reader.join(60)
    assert found == [FILES[NAMES[0]]]


def test_a_registry_that_dies_within_the_hot_set_costs_errors_only(
    mounts: Mounts, own: Any, tmp_path: Path
) -> None:
    """Half of the pack has come when the registry dies, and readers wait until it is back.

    A FAKE stands between, so that the pack stops where it should.
    """
    files = {f"f{n}": noise(3_000_000, n) for n in range(8)}
    ref = own.reference("faults/large", "1")
    image = publish(ref, files, tmp_path / "large", hot={"": sorted(files)[:6]})
    pack_bytes = own.blob_path(image.packs[""]).stat().st_size
    refused = threading.Event()

    def told(sock: Any, request: Request) -> bool:
        try:
            return gate.forward(sock, request)
        except OSError:
            refused.set()
            raise

    with Gate(own.host) as gate:
        # Its boot part comes whole.
        halves = Halves(gate, image.packs[""], least_bytes=pack_bytes // 2)
        gate.rules = [halves.rule, told]
        mounted = mounts.mount(ref.replace(own.host, gate.authority), deadline_s=300.0)
        trees: list[dict[str, bytes]] = []
        reader = threading.Thread(target=lambda: trees.append(tree_of(mounted.directory)))
        reader.start()
        try:
            assert halves.is_halfway(), "the hot set was not being fetched"
            own.stop()
            halves.cut()
            assert refused.wait(60), "the registry was asked for nothing while it was away"
            assert trees == []
        finally:
            own.restart()
            reader.join(120)
        assert trees == [files]
        mounts.umount(mounted)
        assert mounts.gone()


def test_a_complete_image_is_mounted_with_its_registry_gone(
    mounts: Mounts, own: Any, image: Published
) -> None:
    first = mounts.mount(image.ref)
    assert tree_of(first.directory) == FILES
    mounts.umount(first)
    assert mounts.gone()
    own.stop()
    again = mounts.mount(image.ref)
    assert again.offline
    assert again.hot_set == first.hot_set
    assert again.notes
    assert tree_of(again.directory) == FILES


def test_nothing_is_mounted_of_an_unknown_image_without_its_registry(
    mounts: Mounts, own: Any, image: Published
) -> None:
    own.stop()
    with pytest.raises(StoreUnavailableError):
        mounts.mount(image.ref, options=StoreOptions(retry_s=0.5))
    assert mounts.gone()


# --- damage --------------------------------------------------------------------------------------


def test_a_damaged_frame_is_fetched_as_blocks(mounts: Mounts, own: Any, image: Published) -> None:
    pack = own.blob_path(image.packs[""])
    damage(pack, pack.stat().st_size - 1000)
    mounted = mounts.mount(image.ref)
    assert tree_of(mounted.directory) == FILES
    until(lambda: "does not match its digest" in mounts.log, "a word about the frame")


def test_a_damaged_or_cut_boot_costs_the_hot_set_only(
    mounts: Mounts, own: Any, image: Published
) -> None:
    pack = own.blob_path(image.packs[""])
    whole = pack.read_bytes()
    for bad in (bytes([whole[0] ^ 1]) + whole[1:], whole[:100]):
        pack.write_bytes(bad)
        mounted = mounts.mount(image.ref)
        assert not mounted.hot_set
        assert "hot set is not used" in mounted.notes[0]
        assert tree_of(mounted.directory) == FILES
        mounts.umount(mounted)
        assert mounts.gone()


def test_a_cut_pack_is_finished_by_blocks(mounts: Mounts, own: Any, image: Published) -> None:
    pack = own.blob_path(image.packs[""])
    os.truncate(pack, pack.stat().st_size - 500_000)
    mounted = mounts.mount(image.ref)
    assert tree_of(mounted.directory) == FILES
    until(lambda: "the pack ends in the middle of a frame" in mounts.log, "a word about the pack")


def test_a_damaged_block_gives_an_error_never_a_wrong_byte(
    mounts: Mounts, own: Any, image: Published
) -> None:

    damage(own.blob_path(image.blobs[media_types.DATA]), 5000)
    mounted = mounts.mount(image.ref, hot=False, deadline_s=10.0)
    errors = []
    wrong = 0
    for name in NAMES:
        try:
            wrong += read(mounted, name) != FILES[name]
        except OSError as error:
            errors.append(error.errno)
    assert wrong == 0
    assert set(errors) == {errno.EIO}
    assert len(errors) < len(NAMES)
    assert "does not match" in mounts.log


@pytest.mark.parametrize("kind", ["META", "TABLE"])
def test_damaged_metadata_or_table_is_not_mounted(
    mounts: Mounts, own: Any, image: Published, kind: str
) -> None:
    from bootseer.blockimage import artifact

    damage(own.blob_path(image.blobs[getattr(artifact, kind)]), 200)
    damage(own.blob_path(image.packs[""]), 0)
    with pytest.raises(CorruptDataError):
        mounts.mount(image.ref)
    assert mounts.gone()


def test_damage_in_what_this_node_keeps_is_fetched_again(mounts: Mounts, image: Published) -> None:
    def read_all(*, hot: bool) -> None:
        mounted = mounts.mount(image.ref, hot=hot)
        assert tree_of(mounted.directory) == FILES
        mounts.umount(mounted)
        assert mounts.gone()

    read_all(hot=False)
    for pattern in ("images/*/meta-*", "images/*/table-*", "blocks/*/data"):
        (path,) = mounts.cache.glob(pattern)
        whole = path.read_bytes()
        damage(path, len(whole) // 2)
        assert path.read_bytes() != whole
        read_all(hot=False)
        assert path.read_bytes() == whole
    read_all(hot=True)
    (path,) = mounts.cache.glob("images/*/pack-*")
    damage(path, path.stat().st_size // 2)
    assert mounts.log == ""
    read_all(hot=True)
    assert "does not match its digest" in mounts.log


# --- deaths --------------------------------------------------------------------------------------


def test_killed_servers_are_followed_by_others(mounts: Mounts, own: Any, image: Published) -> None:
    """Each has half of an answer when it is killed, and a reader waits for the other half.

    A FAKE stands between, so that the answers stop where they should.
    """

    with Gate(own.host) as gate:
        halves = Halves(gate, image.blobs[media_types.DATA], cuts=3)
        gate.rules = [halves.rule]
        mounted = mounts.mount(image.ref.replace(own.host, gate.authority), hot=False)
        server = mounts.server()
        trees: list[dict[str, bytes]] = []
        reader = threading.Thread(target=lambda: trees.append(tree_of(mounted.directory)))
        reader.start()
        for _ in range(3):
            assert halves.is_halfway()
            assert trees == []
            mounts.kill_worker(server)
            halves.cut()
        reader.join(60)
        assert trees == [FILES]
        mounts.umount(mounted)
        assert mounts.gone()


def test_a_killed_supervisor_takes_the_mount_with_it(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref)
    with (Path(mounted.directory) / NAMES[-1]).open("rb") as file:
        file.read(10)
        os.kill(mounts.server().supervisor, signal.SIGKILL)
        until(lambda: not os.listdir(mounted.directory), "the mount's end")
    assert mounts.gone()


def test_what_killed_processes_left_goes_with_the_next_mount(
    mounts: Mounts, image: Published
) -> None:
    mounted = mounts.mount(image.ref)
    server = mounts.server()
    worker = mounts.worker(server)
    os.kill(server.supervisor, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    os.kill(server.supervisor, signal.SIGKILL)
    until(lambda: not mounts.processes(), "their end")
    assert mounts.left()
    again = mounts.mount(image.ref, directory=mounted.directory)
    assert not again.shared
    assert tree_of(again.directory) == FILES
    assert len(server_registry.list_servers(str(mounts.runtime))) == 1
    mounts.umount(again)
    assert mounts.gone()


def test_a_dead_mount_can_be_unmounted(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref)
    server = mounts.server()
    worker = mounts.worker(server)
    os.kill(server.supervisor, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    os.kill(server.supervisor, signal.SIGKILL)
    until(lambda: not mounts.processes(), "their end")
    mounts.umount(mounted)
    assert not mounts.left()


def test_asking_the_supervisor_to_end_ends_all(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref, fill=True)
    with (Path(mounted.directory) / NAMES[-1]).open("rb"):
        os.kill(mounts.server().supervisor, signal.SIGTERM)
        until(lambda: not os.listdir(mounted.directory), "the mount's end")
    assert mounts.gone()


def test_unmounting_at_once_leaves_nothing(mounts: Mounts, image: Published) -> None:
    for _ in range(5):
        mounted = mounts.mount(image.ref, record=True, fill=True)
        mounts.umount(mounted)
        assert mounts.gone()
        os.rmdir(mounted.directory)


# --- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["4k", "64k", "1m"])
def test_a_full_cache_stops_nobody(mounts: Mounts, image: Published, size: str) -> None:
    mounts.cache.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(mounts.cache)]
    subprocess.run(words, check=True)
    mounted = mounts.mount(image.ref, fill=True)
    mounts.kill_worker(mounts.server())
    assert tree_of(mounted.directory) == FILES
    full = ("keeps nothing more: No space left on device", "or a disk that is nearly full")
    until(lambda: any(words in mounts.log for words in full), "a word about the cache")
    mounts.umount(mounted)
    subprocess.run(["umount", str(mounts.cache)], check=True)
    assert mounts.gone()


def test_a_cache_that_is_removed_during_a_mount_harms_nobody(
    mounts: Mounts, own: Any, image: Published
) -> None:

    mounted = mounts.mount(image.ref, hot=False)
    read(mounted, NAMES[0])
    until(lambda: list(mounts.cache.glob("blocks/*/data")), "a cache")
    subprocess.run(["rm", "-rf", str(mounts.cache)], check=True)
    asked = len(own.requests())
    assert tree_of(mounted.directory) == FILES
    assert any(image.blobs[media_types.DATA] in r.path for r in own.requests()[asked:])


def test_a_failed_mount_leaves_nothing(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses EROFS here (a fake): what was begun is taken back."""
    from bootseer.blockimage import erofs_mount

    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, "no such file system")

    monkeypatch.setattr(erofs_mount, "mount", refuse)
    with pytest.raises(BootseerError, match="no EROFS"):
        mounts.mount(image.ref)
    assert mounts.gone()
