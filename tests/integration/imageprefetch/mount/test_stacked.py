"""Mounted images and what others mount over them, or they over others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import erofs_mount
from bootseer.blockimage.serve.image_server import ImageServer
from bootseer.cli.image import outcome
from bootseer.errors import BootseerError, NotFoundError, UsageError
from bootseer.imageprefetch.mount import mount, server_registry
from bootseer.imageprefetch.mount.hotset_replay import replay_through
from tests.support.mounts.fuse import in_time
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

FILES = some_files(6, 200_000)
OTHER = {"other": b"o" * 9000}


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def image(registry: Any, tmp_path: Path) -> Published:
    hot = {"": sorted(FILES)[:2]}
    return publish(registry.reference("stacked/image", "1"), FILES, tmp_path / "image", hot=hot)


@pytest.fixture
def other(registry: Any, tmp_path: Path) -> Published:
    return publish(registry.reference("stacked/other", "1"), OTHER, tmp_path / "other")


def cover(place: Path | str) -> None:
    """Put another file system there, with one file."""
    made = ctypes.CDLL(None).mount(b"none", os.fsencode(place), b"tmpfs", 0, None)
    assert made == 0
    (Path(place) / "foreign").write_bytes(b"foreign")


def uncover(place: Path | str) -> None:
    assert ctypes.CDLL(None).umount2(os.fsencode(place), 8) == 0


def ended(server: server_registry.ServerRecord) -> Callable[[], bool]:
    return lambda: not os.path.exists(f"/proc/{server.supervisor}/fd/0")


def test_a_tree_below_another_one_is_not_shared(
    mounts: Mounts, image: Published, other: Published
) -> None:
    below = mounts.mount(image.ref)
    served = mounts.server()
    mounts.mount(other.ref, directory=below.directory)
    with pytest.raises(NotFoundError):  # nor is anything of that other one read ahead
        replay_through(mounts.settings(image.ref), served, lambda: False)
    again = mounts.mount(image.ref)
    assert not again.shared
    assert tree_of(again.directory) == FILES
    assert mounts.mount(image.ref).shared
    assert tree_of(below.directory) == OTHER


def test_a_tree_below_a_covered_directory_is_not_shared(
    mounts: Mounts, image: Published, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    (above / "d").mkdir(parents=True)
    mounts.mount(image.ref, directory=str(above / "d"))
    cover(above)
    (above / "d").mkdir()
    again = mounts.mount(image.ref)
    assert tree_of(again.directory) == FILES
    with pytest.raises(NotFoundError):
        mounts.umount(str(above / "d"))


def test_of_several_trees_one_that_is_seen_is_shared(mounts: Mounts, image: Published) -> None:
    first, second = mounts.mount(image.ref), mounts.mount(image.ref)
    cover(first.directory)
    third = mounts.mount(image.ref)
    assert (second.shared, third.shared) == (True, True)
    assert tree_of(third.directory) == FILES


def test_a_tree_covered_while_it_is_shared_is_not_mistaken(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unlucky moment is a fake: something is mounted just before the tree is taken."""
    real = erofs_mount.clone
    mounts.mount(image.ref)
    covered: list[str] = []

    def late(source: str) -> int:
        if not covered:
            cover(source)
            covered.append(source)
        return real(source)

    monkeypatch.setattr(erofs_mount, "clone", late)
    again = mounts.mount(image.ref)
    assert covered
    assert tree_of(again.directory) == FILES


