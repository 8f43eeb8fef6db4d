"""Every call over the socket, with images that are plain directories."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.events.writer import Writer
from bootseer.fuse.serve import daemon
from bootseer.imageprefetch.snapshotter.types import TARGET_LABEL, StockImage
from tests.support.labs.snapshotter_client import (
    Client,
    DirectoryMounter,
    RefusedError,
    Running,
    mounted,
    remote_labels,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def mounter(tmp_path: Path) -> DirectoryMounter:
    return DirectoryMounter(tmp_path / "images")


@pytest.fixture
def running(tmp_path: Path, mounter: DirectoryMounter) -> Iterator[Running]:
    with Writer(str(tmp_path / "events.jsonl")) as writer:
        made = Running(tmp_path, mounter, writer)
        yield made
        made.close()
        for place in (tmp_path / "root/images").iterdir():
            mounter.umount(str(place))


@pytest.fixture
def client(running: Running) -> Client:
    return running.client


def pull(client: Client, image: StockImage, parent: str = "") -> list[str]:
    """Pull as containerd does: ask for each layer; the names of the snapshots it would use."""
    names = []
    for depth in range(len(image.layers)):
        target = f"chain-{image.layers[depth]}"
        labels = remote_labels(target, image, depth)
        with pytest.raises(RefusedError) as caught:
            client.prepare(f"extract {target}", parent, labels)
        assert caught.value.code == "ALREADY_EXISTS"
        wanted = f'labels."{TARGET_LABEL}"=={target},parent=="{parent}"'
        (parent,) = client.names(wanted)
        names.append(parent)
    return names


TWO = [{"etc/a": "1", "both": "low"}, {"both": "high"}]


def test_an_image_with_a_block_image_is_there_without_a_fetch(
    client: Client, mounter: DirectoryMounter, running: Running, tmp_path: Path
) -> None:
    image = mounter.add("lazy", TWO)
    names = pull(client, image)
    assert [client.stat(name).kind for name in names] == [3, 3]
    assert client.usage(names[1]) == (0, 0)
    with mounted(client.prepare("box", names[1]), tmp_path) as tree:
        assert (tree / "etc/a").read_text() == "1"
        assert (tree / "both").read_text() == "high"
        (tree / "new").write_text("x" * 5000)
        size_bytes, inodes = client.usage("box")
        assert size_bytes >= 5000
        assert inodes == 2
    with mounted(client.view("look", names[1]), tmp_path) as tree:
        assert not (tree / "new").exists()
        with pytest.raises(OSError, match="Read-only"):
            (tree / "no").write_text("")
    assert mounter.calls == ["find reg/lazy:1", "mount reg/lazy:1"]
    assert any("reg/lazy:1: mounted" in line for line in running.said)


def test_an_image_without_one_is_handed_to_the_plain_way_with_its_reason(
    client: Client, mounter: DirectoryMounter, running: Running, tmp_path: Path
) -> None:
    image, parent = StockImage("sha256:none", "reg/none:1", ("none-0", "none-1", "none-2")), ""
    for depth, layer in enumerate(image.layers):
        (mount,) = client.prepare("extract", parent, remote_labels(f"chain-{layer}", image, depth))
        parent = f"chain-{layer}"
        client.commit(parent, "extract")
    assert mount.type == "overlay"
    said = [s for s in running.said if "reg/none:1: handed to the plain way: no block image" in s]
    assert len(said) == 1  # an image, not a layer
    text = (tmp_path / "events.jsonl").read_text()
    (line,) = [line for line in text.splitlines() if '"image.snapshotter"' in line]
    assert '"status":"fallback"' in line
    assert "no block image of reg/none:1" in line


def test_a_client_that_names_no_image_unpacks(client: Client, running: Running) -> None:
    assert client.prepare("extract", "", {TARGET_LABEL: "chain"})
    assert any("did not say which image" in line for line in running.said)


def test_a_tag_that_moved_between_pull_and_look_is_unpacked(
    client: Client, mounter: DirectoryMounter
) -> None:
    image = mounter.add("moved", TWO)
    other = StockImage(image.digest, image.reference, ("other-0", "other-1"))
    assert client.prepare("extract", "", remote_labels("chain", other, 0))
    assert client.prepare("more", "", remote_labels("top", image, 1))  # not over its first layer


def test_an_image_that_cannot_be_mounted_is_pulled_plainly(
    client: Client, mounter: DirectoryMounter, running: Running
) -> None:
    image = mounter.add("broken", TWO)
    mounter.broken = True
    assert client.prepare("extract", "", remote_labels("chain", image, 0))
    assert any("cannot be mounted" in line for line in running.said)


def test_another_image_stands_on_some_layers_of_a_lazy_one(
    client: Client, mounter: DirectoryMounter, running: Running, tmp_path: Path
) -> None:
    """The second image shares a layer, and has no block image: that layer's own tree is made."""
    image = mounter.add("lazy", TWO)
    base, _ = pull(client, image)
    client.layer("other-top", base, {"other": "o"}, tmp_path)
    with mounted(client.prepare("box", "other-top"), tmp_path) as tree:
        assert (tree / "both").read_text() == "low"
        assert (tree / "other").read_text() == "o"
    assert mounter.calls[2:] == ["unpack reg/lazy:1 1"]
    client.remove("box")
    client.remove("other-top")
    client.cleanup()
    assert len(list((running.root / "trees").iterdir())) == 1  # the layer itself is still known


