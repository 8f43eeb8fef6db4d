"""A real containerd pulls and runs stock images through the snapshotter."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.imageprefetch.snapshotter.types import StockImage
from bootseer.storage.oci.manifest import Manifest
from bootseer.storage.oci.open import open_repository
from tests.support.labs.containerd import Lab, until
from tests.support.labs.snapshotter_client import RefusedError, remote_labels
from tests.support.samples.images import Image, directory, file, symlink, whiteout, write_layout

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("containerd")]

BUSYBOX = Path("/bin/busybox")
NAMES = ("sh", "cat", "ls", "echo", "sleep", "sha256sum", "md5sum", "find")


def base() -> list[Any]:
    """A layer with a shell."""
    links = [symlink(f"bin/{name}", "busybox") for name in NAMES]
    return [directory("bin"), file("bin/busybox", BUSYBOX, mode=0o755), *links]


MIDDLE = [directory("etc"), file("etc/kept", b"kept"), file("etc/gone", b"gone"), file("v", b"1")]
TOP = [whiteout("etc/gone"), file("v", b"2"), directory("data"), file("data/b", bytes(300_000))]


class World:
    """Images of a registry, some with block images, and a containerd."""

    def __init__(self, registry: Any, lab: Lab, folder: Path) -> None:
        self.registry, self.lab, self._folder = registry, lab, folder

    def push(self, name: str, *layers: Any, built: bool = True) -> str:
        own = [*map(list, layers), [file("name", name.encode())]]  # for a digest of its own
        layout = write_layout(self._folder / name, Image(own), tag="1")
        ref = str(self.registry.push(layout.source, f"snap/{name}", "1"))
        if built:
            build_image(BuildSettings(ref=ref, cache_dir=str(self._folder / "build")))
        return ref


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the snapshotter is told to write events, by its option alone."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def lab(events: Path) -> Iterator[Lab]:
    with Lab("--no-fill", "--events", str(events), cri=True) as made:
        yield made


def told(events: Path, name: str, ref: str) -> bool:
    """Whether an event of that name tells of the image, whatever registry's name it goes by."""
    lines = [line for path in events.iterdir() for line in path.read_text().splitlines()]
    repository = ref.rpartition(":")[0]
    return any(f'"name":"{name}"' in line and repository in line for line in lines)


@pytest.fixture
def world(registry: Any, lab: Lab, tmp_path: Path) -> World:
    return World(registry, lab, tmp_path)


def test_an_image_runs_though_no_layer_was_fetched(world: World, events: Path) -> None:
    ref = world.push("lazy", base(), MIDDLE, TOP)
    before = len(world.registry.requests())
    world.lab.pull(ref)
    blobs = {layer.digest for layer in _layers(world, "lazy")}
    asked = [request.path for request in world.registry.requests()[before:]]
    assert not [path for path in asked if any(digest in path for digest in blobs)]
    assert world.lab.run(ref, "cat", "/v") == "2"
    assert world.lab.run(ref, "ls", "/etc") == "kept\n"
    said = world.lab.run(ref, "sh", "-c", "echo new > /etc/new; cat /etc/new; ls /data")
    assert said == "new\nb\n"
    assert f"{ref}: mounted" in world.lab.said()
    assert told(events, "image.snapshotter", ref)
    assert told(events, "image.mount", ref)


def _layers(world: World, name: str) -> Any:
    from tools.images.layout import open_layout

    return open_layout(world._folder / name, "1").layers()


def test_kubelets_way_of_pulling_is_lazy_too(world: World) -> None:
    ref = world.push("cri", base(), MIDDLE)
    world.lab.cri_pull(ref)
    assert f"{ref}: mounted" in world.lab.said()
    assert world.lab.run(ref, "cat", "/etc/gone", namespace="k8s.io") == "gone"


