"""What is mounted and unpacked when images go, come again, or come from somewhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import BusyError, StoreUnavailableError
from bootseer.events.writer import NullWriter
from bootseer.imageprefetch.snapshotter import image_mounts, process
from bootseer.imageprefetch.snapshotter.database import Database
from bootseer.imageprefetch.snapshotter.plain_mounter import PlainMounter
from bootseer.imageprefetch.snapshotter.types import StockImage
from tests.support.labs.snapshotter_client import (
    Client,
    DirectoryMounter,
    RefusedError,
    Running,
    remote_labels,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]

TWO = [{"etc/a": "1", "both": "low"}, {"both": "high"}]


@pytest.fixture
def mounter(tmp_path: Path) -> DirectoryMounter:
    return DirectoryMounter(tmp_path / "images")


@pytest.fixture
def lab(tmp_path: Path, mounter: DirectoryMounter) -> Iterator[Running]:
    made = Running(tmp_path, mounter, NullWriter())
    made.wait_restored()
    yield made
    made.close()
    for place in (tmp_path / "root/images").iterdir():
        mounter.umount(str(place))


def pull(client: Client, image: StockImage) -> list[str]:
    parent, names = "", []
    for depth, layer in enumerate(image.layers):
        if f"chain-{layer}" not in client.names():
            labels = remote_labels(f"chain-{layer}", image, depth)
            with pytest.raises(RefusedError, match="exists, without a fetch"):
                client.prepare(f"extract {layer}", parent, labels)
        (parent,) = [name for name in client.names() if name.startswith(f"chain-{layer}")]
        names.append(parent)
    return names


def mounted(lab: Running, mounter: DirectoryMounter) -> list[str]:
    return [str(p) for p in (lab.root / "images").iterdir() if mounter.answers(str(p))]


def test_a_removed_image_is_unmounted_though_another_shares_its_base(
    lab: Running, mounter: DirectoryMounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_mounts, "REMEMBER_S", 0.0)
    base, top = pull(lab.client, mounter.add("lazy", TWO))
    lab.client.layer("other-top", base, {"other": "o"}, tmp_path)
    lab.client.cleanup()
    assert len(mounted(lab, mounter)) == 1
    lab.client.remove(top)
    lab.client.cleanup()
    assert mounted(lab, mounter) == []
    assert base in lab.client.names()
    (mount,) = lab.client.prepare("box", "other-top")
    assert str(lab.root / "trees") in mount.options[-1]  # its own tree is still to be had


def test_an_image_of_which_one_layer_is_asked_for_stays_mounted(
    lab: Running, mounter: DirectoryMounter
) -> None:
    image = mounter.add("lazy", TWO)
    with pytest.raises(RefusedError):
        lab.client.prepare("extract", "", remote_labels("chain-0", image, 0))
    lab.client.cleanup()
    assert len(mounted(lab, mounter)) == 1


def test_who_asked_while_anothers_mount_failed_finds_the_snapshot(
    lab: Running, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pulls of one image at once: the first one's registry is away, the second one's not."""
    image = mounter.add("lazy", TWO[:1])
    working, tried, both = mounter.mount, threading.Event(), threading.Event()

    def first_fails(image: StockImage, directory: str) -> None:
        if not tried.is_set():
            tried.set()
            both.wait(10)
            raise StoreUnavailableError("the registry is away")
        working(image, directory)

    monkeypatch.setattr(mounter, "mount", first_fails)
    codes: list[str] = []

    def ask(number: int) -> None:
        try:
            lab.client.prepare(f"extract {number}", "", remote_labels("chain", image, 0))
            codes.append("plain")
        except RefusedError as error:
            codes.append(error.code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    threads[0].start()
    tried.wait(10)
    threads[1].start()
    # The second one has asked for the same image's lock, or is about to.
    threading.Timer(0.3, both.set).start()
    for thread in threads:
        thread.join()
    there = "chain" in lab.client.names()
    assert there is ("ALREADY_EXISTS" in codes), codes
    assert "plain" in codes


def test_a_known_image_by_a_name_that_must_not_be_lazy(
    lab: Running, mounter: DirectoryMounter, tmp_path: Path
) -> None:
    """The same digest in a stranger's registry: its block image is not the one that was found."""
    image = mounter.add("lazy", TWO)
    pull(lab.client, image)
    mounter.forbidden = "evil/"
    stranger = StockImage(image.digest, "evil/lazy:1", image.layers)
    assert lab.client.prepare("extract", "", remote_labels("other", stranger, 0))
    assert any("evil/lazy:1: handed to the plain way" in line for line in lab.said)
    with Database.open(str(lab.root / "state.db")) as state:
        assert [one.reference for one in state.images()] == ["reg/lazy:1"]


def test_only_what_is_allowed_is_lazy_whatever_is_known() -> None:
    from bootseer.errors import AccessDeniedError
    from bootseer.imageprefetch.snapshotter.lazy_mounter import BlockImageMounter, LazySettings

    mounter = BlockImageMounter(LazySettings(only=("registry.example/team",)))
    mounter.check("registry.example/team/x:1")
    for name in ("registry.example/teamster/x:1", "evil.example/registry.example/team:1"):
        with pytest.raises(AccessDeniedError, match="--only"):
            mounter.check(name)


def test_a_tree_of_which_a_kill_left_a_part_is_never_used(
    lab: Running, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = mounter.add("lazy", TWO)
    names = pull(lab.client, image)
    fall_back(lab, mounter)
    lab.client.prepare("box", names[-1])
    for name in ("box", *reversed(names)):
        lab.client.remove(name)

    def killed(place: str, **_: Any) -> None:
        next(Path(place).rglob("both")).unlink()

    whole = shutil.rmtree
    monkeypatch.setattr(image_mounts.shutil, "rmtree", killed)
    lab.client.cleanup()
    monkeypatch.setattr(image_mounts.shutil, "rmtree", whole)
    mounter.broken = False
    top = pull(lab.client, image)[-1]
    fall_back(lab, mounter)
    (mount,) = lab.client.prepare("again", top)
    tree = mount.options[-1].removeprefix("lowerdir=")
    assert (Path(tree) / "both").read_text() == "high"
    lab.client.cleanup()
    assert sorted(os.listdir(os.path.dirname(tree))) == ["fs"]


def fall_back(lab: Running, mounter: DirectoryMounter) -> None:
    """From now on the image cannot be mounted, and is not."""
    for place in mounted(lab, mounter):
        mounter.umount(place)
    mounter.broken = True


def test_trees_stay_when_labels_change(lab: Running, mounter: DirectoryMounter) -> None:
    top = pull(lab.client, mounter.add("lazy", TWO))[-1]
    fall_back(lab, mounter)
    before = lab.client.prepare("box", top)
    lab.client.update(top, {})
    lab.client.cleanup()
    assert lab.client.mounts("box") == before
    assert (Path(before[0].options[-1].removeprefix("lowerdir=")) / "both").exists()


def test_any_fault_of_ours_leaves_the_plain_way(
    lab: Running, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(image: StockImage, directory: str) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(mounter, "mount", defect)
    image = mounter.add("lazy", TWO)
    assert lab.client.prepare("extract", "", remote_labels("chain", image, 0))
    assert lab.client.names() == ["extract"]
    assert any("a defect" in line for line in lab.said)


def test_one_image_that_stays_mounted_keeps_no_other(
    lab: Running, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        for snapshot in pull(lab.client, mounter.add(name, TWO[:1])):
            lab.client.remove(snapshot)
    working, stuck = mounter.umount, os.listdir(lab.root / "images")[0]

    def umount(directory: str) -> None:
        if directory.endswith(stuck):
            raise BusyError("held by somebody")
        working(directory)

    monkeypatch.setattr(mounter, "umount", umount)
    for _ in range(2):
        with pytest.raises(RefusedError, match="held by somebody"):
            lab.client.cleanup()
        assert os.listdir(lab.root / "images") == [stuck]


def test_a_directory_given_relatively_is_told_in_full(
    tmp_path: Path, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = process.SnapshotterSettings("root", "snap.sock")
    with process.running_snapshotter(settings, mounter, lambda _: None, NullWriter()):
        client = Client(tmp_path / "snap.sock")
        assert client.prepare("a")[0].source.startswith(str(tmp_path))
        client.close()


def test_a_socket_on_which_another_one_listens_is_left_to_it(
    lab: Running, mounter: DirectoryMounter, tmp_path: Path
) -> None:
    settings = process.SnapshotterSettings(str(tmp_path / "other"), lab.settings.address)
    with pytest.raises(BusyError, match="another snapshotter listens"):
        process.running_snapshotter(settings, mounter, lambda _: None, NullWriter()).__enter__()
    assert lab.client.prepare("still")


def test_a_closed_state_is_not_called_damaged(tmp_path: Path) -> None:
    state = Database.open(str(tmp_path / "state.db"))
    state.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        state.all()


def test_without_lazy_images_what_was_mounted_is_unmounted(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        PlainMounter(str(tmp_path / "runtime")).umount(str(place))
        assert not os.path.ismount(place)
    finally:
        subprocess.run(["umount", "-q", "-l", str(place)], check=False)


def test_a_pull_that_began_the_plain_way_ends_on_it(
    lab: Running, mounter: DirectoryMounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block image is published while the first layer is fetched, which takes its time."""
    monkeypatch.setattr(image_mounts, "REMEMBER_S", 0.0)
    image = StockImage("sha256:late", "reg/late:1", ("late-0", "late-1"))
    lab.client.prepare("extract 0", "", remote_labels("late-low", image, 0))
    lab.client.commit("late-low", "extract 0")
    assert mounter.add("late", TWO) == image
    assert lab.client.prepare("extract 1", "late-low", remote_labels("late-top", image, 1))
    assert mounter.calls == ["find reg/late:1"]
    with pytest.raises(RefusedError, match="exists, without a fetch"):  # another pull
        lab.client.prepare("again", "", remote_labels("other-low", image, 0))


def test_a_registry_that_failed_is_not_asked_again_by_each_pull(
    lab: Running, mounter: DirectoryMounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_mounts, "REMEMBER_S", 0.0)
    image = mounter.add("lazy", TWO)
    mounter.gone = True
    for turn in range(3):
        assert lab.client.prepare(f"extract {turn}", "", remote_labels("chain", image, 0))
    assert mounter.calls == ["find reg/lazy:1"]
    assert len([line for line in lab.said if "the registry is away" in line]) == 1
    monkeypatch.setattr(image_mounts.time, "monotonic", later := Later(image_mounts.FAILED_S + 1))
    mounter.gone = False
    with pytest.raises(RefusedError, match="exists, without a fetch"):
        lab.client.prepare("later", "", remote_labels("chain", image, 0))
    assert later.asked


class Later:
    """A clock that is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s, self._clock, self.asked = ahead_s, time.monotonic, False

    def __call__(self) -> float:
        self.asked = True
        return self._clock() + self._ahead_s