def test_layers_over_a_whole_lazy_image_need_no_unpacking(
    client: Client, mounter: DirectoryMounter, tmp_path: Path
) -> None:
    top = pull(client, mounter.add("lazy", TWO))[-1]
    client.layer("mine", top, {"mine": "m"}, tmp_path)
    with mounted(client.view("look", "mine"), tmp_path) as tree:
        assert {path.name for path in tree.iterdir()} == {"etc", "both", "mine"}
    assert not [call for call in mounter.calls if call.startswith("unpack")]


def test_two_namespaces_share_an_image(client: Client, mounter: DirectoryMounter) -> None:
    image = mounter.add("lazy", TWO)
    assert pull(client, image) == pull(client, image)
    assert mounter.calls.count("mount reg/lazy:1") == 1


def test_many_ask_for_an_image_at_once_and_it_is_mounted_once(
    client: Client, mounter: DirectoryMounter
) -> None:
    image = mounter.add("lazy", [{"a": "1"}])
    mounter.hold.clear()
    codes: list[str] = []

    def ask(number: int) -> None:
        with pytest.raises(RefusedError) as caught:
            client.prepare(f"extract {number}", "", remote_labels("chain", image, 0))
        codes.append(caught.value.code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert client.names() == []  # others are answered meanwhile
    mounter.hold.set()
    for thread in threads:
        thread.join()
    assert codes == ["ALREADY_EXISTS"] * 8
    assert mounter.calls == ["find reg/lazy:1", "mount reg/lazy:1"]
    assert len(client.names()) == 1


def test_collection_removes_top_first_and_unmounts(
    client: Client, mounter: DirectoryMounter, running: Running
) -> None:
    base, top = pull(client, mounter.add("lazy", TWO))
    client.prepare("box", top)
    for name in (base, top):
        with pytest.raises(RefusedError, match="stands on it") as caught:
            client.remove(name)
        assert caught.value.code == "FAILED_PRECONDITION"
    client.cleanup()
    (place,) = (running.root / "images").iterdir()
    assert mounter.answers(str(place))
    for name in ("box", top, base):
        client.remove(name)
    client.cleanup()
    assert list((running.root / "images").iterdir()) == []
    assert list((running.root / "snapshots").iterdir()) == []


def test_cleanup_removes_what_no_snapshot_claims(client: Client, running: Running) -> None:
    client.prepare("kept")
    rubbish = running.root / "snapshots/rubbish/fs"
    rubbish.mkdir(parents=True)
    client.cleanup()
    assert not rubbish.exists()
    assert client.mounts("kept")[0].source.startswith(str(running.root))
    assert Path(client.mounts("kept")[0].source).is_dir()


def test_mounts_say_what_prepare_said(client: Client, mounter: DirectoryMounter) -> None:
    top = pull(client, mounter.add("lazy", TWO))[-1]
    made = client.prepare("box", top)
    assert client.mounts("box") == made
    assert made[0].type == "overlay"
    with pytest.raises(RefusedError) as caught:
        client.mounts(top)
    assert caught.value.code == "FAILED_PRECONDITION"


def test_labels_change_by_path(client: Client) -> None:
    client.prepare("a", "", {"containerd.io/snapshot/x": "1", "containerd.io/snapshot/y": "2"})
    before = client.stat("a")
    info = client.update("a", {"containerd.io/snapshot/x": "9"}, "labels.containerd.io/snapshot/x")
    assert dict(info.labels) == {"containerd.io/snapshot/x": "9", "containerd.io/snapshot/y": "2"}
    assert info.updated_at.ToNanoseconds() > before.updated_at.ToNanoseconds()
    assert info.created_at == before.created_at
    assert dict(client.update("a", {}, "labels.containerd.io/snapshot/x").labels) == {
        "containerd.io/snapshot/y": "2"
    }
    assert dict(client.update("a", {"z": "3"}).labels) == {"z": "3"}
    for path in ("name", "parent", "kind", "created_at"):
        with pytest.raises(RefusedError, match="only labels"):
            client.update("a", {}, path)
    assert dict(client.stat("a").labels) == {"z": "3"}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.stat("no"), "NOT_FOUND"),
        (lambda c: c.usage("no"), "NOT_FOUND"),
        (lambda c: c.mounts("no"), "NOT_FOUND"),
        (lambda c: c.remove("no"), "NOT_FOUND"),
        (lambda c: c.update("no", {}), "NOT_FOUND"),
        (lambda c: c.commit("x", "no"), "NOT_FOUND"),
        (lambda c: c.prepare("x", "no"), "NOT_FOUND"),
        (lambda c: c.prepare("active"), "ALREADY_EXISTS"),
        (lambda c: c.prepare(""), "INVALID_ARGUMENT"),
        (lambda c: c.view("active"), "ALREADY_EXISTS"),
        (lambda c: c.prepare("x", "active"), "INVALID_ARGUMENT"),
        (lambda c: c.commit("x", "view"), "FAILED_PRECONDITION"),
        (lambda c: c.commit("done", "active"), "ALREADY_EXISTS"),
        (lambda c: c.names("kind=="), "INVALID_ARGUMENT"),
    ],
)
def test_what_cannot_be_is_refused_by_the_code_that_containerd_expects(
    client: Client, running: Running, call: object, code: str
) -> None:
    client.prepare("active")
    client.view("view")
    client.prepare("doing")
    client.commit("done", "doing")
    before = sorted(client.names())
    with pytest.raises(RefusedError) as caught:
        call(client)  # type: ignore[operator]
    assert caught.value.code == code
    assert sorted(client.names()) == before
    assert len(list((running.root / "snapshots").iterdir())) == 3  # nothing was left behind


def test_no_thread_of_grpc_runs_in_what_is_forked(running: Running) -> None:
    """Other tests mount from this process, and a mount's server must have one thread."""
    assert running.client.names() == []
    told = daemon.start(
        lambda tell: tell({"threads": _threads_after(0.2)}), mountpoint="threads", limit_s=60
    )
    assert told["threads"] == 1


def _threads_after(wait_s: float) -> int:
    time.sleep(wait_s)
    return len(os.listdir("/proc/self/task"))
