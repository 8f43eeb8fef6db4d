"""Images that are complete on a node: mounted from its own disk, with nobody serving them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage.serve.background_fill import Fill
from bootseer.blocks.cache import eviction, sealed_objects
from bootseer.blocks.cache.node_cache import NodeCache
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.record.trace_store import TraceStore
from tests.support.mounts.images import (
    Mounts,
    Published,
    evict,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(12, 300_000)
HOT = sorted(FILES)[:4]


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    ref = registry.reference("complete/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot={"": HOT})


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounts]:
    monkeypatch.setattr(sealed_objects, "SETTLED_NS", 20_000_000)
    monkeypatch.setattr(Fill, "quiet", lambda self, **_: not self._closing.is_set())
    with mounts_below(tmp_path) as made:
        yield made


def wait_for(there: Callable[[], object]) -> None:
    """Wait for what may not be looked at yet."""

    def look() -> object:
        with contextlib.suppress(IndexError, ValueError, OSError):
            return there()
        return None

    until(look)


def data_of(mounts: Mounts) -> Path:
    """The node cache's file of the one image that is in it."""
    (path,) = (mounts.cache / "blocks").glob("*/data")
    return path


def filled(mounts: Mounts, image: Published) -> None:
    """Have all of the image here, and known to be right; mounted nowhere."""
    mounted = mounts.mount(image.ref, fill=True)
    assert not mounted.complete
    wait_for(lambda: list((mounts.cache / "blocks").glob("*/sealed")))
    mounts.umount(mounted)
    assert mounts.gone()


def complete(mounts: Mounts, image: Published, **options: Any) -> MountedImage:
    filled(mounts, image)
    mounted = mounts.mount(image.ref, **options)
    assert mounted.complete
    return mounted


@pytest.mark.parametrize("loop", [False, True])
def test_the_next_mount_of_a_complete_image_reads_the_caches_file(
    mounts: Mounts, image: Published, loop: bool
) -> None:
    mounted = complete(mounts, image, loop=loop)
    assert mounted.loop == loop
    assert mounted.hot_set == image.packs[""]
    another = mounts.mount(image.ref)
    assert (another.shared, another.complete) == (True, True)
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert tree_of(another.directory) == FILES
    mounts.umount(another)
    assert mounts.gone()
    loops = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
    assert str(mounts.folder) not in loops


def test_nobody_is_needed_to_read_it(mounts: Mounts, own_registry: Any, tmp_path: Path) -> None:
    """Neither a registry nor any process of ours: kill -9, one by one and all at once."""
    registry = own_registry()
    ref = registry.reference("complete/alone", "1")
    image = publish(ref, FILES, tmp_path / "image", hot={"": HOT})
    filled(mounts, image)
    registry.stop()
    mounted = mounts.mount(ref)
    assert (mounted.complete, mounted.offline) == (True, True)
    server = mounts.server()
    worker = mounts.worker(server)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: mounts.processes() and mounts.worker(server) != worker)
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES
    os.kill(server.supervisor, signal.SIGKILL)  # its worker goes by itself
    wait_for(lambda: not mounts.processes())
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES
    another = mounts.mount(ref)  # which looks after dead servers' mounts, and finds one to share
    assert (another.shared, another.complete) == (True, True)
    mounts.umount(mounted)
    assert tree_of(another.directory) == FILES
    mounts.umount(another)
    assert mounts.gone()


def test_a_server_that_dies_while_the_last_mount_goes_leaves_nothing(
    mounts: Mounts, image: Published
) -> None:
    mounted = complete(mounts, image)
    for pid in mounts.processes():
        os.kill(pid, signal.SIGSTOP)
    subprocess.run(["umount", mounted.directory], check=True)
    for pid in mounts.processes():
        os.kill(pid, signal.SIGKILL)
    assert mounts.gone()
    mounted = mounts.mount(image.ref)
    assert mounted.complete
    server = mounts.server()
    os.kill(server.supervisor, signal.SIGTERM)  # asked to end, it takes its mounts along
    assert mounts.gone()