def test_an_image_without_a_block_image_is_pulled_the_plain_way(world: World) -> None:
    ref = world.push("plain", base(), TOP, built=False)
    world.lab.pull(ref)
    assert f"{ref}: handed to the plain way" in world.lab.said()
    assert world.lab.run(ref, "cat", "/v") == "2"


def test_an_image_over_layers_of_a_lazy_one(world: World) -> None:
    """Its first layer is there already, as a name only: its tree has to be made for it."""
    lazy = world.push("whole", base(), MIDDLE, TOP)
    other = world.push("other", base(), MIDDLE, [file("own", b"own")], built=False)
    world.lab.pull(lazy)
    world.lab.pull(other)
    assert world.lab.run(other, "sh", "-c", "cat /own /v /etc/gone") == "own1gone"
    assert world.lab.run(lazy, "cat", "/v") == "2"
    assert "unpacked from its layers" in world.lab.said()


def test_what_is_no_longer_used_is_unmounted_by_containerds_collection(
    world: World, events: Path
) -> None:
    ref = world.push("short", base(), [file("only", b"here")])
    world.lab.pull(ref)
    mounts = len(_image_mounts(world))
    world.lab.containerd("images", "rm", "--sync", ref)
    until(lambda: len(_image_mounts(world)) == mounts - 1, "the unmount", world.lab.said)
    until(lambda: told(events, "image.reads", ref), "what its server counted", world.lab.said)
    world.lab.pull(ref)
    assert world.lab.run(ref, "cat", "/only") == "here"


def test_what_containerd_is_told_to_keep_stays(world: World) -> None:
    """An image goes, and one of its snapshots is a root of the collection: its mount stays."""
    ref = world.push("rooted", base(), [file("kept", b"k")])
    before = {name for name, _ in names_and_parents(world)}
    world.lab.pull(ref)
    added = [pair for pair in names_and_parents(world) if pair[0] not in before]
    (top,) = {name for name, _ in added} - {parent for _, parent in added}
    label = ("snapshots", "--snapshotter", "bootseer", "label", top)
    world.lab.containerd(*label, "containerd.io/gc.root=now")
    mounts = len(_image_mounts(world))
    world.lab.containerd("images", "rm", "--sync", ref)
    assert {name for name, _ in added} <= {name for name, _ in names_and_parents(world)}
    assert len(_image_mounts(world)) == mounts
    world.lab.containerd(*label, "containerd.io/gc.root=")
    world.lab.containerd("snapshots", "--snapshotter", "bootseer", "rm", top)
    until(lambda: len(_image_mounts(world)) == mounts - 1, "the unmount", world.lab.said)


def test_what_a_lease_holds_stays_until_the_lease_goes(world: World) -> None:
    """A client asks for the image's layers under a lease of its own; another pulls the image."""
    ref = world.push("leased", [file("held", b"h")])
    image, chain = _chain(ref)
    lease = world.lab.containerd("leases", "create").stdout.strip()
    leased, parent = world.lab.client(lease=lease), ""
    for depth, name in enumerate(chain):
        with pytest.raises(RefusedError, match="ALREADY_EXISTS"):
            leased.prepare(f"lease {depth}", parent, remote_labels(name, image, depth))
        parent = name
    leased.close()
    world.lab.pull(ref)
    mounts = len(_image_mounts(world))
    world.lab.containerd("images", "rm", "--sync", ref)
    assert set(chain) <= {name for name, _ in names_and_parents(world)}
    assert len(_image_mounts(world)) == mounts
    world.lab.containerd("leases", "rm", "--sync", lease)
    until(lambda: len(_image_mounts(world)) == mounts - 1, "the unmount", world.lab.said)
    assert not set(chain) & {name for name, _ in names_and_parents(world)}


def _chain(ref: str) -> tuple[StockImage, list[str]]:
    """The image, and the names that containerd gives its layers."""
    repository, parsed = open_repository(ref)
    with repository:
        found, manifest = repository.image(parsed.version)
        config = json.loads(repository.blob(manifest.config, limit_bytes=1 << 20))
    first, *others = config["rootfs"]["diff_ids"]
    names = [first]
    for diff_id in others:
        names.append(f"sha256:{hashlib.sha256(f'{names[-1]} {diff_id}'.encode()).hexdigest()}")
    return StockImage(found.digest, ref, tuple(layer.digest for layer in manifest.layers)), names