def test_a_tree_whose_server_ends_while_it_is_shared_is_not_kept(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unlucky moment is a fake: the server ends between taking the tree and showing it."""
    real = erofs_mount.attach
    mounts.mount(image.ref)
    server = mounts.server()

    def late(tree: int, target: str, *, nosuid: bool) -> None:
        if os.path.exists(server.state):
            os.kill(server.supervisor, signal.SIGTERM)
            until(lambda: not os.path.exists(server.state))
        real(tree, target, nosuid=nosuid)

    monkeypatch.setattr(erofs_mount, "attach", late)
    again = mounts.mount(image.ref)
    assert not again.shared
    assert in_time(lambda: tree_of(again.directory)) == FILES
    monkeypatch.undo()
    mounts.umount(again)
    assert mounts.gone()


def test_a_shared_tree_is_restricted_as_each_mount_wants(mounts: Mounts, image: Published) -> None:
    """The first one's setting is not the second one's."""
    for first in (True, False):
        made = [mounts.mount(image.ref, nosuid=nosuid) for nosuid in (first, not first)]
        flags = [os.statvfs(mounted.directory).f_flag for mounted in made]
        assert [bool(flag & os.ST_NOSUID) for flag in flags] == [first, not first]
        assert [bool(flag & os.ST_NODEV) for flag in flags] == [first, not first]
        assert all(flag & os.ST_RDONLY and flag & os.ST_NOATIME for flag in flags)
        for mounted in made:
            mounts.umount(mounted)


def test_a_server_that_dies_takes_nobody_elses_tree_away(
    mounts: Mounts, image: Published, other: Published
) -> None:
    below = mounts.mount(image.ref, hot=False)
    server = mounts.server()
    with (Path(below.directory) / max(FILES)).open("rb", buffering=0) as file:
        mounts.mount(other.ref, directory=below.directory)
        os.kill(server.supervisor, signal.SIGKILL)
        until(lambda: not server_registry.is_serving(server))
        # At once, while its worker may still be ending.
        again = mounts.mount(image.ref)
        assert not again.shared
        assert tree_of(below.directory) == OTHER
        with pytest.raises(OSError, match="Input/output error"):
            in_time(file.read)
    assert tree_of(again.directory) == FILES
    mounts.umount(again)
    mounts.umount(below.directory)
    evict(below.directory)
    with contextlib.suppress(NotFoundError):  # somebody who came by has swept it already
        mounts.umount(below.directory)  # what was left below it
    assert mounts.gone()


def test_a_failed_mount_takes_nobody_elses_tree_away(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ImageServer.mount

    def killed(self: ImageServer, front_dir: str, target: str) -> Any:
        real(self, front_dir, target)
        cover(target)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ImageServer, "mount", killed)
    settings = mounts.settings(image.ref)
    with pytest.raises(BootseerError):
        mount.mount(settings)
    assert tree_of(settings.directory) == {"foreign": b"foreign"}
    with pytest.raises(UsageError, match="tmpfs"):
        mounts.umount(settings.directory)
    uncover(settings.directory)
    mounts.umount(settings.directory)
    assert mounts.gone()


def test_a_link_to_a_directory_is_as_good_as_its_name(
    mounts: Mounts, image: Published, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "far").symlink_to("real")
    (tmp_path / "near").symlink_to(tmp_path / "far")
    for _ in range(2):  # alone, and sharing with the first
        mounted = mounts.mount(image.ref, directory=str(tmp_path / "near"))
        assert mounted.directory == str(tmp_path / "real")
        assert tree_of(tmp_path / "near") == FILES
    for _ in range(2):
        mounts.umount(f"{tmp_path / 'near'}/")
    assert mounts.gone()


@pytest.mark.parametrize(
    "where",
    [
        "",
        "cache",
        "runtime",
        "link",
        "layout",
        "cache/blocks/x",
        "cache/images",
        "runtime/images/x",
    ],
)
def test_a_mount_hides_nothing_that_it_needs(where: str, mounts: Mounts, tmp_path: Path) -> None:
    for folder in ("cache/blocks/x", "cache/images", "runtime/images/x", "layout/index"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("cache")
    ref = f"oci-layout:{tmp_path / 'layout'}"
    with pytest.raises(UsageError, match="choose another directory"):
        mounts.mount(ref, directory=str(tmp_path / where))
    for folder in ("cache/blocks/x", "cache/images", "runtime/images/x"):
        with contextlib.suppress(OSError):
            os.removedirs(tmp_path / folder)
    assert not mounts.left()


def test_a_complete_image_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    about: dict[str, Any] = {"shared": False, "loop": False, "hot_set": "sha256:1", "hot_bytes": 5}
    made = mount.MountedImage("/mnt", "sha256:2", "", **about, offline=False, complete=True)
    outcome.print_mounted(made)
    said = capsys.readouterr().err
    assert "all of it is on this node's disk" in said
    assert "follows" not in said


def test_a_hot_set_of_whole_blocks_is_not_told_as_empty(capsys: pytest.CaptureFixture[str]) -> None:
    about: dict[str, Any] = {"shared": False, "loop": False, "hot_set": "sha256:1", "hot_bytes": 0}
    made = mount.MountedImage("/mnt", "sha256:2", "", **about, offline=False, complete=False)
    outcome.print_mounted(made)
    said = capsys.readouterr().err
    assert "its hot set, most of the image, follows block by block" in said
    assert "0 B" not in said