@pytest.mark.parametrize("killed", [False, True])
def test_a_cache_that_needs_room_changes_nothing_below_a_mount(
    mounts: Mounts, image: Published, killed: bool
) -> None:
    """Once nobody holds the object any more, it goes; its bytes stay to who has it mounted."""
    mounted = complete(mounts, image)
    directory = str(mounts.cache / "blocks")
    data = data_of(mounts)
    used = data.stat().st_blocks * 512
    eviction.shrink(directory, 1, used // 2)
    assert data.exists()  # it is pinned
    if killed:
        for pid in mounts.processes():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not mounts.processes())

        def evicted() -> bool:  # who is killed lets go of its files a little after its name is gone
            eviction.shrink(directory, used - 1, used - used // 4)  # a part would do: never punched
            return not data.exists()

        wait_for(evicted)
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()


def test_who_serves_the_same_image_beside_it_writes_nothing_to_it(
    mounts: Mounts, image: Published
) -> None:
    mounted = complete(mounts, image)
    data = data_of(mounts)
    with data.open("r+b") as file:  # somebody's mistake, or a disk's
        file.seek(7 * 4096)
        file.write(b"\xff" * 4096)
    before = data.stat()
    served = mounts.mount(image.ref, share=False, record=True, hot=False, fill=True)
    assert not served.complete
    assert tree_of(served.directory) == FILES  # what is wrong is fetched anew, and not kept
    assert data.stat().st_mtime_ns == before.st_mtime_ns
    mounts.umount(served)
    mounts.umount(mounted)
    assert mounts.gone()

    def mended() -> bool:
        again = mounts.mount(image.ref)  # what cannot be mended goes
        assert not again.complete
        assert tree_of(again.directory) == FILES
        mounts.umount(again)
        assert mounts.gone()
        return data_of(mounts).stat().st_ino != before.st_ino

    with data.open("rb"):  # so that its inode's number is not used again
        wait_for(mended)  # not while who packs what was recorded reads it


@pytest.mark.parametrize("how", ["content", "times", "mark", "cut", "copy", "entry"])
def test_whatever_is_not_as_it_was_sealed_is_served(
    mounts: Mounts, image: Published, how: str
) -> None:
    filled(mounts, image)
    data = data_of(mounts)
    about = data.stat()
    mark = data.with_name("sealed")
    if how == "content":  # with the modification time put back
        with data.open("r+b") as file:
            file.seek(image.data_offset(HOT[0]))
            file.write(b"wrong")
        os.utime(data, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif how == "times":
        os.utime(data)
    elif how == "mark":
        *rest, last = mark.read_bytes()
        mark.write_bytes(bytes([*rest, last ^ 1]))
    elif how == "cut":
        os.truncate(data, about.st_size - 4096)
    elif how == "copy":
        subprocess.run(["cp", "-a", data, f"{data}.new"], check=True)
        os.rename(f"{data}.new", data)
    else:
        with data.with_name("present").open("r+b") as file:
            file.seek(64)
            file.write(bytes(16))
    evict(str(data))
    mounted = mounts.mount(image.ref)
    assert not mounted.complete
    assert tree_of(mounted.directory) == FILES


def test_a_block_that_is_wrong_on_the_disk_is_not_sealed(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sealed_objects.seal
    monkeypatch.setattr(sealed_objects, "seal", lambda *_, **__: True)
    mounted = mounts.mount(image.ref, fill=True)
    size = sum(map(len, FILES.values()))
    wait_for(lambda: data_of(mounts).stat().st_blocks * 512 >= size)
    mounts.umount(mounted)
    assert mounts.gone()
    monkeypatch.setattr(sealed_objects, "seal", real)
    data = data_of(mounts)
    with data.open("r+b") as file:
        file.seek(image.data_offset(HOT[0]))
        file.write(b"wrong")
    mounted = complete(mounts, image)  # what was wrong was dropped, fetched anew, and verified
    assert tree_of(mounted.directory) == FILES


def test_what_a_disk_spoiled_by_itself_is_found_when_the_mark_is_old(
    mounts: Mounts, image: Published
) -> None:
    filled(mounts, image)
    mounts.umount(mounts.mount(image.ref))  # which freezes it
    assert mounts.gone()
    data = data_of(mounts)
    with data.open("r+b") as file:
        file.seek(image.data_offset(max(FILES)))
        file.write(b"wrong")
    evict(str(data))
    # A disk leaves the times alone, which no call can do: a mark of the times as they are now.
    mark, about = data.with_name("sealed"), data.stat()
    mark.write_bytes(_renewed(mark, about))
    spoiled = mounts.mount(image.ref)
    assert spoiled.complete
    assert tree_of(spoiled.directory) != FILES
    mounts.umount(spoiled)
    assert mounts.gone()
    old = time.time() - sealed_objects.MARK_LIFE_S - 60
    os.utime(mark, (old, old))
    served = mounts.mount(image.ref)
    assert not served.complete
    assert tree_of(served.directory) == FILES
    mounts.umount(served)
    assert mounts.gone()
    # What is frozen takes no block that it lost, so the next start begins a new one.
    served = mounts.mount(image.ref, fill=True)
    wait_for(lambda: data_of(mounts).with_name("sealed").stat().st_mtime > old + 60)
    mounts.umount(served)
    assert mounts.gone()
    mounted = mounts.mount(image.ref)
    assert mounted.complete
    assert tree_of(mounted.directory) == FILES


def test_what_was_sealed_long_ago_is_verified_and_sealed_anew(
    mounts: Mounts, image: Published
) -> None:
    """Although it is frozen and takes no block any more: it lacks none."""
    filled(mounts, image)
    mounts.umount(mounts.mount(image.ref))  # which freezes it
    assert mounts.gone()
    data = data_of(mounts)
    mark, inode = data.with_name("sealed"), data.stat().st_ino
    old = time.time() - sealed_objects.MARK_LIFE_S - 60
    os.utime(mark, (old, old))
    served = mounts.mount(image.ref, fill=True)
    assert not served.complete
    wait_for(lambda: mark.stat().st_mtime > old + 60)
    assert tree_of(served.directory) == FILES
    mounts.umount(served)
    assert mounts.gone()
    mounted = mounts.mount(image.ref)
    assert mounted.complete
    assert data_of(mounts).stat().st_ino == inode
    assert tree_of(mounted.directory) == FILES


def _renewed(mark: Path, about: os.stat_result) -> bytes:
    fields = list(sealed_objects._MARK.unpack(mark.read_bytes()[: sealed_objects._MARK.size]))
    body = sealed_objects._MARK.pack(*fields[:-2], about.st_mtime_ns, about.st_ctime_ns)
    return body + hashlib.sha256(body).digest()


def test_a_mount_is_served_while_somebody_may_write(mounts: Mounts, image: Published) -> None:
    filled(mounts, image)
    with data_of(mounts).with_name("present").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        mounted = mounts.mount(image.ref)
        assert not mounted.complete
        mounts.umount(mounted)
    assert mounts.gone()
    assert mounts.mount(image.ref).complete


def test_where_the_kernel_cannot_mount_it_so_it_is_served(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is a fake that is none."""
    filled(mounts, image)
    monkeypatch.setattr(sealed_objects.Sealed, "path", "/proc/self/nothing")
    mounted = mounts.mount(image.ref)
    assert not mounted.complete
    assert tree_of(mounted.directory) == FILES
    assert "though all of it is here" in mounts.log


def test_a_start_that_nobody_knows_is_served_and_recorded(mounts: Mounts, image: Published) -> None:
    filled(mounts, image)
    first = mounts.mount(image.ref, record=True, hot=False, workload="new")
    assert not first.complete
    (Path(first.directory) / HOT[0]).read_bytes()
    mounts.umount(first)
    assert mounts.gone()
    (folder,) = (mounts.cache / "images").glob("sha256-*/traces")
    trace = TraceStore(folder).load("new")
    assert trace is not None
    assert trace.starts == 1
    second = mounts.mount(image.ref, record=True, hot=False, workload="new")
    assert second.complete
    mounts.umount(second)
    assert mounts.gone()
    assert TraceStore(folder).load("new") == trace


def test_a_tree_lives_on_elsewhere_without_its_server(mounts: Mounts, image: Published) -> None:
    """As in a container: its mounts are copies of ours, and outlive them."""
    mounted = complete(mounts, image)
    path = sorted(FILES)[-1]
    code = f"echo in; read line; cat {mounted.directory}/{path}"
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"in\n"
        mounts.umount(mounted)
        assert mounts.gone()
        with NodeCache.at(str(mounts.cache / "blocks"), 1 << 40) as cache:
            eviction.shrink(cache.directory, 0, 0)
        assert not list((mounts.cache / "blocks").glob("*/data"))
        evict(mounted.directory)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.read() == FILES[path]
    assert server_registry.list_servers(str(mounts.runtime)) == []
