"""Servers of mounted images that die at the worst moment: the same bytes, and nothing left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage.serve.image_server import ImageServer
from bootseer.errors import BootseerError, NotFoundError
from bootseer.imageprefetch.resolve import resolver
from bootseer.storage.oci import media_types
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import StoreOptions
from tests.support import page_cache
from tests.support.commands.filemode import resident
from tests.support.labs.registry_proxy import Gate, Halves
from tests.support.mounts.images import Mounts, evict, mounts_below, publish, some_files, tree_of
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(12, 200_000)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


def test_who_takes_over_serves_the_block_image_that_is_mounted(
    mounts: Mounts, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the image got another block image, which the registry lists first (a fake)."""
    ref = registry.reference("deaths/rebuilt", "1")
    image = publish(ref, FILES, tmp_path / "first")

    def last(_: Any, listed: Any) -> Any:
        return [one for one in listed if one.artifact_type == media_types.BLOCK_IMAGE][-1]

    monkeypatch.setattr(resolver, "find_block_image", last)
    mounted = mounts.mount(ref)
    server = mounts.server()
    other = {path: data[::-1] for path, data in FILES.items()}
    assert publish(ref, other, tmp_path / "second").digest == image.digest
    assert mounts.mount(ref, share=False, cache=str(tmp_path / "another")).digest == image.digest
    mounts.kill_worker(server)
    assert tree_of(mounted.directory) == FILES
    # Nor from what this node keeps of the newer one.
    mounts.mount(ref, share=False)
    mounts.kill_worker(server)
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES


@pytest.mark.parametrize("left", ["nothing", "image.json"])
def test_who_takes_over_waits_for_the_registry(
    mounts: Mounts, own_registry: Any, tmp_path: Path, left: str
) -> None:
    """Nothing is kept here that would do: reads fail in time, and work when it is back."""
    registry = own_registry()
    image = publish(registry.reference("deaths/away", "1"), FILES, tmp_path / "image")
    hurried = StoreOptions(retry_s=0.1, connect_s=1.0, stall_s=1.0)
    mounted = mounts.mount(image.ref, deadline_s=1.0, options=hurried)
    path = Path(mounted.directory) / sorted(FILES)[0]
    server = mounts.server()
    while not (found := list((mounts.cache / "images").glob("*/image.json"))):
        time.sleep(0.01)  # it is kept a moment after the mount
    (about,) = found
    registry.stop()
    os.kill(server.supervisor, signal.SIGSTOP)  # nobody takes over yet
    os.kill(mounts.worker(server), signal.SIGKILL)
    text = about.read_text()
    shutil.rmtree(mounts.cache)
    if left == about.name:  # it names what is not here any more
        about.parent.mkdir(parents=True)
        about.write_text(text)
    os.kill(server.supervisor, signal.SIGCONT)
    with pytest.raises(OSError, match="Input/output error"):
        path.read_bytes()
    registry.restart()
    while True:
        with contextlib.suppress(OSError):
            assert path.read_bytes() == FILES[sorted(FILES)[0]]
            break
        assert os.path.ismount(mounted.directory)
    mounts.umount(mounted)
    assert mounts.gone()


def test_who_takes_over_needs_no_registry_that_lost_the_image(
    mounts: Mounts, own_registry: Any, tmp_path: Path
) -> None:
    """It answers, and says that there is no such image; all of it is on this node."""
    registry = own_registry()
    image = publish(registry.reference("deaths/lost", "1"), FILES, tmp_path / "image")
    mounted = mounts.mount(image.ref)
    assert tree_of(mounted.directory) == FILES
    (data,) = (mounts.cache / "blocks").glob("*/data")
    while data.stat().st_blocks * 512 < sum(map(len, FILES.values())):
        time.sleep(0.01)  # what came last is stored a moment after it came
    shutil.rmtree(registry.blob_path(image.digest).parents[4] / "repositories")
    registry.restart()
    with open_repository(image.ref)[0] as repository, pytest.raises(NotFoundError):
        repository.manifest(image.digest)
    mounts.kill_worker(mounts.server())
    evict(mounted.directory)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()


def test_a_server_killed_before_it_could_tell_of_its_mount_leaves_none(
    mounts: Mounts, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = registry.reference("deaths/untold", "1")
    publish(ref, FILES, tmp_path / "image")
    real = ImageServer.mount

    def killed(self: ImageServer, front_dir: str, target: str) -> Any:
        real(self, front_dir, target)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ImageServer, "mount", killed)
    with pytest.raises(BootseerError):
        mounts.mount(ref)
    assert mounts.gone()


def test_servers_killed_while_hot_frames_come_and_are_warmed(
    mounts: Mounts, registry: Any, tmp_path: Path
) -> None:
    """Each has half of the frames when it is killed; the first one has warmed some files.

    A FAKE stands between, so that the pack stops where it should.
    """
    ref = registry.reference("deaths/hot", "1")
    files = some_files(12, 1_000_000)
    image = publish(ref, files, tmp_path / "image", hot={"": sorted(files)[:8]})
    pack_bytes = registry.blob_path(image.packs[""]).stat().st_size
    with Gate(registry.host) as gate:
        halves = Halves(gate, image.packs[""], least_bytes=pack_bytes // 2, cuts=3)
        gate.rules = [halves.rule]
        ref = ref.replace(registry.host, gate.authority)
        with page_cache.staying():
            mounted = mounts.mount(ref, record=True, fill=True)
            server = mounts.server()
            found: list[dict[str, bytes]] = []

            def read_all() -> None:
                found.append(tree_of(mounted.directory))

            readers = [threading.Thread(target=read_all) for _ in range(4)]
            assert halves.is_halfway()
            until(lambda: resident(Path(mounted.directory) / min(files)), "warming has begun")
        for reader in readers:
            reader.start()
        for _ in range(3):
            assert halves.is_halfway()
            mounts.kill_worker(server)
            halves.cut()
        for reader in readers:
            reader.join(60)
        assert found == [files] * 4
        mounts.umount(mounted)
        assert mounts.gone()