def names_and_parents(world: World) -> list[tuple[str, str]]:
    return [(row[0], row[1] if len(row) == 3 else "") for row in world.lab.snapshots()]


def _image_mounts(world: World) -> list[str]:
    lines = world.lab.inside("cat", "/proc/self/mountinfo").splitlines()
    return [line for line in lines if f"{world.lab.root}/images" in line]


def test_a_killed_snapshotter_comes_back_with_all_it_knew(world: World) -> None:
    ref = world.push("killed", base(), MIDDLE)
    world.lab.pull(ref)
    snapshots, mounts = world.lab.snapshots(), _image_mounts(world)
    assert mounts
    world.lab.kill_snapshotter()
    assert _image_mounts(world) == mounts  # containers go on
    world.lab.start_snapshotter()
    world.lab.wait_connected()
    assert world.lab.snapshots() == snapshots
    assert world.lab.run(ref, "cat", "/etc/kept") == "kept"
    assert _image_mounts(world) == mounts


def test_after_a_reboot_without_a_registry_images_are_mounted_from_the_cache(
    own_registry: Any, lab: Lab, tmp_path: Path
) -> None:
    world = World(own_registry(), lab, tmp_path)
    ref = world.push("reboot", base(), MIDDLE)
    lab.pull(ref)
    assert lab.run(ref, "cat", "/etc/kept") == "kept"
    lab.kill_snapshotter()
    for line in _image_mounts(world):
        lab.inside("umount", "-l", line.split()[4])
    world.registry.stop()
    lab.start_snapshotter()
    lab.wait_connected()
    assert lab.run(ref, "cat", "/etc/kept") == "kept"


def test_a_damaged_block_image_is_noticed_and_the_image_pulled(
    own_registry: Any, lab: Lab, tmp_path: Path
) -> None:
    world = World(own_registry(), lab, tmp_path)
    ref = world.push("damaged", base(), [file("x", b"right")])
    for digest in _artifact_blobs(world.registry, ref):
        path = world.registry.blob_path(digest)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    lab.pull(ref)
    assert f"{ref}: handed to the plain way" in lab.said()
    assert lab.run(ref, "cat", "/x") == "right"


def _artifact_blobs(registry: Any, ref: str) -> list[str]:
    """The blobs of an image's block image."""
    repository, parsed = open_repository(ref)
    with repository:
        digest = repository.image(parsed.version)[0].digest
        (found,) = repository.referrers(digest)
        manifest = repository.manifest(found)
    assert isinstance(manifest, Manifest)
    return [layer.digest for layer in manifest.layers]


def is_removed(folder: Path) -> bool:
    """Whether a folder is gone, after an attempt to remove it; servers that end may write to it."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_a_mount_that_cannot_be_made_again_is_replaced_by_the_layers(
    own_registry: Any, lab: Lab, tmp_path: Path
) -> None:
    """The node lost its cache and its mounts, the registry its block image."""
    world = World(own_registry(), lab, tmp_path)
    ref = world.push("lost", base(), MIDDLE, TOP)
    lab.pull(ref)
    blobs = _artifact_blobs(world.registry, ref)
    lab.kill_snapshotter()
    for line in _image_mounts(world):
        lab.inside("umount", "-l", line.split()[4])
    for digest in blobs:
        world.registry.blob_path(digest).unlink()
    until(lambda: is_removed(lab.folder / "cache"), "an empty cache")
    lab.start_snapshotter()
    lab.wait_connected()
    assert lab.run(ref, "sh", "-c", "cat /v; ls /etc") == "2kept\n"
    assert f"{ref}: unpacked from its layers" in lab.said()
